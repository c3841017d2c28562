"""`dualops.testing`: other people's operators, right and wrong, compared with the references."""

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from dualops import reference, testing
from dualops.spec import OPERATORS, Tag
from dualops.spec.meta import FLOATS, numpy_dtype
from dualops.testing.terms import flash_attention, rope_tables, terms_of
from dualops.testing.truth import bind

RNG = np.random.default_rng(0)


def in_blocks(x: np.ndarray, *, masked: bool = True) -> np.ndarray:
    """softmax as a Triton kernel has it: a row is loaded as a whole power of two of columns, those beyond it masked.

    Without `other=-inf` they are 0, as the mask of a load leaves them, and count as logits.
    """
    rows, columns = x.shape
    block = np.full((rows, 1 << (columns - 1).bit_length()), -np.inf if masked else 0.0, x.dtype)
    block[:, :columns] = x
    numerator = np.exp(block - block.max(axis=1, keepdims=True))
    return (numerator / numerator.sum(axis=1, keepdims=True))[:, :columns]


def test_a_softmax_with_an_unmasked_tail_is_caught():
    x = RNG.standard_normal((4, 300), np.float32)
    testing.check("softmax", in_blocks(x), {"x": x})
    wrong = in_blocks(x, masked=False)
    with pytest.raises(testing.Wrong) as caught:
        testing.check("softmax", wrong, {"x": x})
    assert isinstance(caught.value, AssertionError)
    place = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(wrong - in_blocks(x))), x.shape))
    message = str(caught.value)
    assert message.startswith("softmax float32, x (4, 300): y: max error ") and "limit" in message
    assert f"worst at {place}: {float(wrong[place])} instead of 0." in message
    assert caught.traceback[-1].frame.f_locals["__tracebackhide__"]  # pytest shows the caller's line


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_references_pass_and_what_is_off_does_not(operator: str, backward: bool):
    """In float32 and in bfloat16; a result that is off in one place by half of its largest is wrong."""
    if backward and not OPERATORS[operator].gradients:
        with pytest.raises(ValueError, match=f"^{operator}: backward is True, but it has no gradient$"):
            testing.cases(operator, backward=True)
        return
    function = getattr(reference, f"{operator}_backward" if backward else operator)
    for dtype in ("float32", "bfloat16"):
        problems = testing.cases(operator, Tag.SIM, backward=backward, dtype=dtype)
        problem = next(each for each in problems if all(map(all, each.case.shapes.values())))
        arrays = problem.arrays()
        got = function(**arrays, **problem.params)
        got = list(got) if isinstance(got, tuple) else [got]
        found = testing.check(operator, got, arrays, problem.params, backward)
        assert len(found) == len(got) and all(each.passed for each in found.values())
        spoilt = np.array(got[0], order="C")
        spoilt.flat[-1] = float(spoilt.flat[-1]) + 0.5 * float(np.abs(spoilt.astype(np.float32)).max())
        name, last = next(iter(found)), tuple(size - 1 for size in spoilt.shape)
        with pytest.raises(testing.Wrong, match=rf"{name}: max error .*worst at {re.escape(str(last))}: "):
            testing.check(operator, {name: spoilt}, arrays, problem.params, backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_times_a_tenth_more_are_wrong(operator: str, backward: bool):
    """No operator's tolerance is blind: each result of each small case that is not 0 is found wrong."""
    if backward and not OPERATORS[operator].gradients:
        return  # tested above
    function = getattr(reference, f"{operator}_backward" if backward else operator)
    checked = 0
    for problem in testing.cases(operator, Tag.SIM, backward=backward, dtype="float32"):
        arrays = problem.arrays()
        found = function(**problem.arrays(), **problem.params)
        found = found if isinstance(found, tuple) else (found,)
        bound = bind(OPERATORS[operator], arrays, problem.params, backward)
        names = bound.outputs(OPERATORS[operator].gradients if backward else OPERATORS[operator].outputs)
        more = {name: 1.1 * result.astype(np.float64) for name, result in zip(names, found, strict=True)}
        there = [name for name, result in more.items() if np.nan_to_num(result, posinf=0, neginf=0).any()]
        if there:
            with pytest.raises(testing.Wrong) as caught:
                testing.check(operator, {name: more[name] for name in there}, arrays, problem.params, backward)
            for name in there:
                assert re.search(rf"(^|: ){name}: max error ", str(caught.value), re.MULTILINE), (problem, name)
            checked += 1
    assert checked


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("last", [1000, 131072, 10**6])
def test_tables_of_large_angles_are_held_to_what_float64_knows(last: int, dtype: str):
    """The spec has angles in float64: angles in float32 are wrong, and so are two last bits of narrower tables."""
    positions = np.arange(last - 3, last)
    cos, sin = reference.rope_tables(positions, 64, dtype=dtype)
    found = testing.check("rope_tables", (cos, sin), {"positions": positions}, {"dim": 64, "dtype": dtype})
    eps = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)
    assert max(each.limit.max for each in found.values()) <= (1.6 * eps if dtype != "float64" else 33 * last * eps)
    exact, _ = reference.rope_tables(positions, 64, dtype="float64")
    angles = positions[:, None].astype(np.float32) * np.float32(10000) ** (np.arange(32, dtype=np.float32) / -32)
    wrong = {"a tenth more": 1.1 * exact, "swapped": sin}
    wrong |= {"angles in float32": np.cos(angles).astype(np.float64)} if dtype in ("float32", "float64") else {}
    wrong |= {"two last bits": exact * (1 + 4 * eps)} if dtype != "float64" else {}
    for each in wrong.values():
        with pytest.raises(testing.Wrong, match=r"cos: max error "):
            testing.check("rope_tables", {"cos": each}, {"positions": positions}, {"dim": 64, "dtype": dtype})


def test_where_any_result_would_pass_that_is_an_error():
    """Squares of rows near 1e30 overflow in float32: the baseline's y is 0, and so its limit would pass noise."""
    x = RNG.standard_normal((4, 64), np.float32)
    one_row = np.where(np.arange(4)[:, None] == 1, np.float32(1e30), np.float32(1))
    message = (
        r"_norm float32, .*: y: nothing is checked: the baseline, float32 arithmetic rounded to float32, is off by "
    )
    for operator in ("rms_norm", "layer_norm"):
        right = getattr(reference, operator)(x)
        testing.check(operator, right, {"x": x})
        for huge in (x * np.float32(1e30), x * one_row):
            for got in (right, np.zeros_like(x), right * np.float32(1.2)):
                with pytest.raises((testing.Vacuous, testing.Wrong)) as caught:
                    testing.check(operator, got, {"x": huge})
                assert got is not right or isinstance(caught.value, testing.Vacuous)
                assert isinstance(caught.value, testing.Wrong) or re.search(message, str(caught.value))
    overflows = {"a": np.full((2, 3), 300, np.float16), "b": np.full((3, 2), 300, np.float16)}
    infinite = np.full((2, 2), np.inf, np.float16)
    message = r"y: inf at \(0, 0\), expected 270000.* the baseline, .*float16, is inf there"
    with pytest.raises(testing.Vacuous, match=message):
        testing.check("matmul", infinite, overflows)
    with pytest.raises(testing.Wrong, match=r"y: max error 1.00e\+00"):
        testing.check("matmul", np.zeros((2, 2), np.float16), overflows)
    testing.check("matmul", np.full((2, 2), 270000.0, np.float32), overflows)
    positions = np.array([10**16, -(2**62)])
    cos, sin = reference.rope_tables(positions, 4)
    with pytest.raises(testing.Vacuous, match=r"cos: nothing is checked: the arithmetic knows nothing of a result of"):
        testing.check("rope_tables", (cos, sin), {"positions": positions}, {"dim": 4})


@pytest.mark.parametrize("operator", [name for name, spec in OPERATORS.items() if spec.gradients])
def test_what_forward_saves_need_not_be_given(operator: str):
    """A gradient from forward's arguments and the incoming gradients: as in truth, all of it is computed in float64."""
    spec = OPERATORS[operator]
    for problem in testing.cases(operator, Tag.SIM, backward=True, dtype="float32"):
        saved = problem.arrays()
        made = {output.name for output in spec.outputs}
        arrays = {name: array for name, array in saved.items() if name not in made}
        forward = next(each for each in testing.cases(operator, Tag.SIM) if each.case == problem.case).arrays()
        got = getattr(reference, f"{operator}_backward")(**saved, **problem.params)
        testing.check(operator, got, {**arrays, **forward}, problem.params, backward=True)


class Jax:
    """An array like JAX's: `np.asarray` converts it to NumPy's, with ml_dtypes' bfloat16."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("wrapped", [tensor, Jax, np.asarray], ids=["torch", "jax", "ml_dtypes"])
def test_bfloat16_of_any_library(wrapped: Any):
    x = RNG.standard_normal((3, 70)).astype(ml_dtypes.bfloat16)
    y = reference.softmax(x)
    wrong = y * ml_dtypes.bfloat16(1.015625)  # every element off by two of its last bits
    testing.check("softmax", wrapped(y), {"x": wrapped(x)})
    with pytest.raises(testing.Wrong, match=r"^softmax bfloat16, x "):
        testing.check("softmax", wrapped(wrong), {"x": wrapped(x)})


def test_a_wrong_nan_and_a_wrong_shape_are_wrong_results():
    q, k, v = RNG.standard_normal((3, 1, 2, 5, 8), np.float32)
    o, lse = reference.flash_attention(q, k, v, causal=True, return_lse=True)
    params = {"causal": True, "return_lse": True}
    o[0, 1, 3, 2] = np.nan
    with pytest.raises(testing.Wrong, match=r"causal=True, return_lse=True: o: nan at \(0, 1, 3, 2\), expected -?\d"):
        testing.check("flash_attention", (o, lse), {"q": q, "k": k, "v": v}, params)
    with pytest.raises(testing.Wrong, match=r"lse has shape \(2, 5\), expected \(1, 2, 5\)"):
        testing.check("flash_attention", {"lse": lse[0]}, {"q": q, "k": k, "v": v}, params)
    with pytest.raises(testing.Wrong, match="flash_attention: got 1 results, expected 2: o, lse"):
        testing.check("flash_attention", o, {"q": q, "k": k, "v": v}, params)


X = RNG.standard_normal((2, 3), np.float32)


@pytest.mark.parametrize(
    ("operator", "got", "arrays", "params", "error", "words"),
    [
        ("sofmax", X, {"x": X}, {}, ValueError, "operator is 'sofmax', expected one of flash_attention, "),
        ("softmax", X, {"y": X}, {}, TypeError, "softmax: unknown array y, expected some of x"),
        ("softmax", X, {}, {}, TypeError, "softmax: x is missing, expected an array of float64, "),
        ("softmax", X, {"x": X}, {"dim": 1}, TypeError, "softmax: unknown parameter dim, expected axis"),
        ("softmax", X, {"x": X}, {"axis": 2}, ValueError, "softmax: axis is 2, expected -2 to 1 for x of shape"),
        ("softmax", {"z": X}, {"x": X}, {}, ValueError, "softmax: got has z, expected some of y"),
        ("softmax", X, {"x": X}, {}, ValueError, "softmax: y lies where x does, expected a copy of x from before"),
        ("softmax", "y", {"x": X}, {}, TypeError, "softmax: y: a builtins.str is no array of numbers"),
    ],
)
def test_a_call_that_asks_nothing_raises_an_error_that_says_why(operator, got, arrays, params, error, words):
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        testing.check(operator, got, arrays, params)


def test_cases_say_which_there_are():
    with pytest.raises(ValueError, match="softmax: no case of dtype int8, expected one of float64, float32, "):
        testing.cases("softmax", dtype="int8")
    with pytest.raises(ValueError, match="'tset' is not a valid Tag"):
        testing.cases("softmax", "tset")
    both = testing.cases("softmax", ["sim", Tag.EDGE])
    assert {str(each) for each in both} == {
        case.id for case in OPERATORS["softmax"].cases if case.tags & {Tag.SIM, Tag.EDGE}
    }


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_random_cases_are_problems_that_references_pass(operator: str, backward: bool):
    if backward and not OPERATORS[operator].gradients:
        with pytest.raises(ValueError, match=f"^{operator}: backward is True, but it has no gradient$"):
            testing.random_cases(operator, 1, backward=True)
        return
    function = getattr(reference, f"{operator}_backward" if backward else operator)
    problems = testing.random_cases(operator, 12, seed=2, max_elements=400, backward=backward)
    assert len({str(problem) for problem in problems}) == 12
    for problem in problems:
        arrays = problem.arrays()
        got = function(**problem.arrays(), **problem.params)
        found = testing.check(operator, got, arrays, problem.params, backward)
        assert all(each.passed for each in found.values())


def test_random_cases_repeat_in_the_dtypes_that_are_wanted():
    def drawn(*args: Any, **options: Any) -> list[tuple[Any, ...]]:
        problems = testing.random_cases("softmax", *args, **options)
        return [(str(each), each.params, each.arrays()["x"].tobytes()) for each in problems]

    assert drawn(20)[:8] == drawn(8)
    assert drawn(8) != drawn(8, seed=1)
    assert drawn(0) == []
    dtypes = {name: testing.random_cases("lion", 40, dtypes=name) for name in ("float16", "bfloat16")}
    assert all({case.case.dtype for case in cases} == {name} for name, cases in dtypes.items())
    two = testing.random_cases("lion", 40, dtypes=iter(dtypes))
    assert {case.case.dtype for case in two} == dtypes.keys()


@pytest.mark.parametrize(
    ("operator", "count", "options", "message"),
    [
        ("softmin", 1, {}, f"operator is 'softmin', expected one of {', '.join(OPERATORS)}"),
        ("softmax", -1, {}, "softmax: count is -1, expected 0 or more"),
        ("softmax", 1, {"seed": -2}, "softmax: seed is -2, expected 0 or more"),
        ("matmul", 1, {"max_elements": 63}, "matmul: max_elements is 63, expected 64 or more"),
        ("rope", 1, {"dtypes": "int8"}, "rope: dtypes are int8, expected some of float64, float32, float16, bfloat16"),
        ("rope", 1, {"dtypes": ()}, "rope: dtypes are none, expected some of float64, .*"),
    ],
)
def test_random_cases_say_what_they_expected(operator, count, options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        testing.random_cases(operator, count, **options)


def test_an_operator_that_draws_nothing_has_no_random_cases(monkeypatch):
    monkeypatch.setitem(OPERATORS, "softmax", replace(OPERATORS["softmax"], draw=None))
    with pytest.raises(ValueError, match=r"^softmax: its Spec has no draw, expected a function that makes "):
        testing.random_cases("softmax", 1)


def test_what_cancels_is_stated_by_the_record_or_else_by_a_module():
    softmax, norm, varlen = (OPERATORS[name] for name in ("softmax", "layer_norm", "flash_attention_varlen"))
    assert terms_of(softmax, True) is softmax.gradient_terms
    assert (terms_of(norm, False), terms_of(norm, True)) == (norm.terms, norm.gradient_terms)
    assert terms_of(OPERATORS["rope_tables"], False) is rope_tables.result_terms
    assert terms_of(varlen, True) is flash_attention.gradient_terms  # its parent's
    x = {"x": np.ones((2, 3))}
    for spec, backward in ((softmax, False), (OPERATORS["rope"], False), (OPERATORS["rope"], True)):
        assert terms_of(spec, backward)(x, bind(softmax, x, {}, False)) == {}
