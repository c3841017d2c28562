"""The checker itself, with references in place of kernels: right ones pass in every way, wrong ones are rejected."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dualops import reference
from dualops.spec import OPERATORS, Case, Spec, Tag
from dualops.spec.attention.cases import EVERYTHING, paired
from dualops.spec.meta import FLOATS
from tests.checks import Rejected, check, gradient_inputs
from tests.problems import elements, layouts_of, random_layout

PLAIN, VARLEN = OPERATORS["flash_attention"], OPERATORS["flash_attention_varlen"]


def everything(dtype: str) -> Case:
    shapes, params = paired({**EVERYTHING, "window": (6, None)}, (2, 4, 9, 8), (2, 13), 4)
    return Case("everything", dtype, shapes, params, seed=3)


def kernel(function: Callable[..., Any], change: Callable[[dict[str, Any]], Any] | None = None) -> Callable[..., Any]:
    """A reference that writes to `out`, as kernels do; `change` may spoil its optional arguments before the call."""

    def run(*arrays: Any, out: Any = None, **options: Any) -> Any:
        if change is not None:
            options |= change(options)
        results = function(*arrays, **options)
        for given, result in zip(*((x if isinstance(x, tuple) else (x,)) for x in (out, results))):
            if given is not None:
                given[...] = result
        return results if out is None else out

    return run


def direction(spec: Spec, backward: bool) -> Callable[..., Any]:
    return getattr(reference, f"{spec.name}_backward" if backward else spec.name)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("spec", [PLAIN, VARLEN], ids=lambda spec: spec.name)
def test_references_pass(spec, special, backward):
    for case in spec.tagged(Tag.SIM):
        if elements(case) < 5000:
            check(spec, case, kernel(direction(spec, backward)), backward=backward, special=special)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_references_pass_however_they_are_called(dtype, backward):
    case = everything(dtype)
    inputs = PLAIN.gradient_inputs if backward else PLAIN.inputs
    shapes = {name: array.shape for name, array in gradient_inputs(PLAIN, case).items()}
    rng = np.random.default_rng(2)
    layouts = layouts_of(inputs, shapes, rng)
    out_layout = random_layout(shapes["q"], rng, contiguous_last=True, broadcast=False)
    # a reference keeps no order of axes in what it allocates
    given: dict[str, Any] = {"layouts": layouts, "out_layout": out_layout, "ways": ("given",)}
    hows: list[dict[str, Any]] = [{"host": True}, {"narrow": True}, given]
    for how in hows:
        check(PLAIN, case, kernel(direction(PLAIN, backward)), backward=backward, **how)


@pytest.mark.parametrize("wanted", [False, True])
def test_what_backward_alone_takes(wanted):
    seen = []

    def run(*arrays: Any, bias_gradient: bool, **options: Any) -> Any:
        seen.append(bias_gradient)
        return kernel(reference.flash_attention_backward)(*arrays, bias_gradient=bias_gradient, **options)

    check(PLAIN, everything("float32"), run, backward=True, extra={"bias_gradient": wanted})
    assert seen == [wanted, wanted]


def test_seeds_and_weights_come_as_asked():
    seen = []

    def run(*arrays: Any, **options: Any) -> Any:
        seen.append((type(options["seed"]), options["sinks"].dtype.name))
        return kernel(reference.flash_attention)(*arrays, **options)

    hows: list[dict[str, Any]] = [{}, {"host": True}, {"narrow": True}]
    for how in hows:
        check(PLAIN, everything("float16"), run, ways=("given",), **how)
    assert seen == [(np.ndarray, "float32"), (int, "float32"), (np.ndarray, "float16")]


@pytest.mark.parametrize("place", range(5), ids=["dq", "dk", "dv", "dbias", "dsinks"])
@pytest.mark.parametrize("spoil", ["bfloat16", "sign", "one element", "half of a row"])
def test_each_gradient_is_looked_at(place, spoil):
    def run(*arrays: Any, **options: Any) -> Any:
        results = list(reference.flash_attention_backward(*arrays, **options))
        wrong = results[place].copy()
        if spoil == "bfloat16":
            wrong = wrong.astype(ml_dtypes.bfloat16).astype(np.float32)
        elif spoil == "sign":
            wrong = -wrong
        elif spoil == "one element":
            wrong.flat[wrong.size // 2] += 0.02 * np.abs(wrong).max()
        else:
            wrong[..., : wrong.shape[-1] // 2] *= 1.01
        return *results[:place], wrong, *results[place + 1 :]

    with pytest.raises(Rejected, match=f": {('dq', 'dk', 'dv', 'dbias', 'dsinks')[place]}: "):
        check(PLAIN, everything("float32"), run, backward=True, ways=("allocated",))


def overwrites(*arrays: Any, out: Any, **options: Any) -> Any:
    results = kernel(reference.flash_attention)(*arrays, out=out, **options)
    options["key_padding_mask"][0, 0] ^= True
    return results


def forgets(*arrays: Any, out: Any, **options: Any) -> Any:
    results = reference.flash_attention(*arrays, **options)
    out[0][...] = results[0]
    out[1].reshape(-1)[1:] = results[1].reshape(-1)[1:]
    return out


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (overwrites, "input key_padding_mask, or memory around it, was written"),
        (forgets, r"1 elements were never written, the first at \(0, 0, 0\)"),
    ],
)
def test_stray_and_missing_writes_are_rejected(run, message):
    with pytest.raises(Rejected, match=message):
        check(PLAIN, everything("float32"), run, ways=("given",))


def test_what_backward_takes():
    """lse whatever the case asks for, its gradient where the case asks for it, 0 where lse is -inf."""
    shapes = {"q": (1, 2, 9, 4), "k": (1, 1, 5, 4), "v": (1, 1, 5, 3)}
    without = gradient_inputs(PLAIN, Case("a", "float16", shapes, {"causal": True}))
    assert list(without) == ["q", "k", "v", "o", "lse", "do"]
    asked = gradient_inputs(PLAIN, Case("a", "float16", shapes, {"causal": True, "return_lse": True}))
    assert list(asked) == ["q", "k", "v", "o", "lse", "do", "dlse"]
    assert {name: array.dtype.name for name, array in asked.items() if array.dtype != np.float16} == {
        "lse": "float32",
        "dlse": "float32",
    }
    hidden = asked["lse"] == -np.inf
    assert hidden.sum() == 8 and (asked["dlse"][hidden] == 0).all() and (asked["dlse"][~hidden] != 0).all()
    for name in without:
        assert np.array_equal(without[name], asked[name])
