"""Expected results of a call: the reference in float64 and in the storage dtype, and comparisons with both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import reference
from ..spec import Accuracy, ArrayMeta, Problem, Spec, compare
from ..spec.meta import FLOATS

Arrays = Mapping[str, np.ndarray]


def bind(spec: Spec, arrays: Arrays, params: Mapping[str, Any], backward: bool) -> Problem:
    """Return the problem of these NumPy arrays."""
    metas = {name: ArrayMeta.of_numpy(array) for name, array in arrays.items()}
    return spec.bind_backward(metas, params) if backward else spec.bind(metas, params)


def named(results: Any, names: Sequence[str]) -> dict[str, Any]:
    """Name the results of a call, one result or a tuple of them."""
    found = results if isinstance(results, tuple) else (results,)
    return dict(zip(names, found, strict=True))


def widened(arrays: Arrays) -> dict[str, np.ndarray]:
    """Convert all floats to float64, for the truth; indices and masks are unchanged."""
    return {
        name: array.astype(np.float64, order="C") if array.dtype.name in FLOATS else array
        for name, array in arrays.items()
    }


def reference_of(spec: Spec, backward: bool) -> Callable[..., Any]:
    """Return NumPy's function of the operator."""
    return getattr(reference, f"{spec.name}_backward" if backward else spec.name)


def truth(spec: Spec, function: Callable[..., Any], arrays: Arrays, params: Mapping[str, Any]) -> Any:
    """Return the reference's results in float64; with arrays of the storage dtype, this is the baseline."""
    return function(**widened(arrays), **{**params, **spec.wide})


def expected(
    spec: Spec,
    arrays: Arrays,
    params: Mapping[str, Any],
    backward: bool,
    names: Sequence[str],
    wide: Arrays | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return truth and baseline of each result. wide: the arrays for truth, if they are not these in float64."""
    function = reference_of(spec, backward)
    with np.errstate(over="ignore", invalid="ignore"):
        truths = truth(spec, function, arrays if wide is None else wide, params)
        return named(truths, names), named(function(**arrays, **params), names)


def held(
    spec: Spec, dtype: str, results: Arrays, truths: Arrays, baselines: Arrays, terms: Mapping[str, float] | None = None
) -> dict[str, Accuracy]:
    """Check each result by the rule of `spec.compare`. dtype: the problem's. terms: of those that cancel."""
    return {
        name: compare(
            result,
            truths[name],
            baselines[name],
            dtype=dtype,
            floor=spec.floor,
            name=name,
            terms=(terms or {}).get(name, 0.0),
        )
        for name, result in results.items()
    }


def held_first_without_terms(
    spec: Spec, dtype: str, results: Arrays, truths: Arrays, baselines: Arrays, terms: Callable[[], Mapping[str, float]]
) -> dict[str, Accuracy]:
    """`held` for large problems: terms are computed only if the check is vacuous without them.

    Attention's terms hold all scores. They are needed if a result cancels, as a gradient of a single key does.
    """
    found = held(spec, dtype, results, truths, baselines)
    if any(accuracy.vacuous for accuracy in found.values()):
        return held(spec, dtype, results, truths, baselines, terms())
    return found


def with_saved(spec: Spec, arrays: Arrays, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a gradient's arrays; results that forward saves are computed by the reference if they are missing.

    With a residual, x + residual replaces x. If inputs of forward are missing, nothing is computed.
    """
    known = {entry.name for entry in spec.gradient_inputs}
    if all(entry.optional or entry.name in arrays for entry in spec.inputs):
        accepted = {param.name for param in spec.params}
        forward = {name: value for name, value in params.items() if name in accepted} | spec.requests
        inputs = {entry.name: arrays[entry.name] for entry in spec.inputs if entry.name in arrays}
        problem = bind(spec, inputs, forward, False)
        there = problem.outputs()
        needed = [name for name in there if name in known and spec.saved_when.get(name, lambda _: True)(problem)]
        instead = {name: result for name, result in spec.saved_instead.items() if result in there}
        if instead or not arrays.keys() >= set(needed):
            made = named(reference_of(spec, False)(**inputs, **forward), list(there))
            saved = {name: made[name] for name in needed}
            arrays = {**saved, **arrays, **{name: made[result] for name, result in instead.items()}}
    return {entry.name: arrays[entry.name] for entry in spec.gradient_inputs if entry.name in arrays}
