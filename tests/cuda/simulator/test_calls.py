"""Calls of dualops.cuda: results in the caller's memory, the same bits twice, wrong calls refused before they run."""

from math import prod
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference, testing
from dualops.cuda import simulator
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.device import current
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.simulator import Pointer
from dualops.spec import OPERATORS, Case, Tag
from dualops.spec.meta import FLOATS, numpy_dtype
from tests.checks import call, gradient_inputs
from tests.cuda.operators import DIRECTIONS, Direction, every_direction
from tests.problems import values

SOFTMAX = OPERATORS["softmax"]
# simt along either axis, the others along contiguous rows
RUNGS_AND_AXES = [(rung, axis) for rung in SOFTMAX.rungs for axis in (0, 1) if axis == 1 or rung == "simt"]
every_rung = pytest.mark.parametrize(("rung", "axis"), RUNGS_AND_AXES)


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(numpy_dtype(dtype))


def same_bits(one: np.ndarray, two: np.ndarray) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def cases_with_elements(direction: Direction) -> list[Case]:
    cases = [case for case in direction.spec.tagged(Tag.SIM) if case.backward or not direction.backward]
    return [case for case in cases if all(map(prod, case.shapes.values()))]


@pytest.fixture
def untouched(monkeypatch):
    """Fails a test in which a kernel is launched."""

    def launched(*_, **__):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(simulator, "launch", launched)


# --- results -----------------------------------------------------------------------------------------


def cases_for_every_kernel() -> list[Any]:
    """(direction, case): small cases, of which each has a kernel that none before it has, by the best rungs."""
    seen = set[str]()
    chosen = []
    every = [(direction, case) for direction in DIRECTIONS for case in cases_with_elements(direction)]
    for direction, case in sorted(every, key=lambda each: sum(map(prod, each[1].shapes.values()))):
        problem = absent_problem(direction.spec, case, direction.backward)
        operation = OPERATIONS[direction.spec.name][direction.backward]
        best = next(iter(operation.choices(problem, problem.outputs(operation.outputs), current())))
        kernels = {step.kernel.name for step in best.steps()}
        if not kernels <= seen:
            seen |= kernels
            chosen.append(pytest.param(direction, case, id=f"{direction.name}-{case.id}"))
    return chosen


@pytest.mark.parametrize(("direction", "case"), cases_for_every_kernel())
def test_call_one_equals_call_two_bit_for_bit_in_either_order(direction, case):
    inputs = gradient_inputs(direction.spec, case) if direction.backward else values(direction.spec, case)
    found = []
    for name in ("forward", "reversed"):
        with simulator.order(name):
            own = {array: x.copy() for array, x in inputs.items()}  # some are overwritten
            results = call(direction.function(), direction.inputs, own, **case.params)
        found.append(results if isinstance(results, tuple) else (results,))
    assert all(same_bits(one, two) for one, two in zip(*found, strict=True))


@every_direction
def test_out_is_what_comes_back(direction, nothing_runs):
    case = min(cases_with_elements(direction), key=lambda case: sum(map(prod, case.shapes.values())))
    inputs = gradient_inputs(direction.spec, case) if direction.backward else values(direction.spec, case)
    results = call(direction.function(), direction.inputs, inputs, **case.params)
    out = tuple(map(np.empty_like, results)) if isinstance(results, tuple) else np.empty_like(results)
    again = call(direction.function(), direction.inputs, inputs, **case.params, out=out)
    if isinstance(out, tuple):
        assert all(one is two for one, two in zip(again, out, strict=True))
    else:
        assert again is out


def test_softmax_backward_in_place_of_dy():
    y, dy = reference.softmax(numbers(4, 33)), numbers(4, 33)
    expected = dualops.cuda.softmax_backward(y, dy)
    dualops.cuda.softmax_backward(y, dy, out=dy)
    assert same_bits(dy, expected)


def test_a_plan_for_one_alignment_does_not_serve_another():
    """The address decides whether 16 bytes may be read at once; the layout is the same."""
    memory = np.zeros(4 * 64 + 8, np.float32)
    start = -memory.ctypes.data % 16 // 4
    x = numbers(4, 64)
    for offset in (0, 1, 2, 0, 3):
        view = memory[start + offset :][: 4 * 64].reshape(4, 64)
        view[:] = x
        assert np.allclose(dualops.cuda.softmax(view), reference.softmax(x), atol=1e-6)


def test_plan_says_rung_and_reason(untouched):
    text = repr(dualops.cuda.plan("softmax", numbers(4, 64), kernel="naive"))
    assert "rung naive" in text and "one thread per row" in text and "N=64" in text
    assert "rung simt" in str(dualops.cuda.plan("softmax", numbers(4, 64), numbers(4, 64), backward=True))


@pytest.mark.parametrize("rung", ["naive", "sm90"])
def test_strided_rows_are_left_to_simt(rung, untouched):
    y = numbers(4, 64)
    for arrays, backward in (((y,), False), ((y, y), True)):
        with pytest.raises(NotImplementedError, match=f"rung {rung} does not do softmax"):
            dualops.cuda.plan("softmax", *arrays, axis=0, kernel=rung, backward=backward)
        assert "rung simt" in repr(dualops.cuda.plan("softmax", *arrays, axis=0, backward=backward))


@pytest.mark.parametrize("rung", ["naive", "simt"])
@pytest.mark.parametrize("operator", ["flash_attention_varlen", "retention_varlen"])
def test_blocks_are_for_the_tokens_that_there_are(operator, rung, untouched):
    """Not for sequences as long as the caller said that they may be."""
    tokens, ends = numbers(9, 2, 8), np.array([0, 4, 9], np.int32)
    sides = ("_q", "_k") if operator.startswith("flash") else ("",)
    arrays = {"q": tokens, "k": tokens, "v": tokens, **{f"cu_seqlens{side}": ends for side in sides}}
    plans = []
    for longest in (9, 100_000, None):
        said: dict[str, Any] = {f"max_seqlen{side}": longest for side in sides}
        plans.append(dualops.cuda.plan(operator, **arrays, **said, kernel=rung))
    grids = [[step.grid for step in plan.steps] for plan in plans]
    assert grids[0] == grids[1] == grids[2]
    assert plans[0].choice.workspace == plans[1].choice.workspace == plans[2].choice.workspace


@pytest.mark.parametrize("operator", ["flash_attention_varlen", "retention_varlen"])
def test_the_longest_sequence_may_be_left_unsaid(operator):
    """Also by calls of other sizes, which are of one family."""
    inputs = OPERATORS[operator].inputs
    names = [entry.name for entry in inputs if not entry.optional or entry.name == "cu_seqlens_k"]
    for count in (9, 12, 7):
        tokens, ends = numbers(count, 2, 8), np.array([0, 4, count], np.int32)
        given = (tokens, tokens, tokens, *(ends, ends)[: 2 if operator.startswith("flash") else 1])
        testing.check(operator, getattr(dualops.cuda, operator)(*given), dict(zip(names, given)))


def test_key_ranges_of_other_numbers_are_one_family():
    """Other sequences, lengths and sums of them: what was made for the first call serves them, in both directions."""
    operations, made = OPERATIONS["flash_attention_varlen"], []
    for count, starts, lengths in ((9, (0, 2), (9, 5)), (12, (3, 0, 6), (4, 12, 6)), (7, (1, 1, 1, 0), (2, 6, 3, 7))):
        B, tokens = len(starts), numbers(count, 2, 8)
        arrays = {"q": numbers(3 * B, 2, 8), "k": tokens, "v": tokens}
        ends = {"cu_seqlens_q": range(0, 3 * B + 1, 3), "k_starts": starts, "k_lengths": lengths}
        arrays |= {name: np.array(each, np.int32) for name, each in ends.items()}
        sizes: dict[str, Any] = {"max_seqlen_q": 3, "max_seqlen_k": max(lengths), "total_k_lengths": sum(lengths)}
        forward = {**sizes, "return_lse": True}
        o, lse = dualops.cuda.flash_attention_varlen(**arrays, **forward, kernel="naive")
        testing.check("flash_attention_varlen", (o, lse), arrays, forward)
        arrays |= {"o": o, "lse": lse, "do": numbers(3 * B, 2, 8)}
        found = dualops.cuda.flash_attention_varlen_backward(**arrays, **sizes, kernel="naive")
        testing.check("flash_attention_varlen", found, arrays, sizes, backward=True)
        made.append([sum(map(len, operation.families.values())) for operation in operations])
    assert made[0] == made[1] == made[2]


# --- special values ----------------------------------------------------------------------------------


@every_rung
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("order", "poison"), [("forward", np.nan), ("reversed", np.inf)], indirect=["order"])
def test_what_poisons_a_row_poisons_that_row_alone(rung, dtype, axis, poison, order):
    x = numbers(6, 64, dtype=dtype)
    clean = dualops.cuda.softmax(x, axis, kernel=rung)
    x[2, 4] = poison
    y = dualops.cuda.softmax(x, axis, kernel=rung)
    struck = np.zeros(x.shape, bool)
    struck[2 if axis == 1 else slice(None), slice(None) if axis == 1 else 4] = True
    assert np.isnan(y[struck].astype(np.float64)).all()
    assert same_bits(y[~struck], clean[~struck])


@every_rung
@pytest.mark.parametrize("dtype", FLOATS)
def test_minus_infinity_is_a_probability_of_zero_and_a_row_of_nothing_else_is_nan(rung, dtype, axis, order):
    x = np.full((72, 3), -np.inf, numpy_dtype(dtype))
    x[69, 1], x[[0, 5], 2] = 0, 3
    y = dualops.cuda.softmax(x if axis == 0 else np.ascontiguousarray(x.T), axis, kernel=rung)
    y = (y if axis == 0 else y.T).astype(np.float64)
    assert np.isnan(y[:, 0]).all()
    assert y[69, 1] == 1 and (y[:69, 1] == 0).all()
    assert y[0, 2] == y[5, 2] == 0.5 and y[:, 2].sum() == 1


# --- wrong calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        ([1.0, 2.0], {}, TypeError, "softmax: x is a builtins.list, expected a NumPy array"),
        (3.0, {}, TypeError, "softmax: x is a builtins.float"),
        (None, {}, TypeError, "softmax: x is missing, expected an array"),
        (np.zeros(()), {}, ValueError, "x has no axes, expected at least one"),
        (np.zeros((2, 3), int), {}, TypeError, "x has dtype int64, expected one of float64"),
        (np.zeros((2, 3), ">f4"), {}, TypeError, "x has dtype >f4"),
        (np.zeros((2, 3))[:, ::-1], {}, NotImplementedError, "x has a negative stride"),
        (np.zeros((2, 3)), {"kernel": "wgmma"}, ValueError, "kernel is 'wgmma', expected one of naive, simt"),
        (np.zeros((2, 3)), {"out": np.zeros((3, 2))}, ValueError, r"out y has shape \(3, 2\), expected \(2, 3\)"),
        (np.zeros((2, 3)), {"out": np.zeros((2, 3), "f4")}, TypeError, "out y has dtype float32, expected float64"),
        (np.zeros((2, 3)), {"out": [0.0]}, TypeError, "out y is a builtins.float, expected a NumPy array"),
        (np.zeros((2, 3)), {"out": ()}, ValueError, "out has 0 arrays, expected 1: y"),
        (np.zeros((2, 3)), {"out": (np.zeros((2, 3)),) * 2}, ValueError, "out has 2 arrays, expected 1: y"),
        (np.zeros((2, 3)), {"out": np.zeros((1, 3)).repeat(2, 0)[::-1]}, NotImplementedError, "out y has a negative"),
        (np.zeros((2, 3)), {"out": np.broadcast_to(np.zeros(3), (2, 3))}, ValueError, "elements overlap one another"),
    ],
)
def test_softmax_refuses(x, options, error, message, untouched):
    with pytest.raises(error, match=message):
        dualops.cuda.softmax(x, **options)
    with pytest.raises(error, match=message):  # not only the first time
        dualops.cuda.softmax(x, **options)


def test_after_a_right_call_a_wrong_one_like_it_is_still_refused():
    x = np.zeros((2, 3))
    dualops.cuda.softmax(x, 1)
    axis: Any
    for axis in (1.0, True, np.float64(1)):
        with pytest.raises(TypeError, match="expected an integer"):
            dualops.cuda.softmax(x, axis)
    axis = np.int32(1)
    assert same_bits(dualops.cuda.softmax(x, axis), dualops.cuda.softmax(x, 1))


def test_torch_tensors_are_for_the_bridge(untouched):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"x is a torch\.Tensor, expected a NumPy array: kernels run in the simulator"):
        dualops.cuda.softmax(torch.zeros(2, 3))


def test_results_that_overlap_what_is_read(untouched):
    memory = np.zeros(100)
    x = memory[:60].reshape(6, 10)
    for out in (memory[10:70].reshape(6, 10), memory[1:61].reshape(6, 10), x.reshape(10, 6).T):
        if out.shape == x.shape:
            with pytest.raises(ValueError, match="softmax: out y overlaps x in memory"):
                dualops.cuda.softmax(x, out=out)
    q = np.zeros((1, 1, 4, 8))
    with pytest.raises(ValueError, match="out o overlaps q"):
        dualops.cuda.flash_attention(q, q.copy(), q.copy(), out=q)
    o = np.zeros(64)
    with pytest.raises(ValueError, match="out lse overlaps out o"):
        dualops.cuda.flash_attention(
            q, q, q, return_lse=True, out=(o[:32].reshape(1, 1, 4, 8), o[31:35].reshape(1, 1, 4))
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": "sm100"}, ValueError, "kernel is 'sm100', expected one of naive, simt, sm80, sm90"),
        ({"kernel": "sm90"}, NotImplementedError, "rung sm90 does not do"),
        ({"out": np.zeros((1, 2, 4, 9))}, ValueError, "out o has shape"),
        ({"return_lse": True, "out": np.zeros((1, 2, 4, 8))}, ValueError, "1 arrays, expected 2"),
        # the kernels write rows whose elements are neighbours, as they read them
        ({"out": np.zeros((1, 2, 4, 16))[..., ::2]}, (ValueError, NotImplementedError), "stride"),
    ],
)
def test_attention_refuses(options, error, message, untouched):
    with pytest.raises(error, match=message):
        dualops.cuda.flash_attention(*(np.zeros((1, 2, 4, 8)) for _ in "qkv"), **options)


def test_rows_along_more_strides_than_the_kernels_walk(untouched):
    x = np.zeros((3, 5, 5, 6, 7))[:, ::2, ::2, ::2, ::2]
    with pytest.raises(NotImplementedError, match=r"softmax: no kernel does .* with strides x \("):
        dualops.cuda.softmax(x)


def test_rows_that_merge_into_three_strides_are_done():
    x = numbers(2, 3, 2, 3, 5)[:, ::2]
    assert np.allclose(dualops.cuda.softmax(x), reference.softmax(x), atol=1e-6)


# --- the ordinary way of Numba -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_launched_the_ordinary_way_gives_the_same(dtype, order):
    x = numbers(5, 67, dtype=dtype)
    plan = dualops.cuda.plan("softmax", x, axis=-1)
    (step,) = plan.steps
    y = np.zeros_like(x)
    words = {name: a.view(np.uint16) if dtype == "bfloat16" else a for name, a in (("x", x), ("y", y))}

    def placed(argument: Any) -> Any:
        """Names of arrays become pointers, in records, too."""
        if isinstance(argument, tuple):
            parts = map(placed, argument)
            return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
        return Pointer(words[argument].reshape(-1), argument) if argument in ("x", "y") else argument

    step.kernel[step.grid, step.kernel.threads](*map(placed, step.args))
    assert same_bits(y, dualops.cuda.softmax(x))
