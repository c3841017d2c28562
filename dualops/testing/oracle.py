"""The oracle: compare results of anybody's operator with the float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..spec import Accuracy, Spec
from ..spec.base import Input
from .arrays import to_numpy
from .ready import spec_of
from .terms import terms_of
from .truth import Arrays, bind, expected, held, widened, with_saved


class Wrong(AssertionError):
    """Results that differ from the operator's."""


class Vacuous(ValueError):
    """Arrays on which the reference itself fails in the problem's dtype: any result would pass, so nothing is checked.

    The caller's arrays are the cause, not the result.
    """


def check(
    operator: str, got: Any, arrays: Mapping[str, Any], params: Mapping[str, Any] | None = None, backward: bool = False
) -> dict[str, Accuracy]:
    """Compare the results of a kernel of `operator` with the float64 reference; raise Wrong if the error is too large.

        y = my_kernel(x)
        dualops.testing.check("softmax", y, {"x": x}, {"axis": -1})

    operator: a name of `dualops.spec.OPERATORS`, which defines the names of its arrays and parameters
    got: the result, several as a tuple in the reference's order, or some of them by name
    arrays: the kernel's inputs by name; if it overwrote one, a copy from before the call
    params: by name, if they differ from their defaults, including those that request results (return_lse)
    backward: `got` are the gradients, and arrays those of `dualops.reference.<operator>_backward`. A missing array that
        forward saves (y of softmax, o and lse of attention) is computed by the reference if its inputs are given

    Arrays may be NumPy's, torch's, JAX's, CuPy's, Numba's or another library's, on any device, bfloat16 too. The
    problem's dtype is that of the inputs; results may have any. Truth is computed on the host by the plain reference,
    with all its memory (for attention, every score).

    The rule is that of `dualops.spec.compare`, for each result: at most twice the error of float32 arithmetic rounded
    to the storage dtype, plus a few eps of float32, in maximum and in root mean square; NaN and infinity exactly where
    the truth has them. Returns the accuracies by the results' names.

    Raises Wrong, an AssertionError, with operator, result, worst coordinate, the values there, the error and its limit.
    Raises Vacuous, a ValueError, if the limit would pass anything, since float32 arithmetic fails on these arrays:
    norms of rows near 1e30, whose squares overflow (see `dualops.spec.accuracy`). A call that the operator refuses
    raises the operator's ValueError or TypeError.
    """
    __tracebackhide__ = True
    spec = spec_of(operator, backward)
    op, params = f"{operator}_backward" if backward else operator, dict(params or {})
    given = _on_host(spec, op, arrays, backward)
    inputs = with_saved(spec, given, params) if backward else given
    problem = bind(spec, inputs, params, backward)
    names = list(problem.outputs(spec.gradients if backward else spec.outputs))
    results = _results(op, got, names)
    _check_not_overwritten(op, results, given)
    wide = with_saved(spec, widened(given), {**params, **spec.wide}) if backward else inputs
    truths, baselines = expected(spec, inputs, params, backward, names, wide)
    call = f"{op} {problem.dtype}, {', '.join(f'{name} {array.shape}' for name, array in inputs.items())}"
    call += f", {', '.join(f'{name}={value!r}' for name, value in params.items())}" if params else ""
    for name, result in results.items():
        if result.shape != truths[name].shape:
            raise Wrong(f"{call}: {name} has shape {result.shape}, expected {truths[name].shape}")
    found = held(spec, problem.dtype, results, truths, baselines, terms_of(spec, backward)(inputs, problem))
    for error, failed in (
        (Wrong, [each.message for each in found.values() if not each.passed and not each.vacuous]),
        (Vacuous, [each.message for each in found.values() if each.vacuous]),
    ):
        if failed:
            raise error("\n".join([f"{call}:", *failed]) if len(failed) > 1 else f"{call}: {failed[0]}")
    return found


def _on_host(spec: Spec, op: str, arrays: Mapping[str, Any], backward: bool) -> dict[str, np.ndarray]:
    """Return the given arrays as NumPy's. Raises TypeError for an unknown name."""
    accepted = {entry.name: entry for entry in (*spec.inputs, *(spec.gradient_inputs if backward else ()))}
    for name in arrays:
        if name not in accepted:
            raise TypeError(f"{op}: unknown array {name}, expected some of {', '.join(accepted)}")
    return {name: _array(op, accepted[name], arrays[name]) for name in accepted if arrays.get(name) is not None}


def _array(op: str, entry: Input, value: Any) -> np.ndarray:
    if entry.host and isinstance(value, (int, float)):
        return np.asarray(value, entry.dtypes[0])
    return _to_numpy(op, entry.name, value)


def _to_numpy(op: str, name: str, value: Any) -> np.ndarray:
    try:
        return to_numpy(value)
    except TypeError as error:
        raise TypeError(f"{op}: {name}: {error}") from None


def _results(op: str, got: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the results as NumPy's arrays, by name. Raises Wrong for too many or too few."""
    __tracebackhide__ = True
    if not isinstance(got, Mapping):
        found = tuple(got) if isinstance(got, (tuple, list)) else (got,)
        if len(found) != len(names):
            raise Wrong(f"{op}: got {len(found)} results, expected {len(names)}: {', '.join(names)}")
        got = dict(zip(names, found))
    if not got or not got.keys() <= set(names):
        raise ValueError(f"{op}: got has {', '.join(map(str, got)) or 'nothing'}, expected some of {', '.join(names)}")
    return {name: _to_numpy(op, name, array) for name, array in got.items()}


def _check_not_overwritten(op: str, results: Arrays, given: Arrays) -> None:
    """Raise ValueError if a result overlaps an input: the input is lost, and with it the truth."""
    starts = {array.ctypes.data: name for name, array in given.items() if array.size}
    for name, result in results.items():
        if result.size and (over := starts.get(result.ctypes.data)):
            raise ValueError(f"{op}: {name} lies where {over} does, expected a copy of {over} from before the call")
