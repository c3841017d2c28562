"""The gradient of attention: against finite differences in float64, blocked against plain, and what must hold of it."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.reference import flash_attention_backward, flash_attention_backward_blocked
from dualops.spec import OPERATORS, Case, Spec, Tag, compare
from dualops.spec.attention.draws import cubed, cubed_slope
from dualops.testing.terms.flash_attention import gradient_terms
from dualops.testing.truth import bind, widened
from tests.checks import call, gradient_inputs
from tests.problems import random_problems

SPEC, VARLEN = OPERATORS["flash_attention"], OPERATORS["flash_attention_varlen"]
QKV = {"q": (2, 4, 5, 3), "k": (2, 2, 6, 3), "v": (2, 2, 6, 2)}
BLOCKS = [(64, 64), (16, 8), (7, 30), (1, 1000)]

pytestmark = pytest.mark.filterwarnings("error")


def wide(spec: Spec, case: Case) -> dict[str, Any]:
    """What backward takes, in float64, dlse with it, and lse as exact as the rest."""
    case = Case(case.name, "float64", case.shapes, {**case.params, "return_lse": True}, seed=case.seed)
    return gradient_inputs(spec, case)


def backward(spec: Spec, arrays: dict[str, Any], **params: Any) -> tuple[np.ndarray, ...]:
    return call(getattr(reference, f"{spec.name}_backward"), spec.gradient_inputs, arrays, **params)


def loss(spec: Spec, arrays: dict[str, Any], **params: Any) -> float:
    """What `do` and `dlse` are the gradient of."""
    given = {entry.name: arrays[entry.name] for entry in spec.inputs if entry.name in arrays}
    o, lse = call(getattr(reference, spec.name), spec.inputs, given, **{**params, "return_lse": True})
    there = lse != -np.inf
    return float((o * arrays["do"]).sum() + (lse[there] * arrays["dlse"][there]).sum())


def hold_gradients(spec: Spec, arrays: dict[str, Any], directions: int = 2, **params: Any) -> None:
    """Each gradient along random directions, against central differences of fourth order."""
    names = [name for name in ("q", "k", "v", "bias", "sinks") if name in arrays]
    rng, step = np.random.default_rng(1), 1e-3
    gradients = backward(spec, arrays, **params)
    assert len(gradients) == len(names)
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.shape == arrays[name].shape and gradient.dtype == arrays[name].dtype
        for _ in range(directions if gradient.size else 0):
            direction = rng.standard_normal(gradient.shape)
            moved = [np.asarray(arrays[name] + n * step * direction) for n in (-2, -1, 1, 2)]
            at = [loss(spec, {**arrays, name: array}, **params) for array in moved]
            expected = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * step)
            found = (gradient * direction).sum()
            assert abs(found - expected) <= 1e-8 * (np.abs(gradient * direction).sum() + 1), (name, found, expected)


def named(spec: Spec) -> list[Any]:
    """One case of each name that is small, or has options."""
    wanted = [case for case in spec.cases if Tag.SIM in case.tags or "options" in case.name or "mods" in case.name]
    cases = {case.name: case for case in wanted if Tag.COMPILE not in case.tags}
    return [pytest.param(spec, case, id=f"{spec.name}-{case.name}") for case in cases.values()]


@pytest.mark.parametrize(("spec", "case"), [*named(SPEC), *named(VARLEN)])
def test_cases_against_finite_differences(spec, case):
    params = {name: value for name, value in case.params.items() if name != "return_lse"}
    hold_gradients(spec, wide(spec, case), **params)


BIAS_SHAPES = [
    tuple(size if there else 1 for size, there in zip((2, 4, 5, 6), axes, strict=True))
    for axes in product((True, False), repeat=4)
] + [(4, 5, 6), (4, 1, 1), (1, 5, 6), (5, 6), (5, 1), (1, 6), (1, 1), (6,), (1,), ()]


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_the_gradient_of_a_bias_however_it_broadcasts(shape):
    case = Case("bias", "float64", {**QKV, "bias": shape, "seed": ()}, {"causal": True, "dropout_p": 0.3})
    hold_gradients(SPEC, wide(SPEC, case), directions=3, **case.params)


@pytest.mark.parametrize("spec", [SPEC, VARLEN], ids=lambda spec: spec.name)
def test_random_problems_against_finite_differences(spec):
    for case in random_problems(spec.name, 11, 12, max_elements=800):
        params = {name: value for name, value in case.params.items() if name != "return_lse"}
        hold_gradients(spec, wide(spec, case), directions=1, **params)


def test_a_given_derivative_is_what_is_used():
    case = Case("mod", "float64", QKV, {"score_mod": (cubed, cubed_slope)})
    arrays = wide(SPEC, case)
    hold_gradients(SPEC, arrays, score_mod=(cubed, cubed_slope))
    right = backward(SPEC, arrays, score_mod=(cubed, cubed_slope))
    for one, two in zip(right, backward(SPEC, arrays, score_mod=cubed), strict=True):
        assert np.abs(one - two).max() < 1e-12
    doubled = backward(SPEC, arrays, score_mod=(cubed, lambda score, b, h, i, j: 2 * cubed_slope(score, b, h, i, j)))
    for one, two, factor in zip(right, doubled, (2, 2, 1), strict=True):
        assert np.abs(factor * one - two).max() < 1e-12


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize(("spec", "case"), named(SPEC))
def test_blocked_is_plain(spec, case, blocks):
    arrays = wide(spec, case)
    sizes = dict(zip(("block_q", "block_kv"), blocks))
    plain = backward(spec, arrays, **case.params)
    tiled = call(flash_attention_backward_blocked, spec.gradient_inputs, arrays, **case.params, **sizes)
    for one, two in zip(plain, tiled, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype
        assert np.abs(one - two).max(initial=0.0) <= 1e-13 * (1 + np.abs(one).max(initial=0.0))


@pytest.mark.parametrize("special", [False, True])
def test_blocked_is_as_near_the_truth_as_plain_is(special):
    non_finite = 0
    for case in random_problems("flash_attention", 4, 60, max_elements=3000):
        arrays = gradient_inputs(SPEC, case, special=special)
        problem = bind(SPEC, arrays, case.params, True)
        truths, plains = (backward(SPEC, each, **case.params) for each in (widened(arrays), arrays))
        inputs, sizes = SPEC.gradient_inputs, {"block_q": 16, "block_kv": 8}
        tiled = call(flash_attention_backward_blocked, inputs, arrays, **case.params, **sizes)
        terms = gradient_terms(arrays, problem)
        for name, actual, truth, plain in zip(problem.outputs(SPEC.gradients), tiled, truths, plains, strict=True):
            non_finite += int(not np.isfinite(truth).all())
            rule = {"dtype": case.dtype, "floor": SPEC.floor, "terms": terms[name]}
            for each, label in ((plain, "plain"), (actual, "blocked")):
                found = compare(each, truth, plain, **rule, name=f"{case}: {label} {name}")
                assert found.passed, found.message
    assert non_finite > 20 if special else non_finite == 0


@pytest.mark.parametrize("blocks", BLOCKS[:2], ids=str)
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_blocked_gradient_of_a_bias_however_it_broadcasts(shape, blocks):
    arrays = wide(SPEC, Case("bias", "float64", {**QKV, "bias": shape}, {}))
    plain = backward(SPEC, arrays)[3]
    tiled = call(flash_attention_backward_blocked, SPEC.gradient_inputs, arrays, block_q=blocks[0] // 4, block_kv=2)[3]
    assert plain.shape == tiled.shape == shape
    assert np.abs(plain - tiled).max() < 1e-13 * (1 + np.abs(plain).max())


def test_no_gradient_of_lse_is_one_of_zeros():
    arrays = wide(SPEC, Case("none", "float64", {**QKV, "sinks": (4,)}, {}))
    without = {name: array for name, array in arrays.items() if name != "dlse"}
    zeros = {**arrays, "dlse": np.zeros_like(arrays["dlse"])}
    for one, two in zip(backward(SPEC, without), backward(SPEC, zeros), strict=True):
        assert np.array_equal(one, two)


@pytest.mark.parametrize("function", [flash_attention_backward, flash_attention_backward_blocked])
def test_errors_are_the_specs(function: Callable[..., Any]):
    arrays = wide(SPEC, Case("errors", "float64", QKV, {}))
    for change, kind, message in [
        ({"lse": arrays["lse"].astype(np.float32)}, TypeError, "lse has dtype float32, q has dtype float64"),
        ({"do": arrays["do"][..., :1]}, ValueError, "do has Dv=1, v has Dv=2"),
        ({"o": arrays["o"].tolist()}, TypeError, "o is a list, expected a numpy.ndarray"),
    ]:
        with pytest.raises(kind, match=f"^flash_attention_backward: {message}"):
            call(function, SPEC.gradient_inputs, {**arrays, **change})
    with pytest.raises(TypeError, match=r"^flash_attention_backward: bias_gradient is 1, expected True or False$"):
        call(function, SPEC.gradient_inputs, arrays, bias_gradient=1)
