"""The gradient of retention: against finite differences in float64, form against form, and what must hold of it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.reference import retention, retention_backward, retention_varlen_backward
from dualops.spec import OPERATORS, Case, Spec, Tag, compare
from dualops.spec.retention_cases import options_of
from dualops.testing.terms.retention import gradient_terms
from dualops.testing.truth import bind, widened
from tests.checks import call, gradient_inputs
from tests.problems import elements, random_problems
from tests.retention import with_steps

SPEC, VARLEN = OPERATORS["retention"], OPERATORS["retention_varlen"]
FORMS = ("parallel", "chunk", "recurrent")
CASES = [case for case in SPEC.tagged(Tag.TEST) + SPEC.tagged(Tag.SIM) if elements(case) <= 1 << 15]
CASES += [with_steps(case) for case in CASES if case.name.startswith("options_") and "mask" not in case.shapes]
DIFFERENTIABLE = ("q", "k", "v", "initial_state", "initial_norm", "log_decay")

pytestmark = pytest.mark.filterwarnings("error")


def backward(spec: Spec, arrays: Mapping[str, Any], **params: Any) -> dict[str, np.ndarray]:
    """Gradients by name."""
    found = call(getattr(reference, f"{spec.name}_backward"), spec.gradient_inputs, arrays, **params)
    return dict(zip(bind(spec, dict(arrays), params, True).outputs(spec.gradients), found, strict=True))


def forward(spec: Spec, arrays: Mapping[str, Any], **params: Any) -> dict[str, np.ndarray]:
    given = {entry.name: arrays[entry.name] for entry in spec.inputs if entry.name in arrays}
    params = {**params, "return_row_sum": True}
    found = call(getattr(reference, spec.name), spec.inputs, given, **params)
    names = bind(spec, given, params, False).outputs()
    return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))


def wide(spec: Spec, case: Case) -> dict[str, Any]:
    """What backward takes, in float64, the saved results as exact as the rest."""
    return gradient_inputs(spec, Case(case.name, "float64", case.shapes, case.params, seed=case.seed))


def with_room(spec: Spec, arrays: Mapping[str, Any], **params: Any) -> dict[str, Any]:
    """The same where log_decay can move either way, and what forward gives then."""
    if "log_decay" not in arrays:
        return dict(arrays)
    arrays = {**arrays, "log_decay": np.minimum(arrays["log_decay"], -0.01)}
    results = forward(spec, arrays, **params)
    return arrays | {name: results[name] for name in ("o", "row_sum") if name in arrays}


def loss(spec: Spec, arrays: Mapping[str, Any], **params: Any) -> tuple[float, np.ndarray]:
    """What the incoming gradients are the gradient of, and which rows are normalized.

    Through "abs" there is none: the normalizer is that of the row_sum in `arrays`, whatever it would be now.
    """
    results = forward(spec, arrays, **params)
    above = np.abs(results.get("row_sum", np.zeros(0))) > 1
    if params.get("normalize") == "abs":
        now, then = (np.maximum(1, each["row_sum"])[..., None] for each in (results, arrays))
        results["o"] = results["o"] * now / then
    total = sum((results[name] * arrays[f"d{name}"]).sum() for name in results if f"d{name}" in arrays)
    return float(total), above


def hold_gradients(spec: Spec, arrays: Mapping[str, Any], directions: int = 1, **params: Any) -> None:
    """Each gradient along random directions, against central differences of fourth order."""
    rng, step = np.random.default_rng(1), 2e-4
    arrays = with_room(spec, arrays, **params)
    gradients = backward(spec, arrays, **params)
    assert list(gradients) == [f"d{name}" for name in DIFFERENTIABLE if name in arrays]
    _, above = loss(spec, arrays, **params)
    for name, gradient in ((name[1:], gradient) for name, gradient in gradients.items() if gradient.size):
        assert gradient.shape == arrays[name].shape and gradient.dtype == arrays[name].dtype
        done = 0
        for _ in range(40):
            direction = rng.standard_normal(gradient.shape)
            moved = [{**arrays, name: np.asarray(arrays[name] + n * step * direction)} for n in (-2, -1, 1, 2)]
            at = [loss(spec, each, **params) for each in moved]
            if params.get("normalize") == "signed" and any((rows != above).any() for _, rows in at):
                continue  # a row that passes |sum| = 1 on the way has two slopes
            expected = (at[0][0] - 8 * at[1][0] + 8 * at[2][0] - at[3][0]) / (12 * step)
            found = (gradient * direction).sum()
            assert abs(found - expected) <= 2e-8 * (np.abs(gradient * direction).sum() + 1), (name, found, expected)
            done += 1
            if done == directions:
                break
        assert done == directions, name


def named(spec: Spec, decay: str = "gamma") -> list[Any]:
    """One small case of each name; or those with steps that are then others."""
    cases = {case.name: case for case in spec.cases if {Tag.SIM, Tag.EDGE} & case.tags and elements(case) <= 1 << 14}
    if decay == "steps":
        stepwise = map(with_steps, cases.values())
        cases = {case.name: case for case in stepwise if "log_decay" in case.shapes}
    return [pytest.param(spec, case, id=f"{spec.name}-{case.name}") for case in cases.values()]


@pytest.mark.parametrize(
    ("spec", "case"), [each for spec in (SPEC, VARLEN) for decay in ("gamma", "steps") for each in named(spec, decay)]
)
def test_cases_against_finite_differences(spec, case):
    hold_gradients(spec, wide(spec, case), **case.params)


@pytest.mark.parametrize("normalize", [None, "signed", "abs"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("states", [False, True])
def test_every_form_and_normalizer_against_finite_differences(form, normalize, states):
    if normalize == "abs" and (form != "parallel" or states):
        return
    shapes, params = options_of(
        (1, 3, 70, 3), 2, gamma=1, states=states, form=form, normalize=normalize, return_state=states
    )
    hold_gradients(SPEC, wide(SPEC, Case("all", "float64", shapes, params, seed=2)), directions=3, **params)


@pytest.mark.parametrize("spec", [SPEC, VARLEN], ids=lambda spec: spec.name)
def test_random_problems_against_finite_differences(spec):
    for case in random_problems(spec.name, 11, 20, max_elements=300):
        hold_gradients(spec, wide(spec, case), **case.params)


@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("case", {case.id: case for case in CASES}.values(), ids=lambda case: case.id)
def test_every_form_is_as_near_the_truth_as_the_rule_asks(case, special):
    arrays = gradient_inputs(SPEC, case, special=special)
    problem = bind(SPEC, arrays, case.params, True)
    truth = backward(SPEC, widened(arrays), **{**case.params, "form": "parallel"})
    baseline = backward(SPEC, arrays, **case.params)
    terms = gradient_terms(arrays, problem)
    stateless = "mask" in arrays or problem.Sq != problem.Sk or problem.normalize == "abs"
    for form in FORMS[:1] if stateless else FORMS:
        for name, result in backward(SPEC, arrays, **{**case.params, "form": form}).items():
            rule = {"dtype": case.dtype, "floor": SPEC.floor, "terms": terms[name]}
            found = compare(result, truth[name], baseline[name], **rule, name=f"{form} {name}")
            assert found.passed, found.message


@pytest.mark.parametrize("form", FORMS)
def test_where_the_sum_is_one_or_less_the_normalizer_has_no_gradient(form):
    """At |sum| = 1, its kink, as well; and above it o does not change with the length of a query."""
    ones = np.ones((1, 1, 1, 1))
    for length, expected in ((0.5, 3.0), (1.0, 3.0), (-1.0, 3.0), (2.0, 0.0)):
        arrays = {"q": length * ones, "k": ones, "v": 3 * ones, "do": ones}
        params = {"scale": 1.0, "form": form, "normalize": "signed"}
        o, row_sum = retention(arrays["q"], ones, 3 * ones, return_row_sum=True, **params)
        assert row_sum.item() == length
        dq, _, _ = retention_backward(**arrays, o=o, row_sum=row_sum, **params)
        assert dq.item() == expected


@pytest.mark.parametrize("form", FORMS)
def test_no_gradient_of_a_state_is_one_of_zeros(form):
    shapes, params = options_of((1, 2, 70, 3), 4, states=1, form=form, normalize="signed", return_state=True)
    arrays = wide(SPEC, Case("none", "float64", shapes, params))
    zeros = {name: np.zeros_like(arrays[name]) for name in ("dstate", "dstate_norm")}
    expected = backward(SPEC, {**arrays, **zeros}, **params)
    for left_out in (("dstate",), ("dstate_norm",), ("dstate", "dstate_norm")):
        some = {name: zeros.get(name, x) for name, x in arrays.items() if name not in left_out}
        for name, gradient in backward(SPEC, some, **params).items():
            assert np.array_equal(gradient, expected[name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [0, 40, 66])
def test_a_nan_reaches_the_gradients_of_what_comes_before_it_alone(place, form):
    """A query's: dq of its own, dk and dv of keys up to it, which is all that its results came from."""
    shapes, params = options_of((1, 2, 70, 3), 4, form=form)
    clean = wide(SPEC, Case("nan", "float64", shapes, params))
    expected = backward(SPEC, clean, **params)
    for source in ("q", "do"):
        arrays = clean | {source: clean[source].copy()}
        arrays[source][0, 1, place, 1] = np.nan
        for name, gradient in backward(SPEC, arrays, **params).items():
            is_nan = np.isnan(gradient)
            rows = is_nan[0, 1].any(axis=-1)
            assert not is_nan[0, 0].any()
            if name == "dq":
                assert np.flatnonzero(rows).tolist() == ([place] if source == "do" else [])
            else:
                assert rows[: place + 1].all() and not rows[place + 1 :].any()
            assert np.abs(np.where(is_nan, 0, gradient - expected[name])).max() < 1e-12


def test_errors_are_the_specs():
    shapes, params = options_of((1, 2, 6, 3), 4, normalize="signed")
    arrays = wide(SPEC, Case("errors", "float64", shapes, params))
    for change, kind, message in [
        ({"o": None}, TypeError, "o is missing, expected what forward gave with its normalize"),
        ({"row_sum": None}, TypeError, "row_sum is missing, expected what forward gave with its normalize"),
        (
            {"row_sum": arrays["row_sum"].astype(np.float32)},
            TypeError,
            "row_sum has dtype float32, q has dtype float64",
        ),
        ({"do": arrays["do"][..., :1]}, ValueError, "do has Dv=1, v has Dv=4"),
        ({"dstate": np.ones((1, 2, 3, 3))}, ValueError, "dstate has Dv=3, v has Dv=4"),
    ]:
        given = {name: x for name, x in {**arrays, **change}.items() if x is not None}
        with pytest.raises(kind, match=f"^retention_backward: {message}"):
            call(retention_backward, SPEC.gradient_inputs, given, **params)
    plain = {name: x for name, x in arrays.items() if name != "row_sum"}
    with pytest.raises(ValueError, match=r"^retention_backward: there is dstate_norm with normalize=None, expected"):
        call(retention_backward, SPEC.gradient_inputs, {**plain, "dstate_norm": np.ones((1, 2, 3))})
    x = np.ones((4, 2, 3))
    with pytest.raises(ValueError, match=r"^retention_varlen_backward: cu_seqlens ends at 5, q has total=4"):
        retention_varlen_backward(x, x, x, x, np.array([0, 5], np.int32), 5)
