"""The oracle: results of anybody's operator held against the float64 reference."""

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
    """Results that are not what the operator gives."""


class Vacuous(ValueError):
    """Arrays on which the reference itself fails in the problem's dtype: any result would pass, so nothing is checked.

    The caller's arrays are to blame, not the result.
    """


def check(
    operator: str,
    got: Any,
    arrays: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
    backward: bool = False,
) -> dict[str, Accuracy]:
    """Hold what a kernel of `operator` gave against the float64 reference; raise Wrong where it is too far from it.

        y = my_kernel(x)
        dualops.testing.check("softmax", y, {"x": x}, {"axis": -1})

    operator: a name of `dualops.spec.OPERATORS`, which says what its arrays and parameters are called
    got: the result, several as a tuple in the order in which the reference returns them, or some of them by name
    arrays: what the kernel was given, by name; of something that it overwrote, a copy from before
    params: by name, where they are not as by default; what asks for more results (return_lse) among them
    backward: `got` are the gradients, and arrays those of `dualops.reference.<operator>_backward`; what forward saves
        for it (y of softmax, o and lse of attention) is the reference's own where it is not there and the inputs are

    Arrays are those of NumPy, torch, JAX, CuPy, Numba or another library, on any device, bfloat16 too. The problem's
    dtype is that of the inputs; results may have any. Truth is made on the host, with all that the plain reference
    writes down (of attention, every score).

    The rule is that of `dualops.spec.compare`, for each result: at most twice the error of float32 arithmetic rounded
    to the storage dtype, and a few eps of float32, in maximum and in root mean square; NaN and infinity where the truth
    has them. Returns what was found, by the results' names.

    Raises Wrong, an AssertionError, with operator, result, worst coordinate, what is there and what should be, the
    error and its limit. Raises Vacuous, a ValueError, where the limit would pass anything, since float32 arithmetic
    fails on these arrays: norms of rows near 1e30, whose squares overflow. `dualops.spec.accuracy` says when that is
    so. For a call that the operator refuses: its own ValueError or TypeError.
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
    told = f"{op} {problem.dtype}, {', '.join(f'{name} {array.shape}' for name, array in inputs.items())}"
    told += f", {', '.join(f'{name}={value!r}' for name, value in params.items())}" if params else ""
    for name, result in results.items():
        if result.shape != truths[name].shape:
            raise Wrong(f"{told}: {name} has shape {result.shape}, expected {truths[name].shape}")
    found = held(spec, problem.dtype, results, truths, baselines, terms_of(spec, backward)(inputs, problem))
    for error, failed in (
        (Wrong, [each.message for each in found.values() if not each.passed and not each.vacuous]),
        (Vacuous, [each.message for each in found.values() if each.vacuous]),
    ):
        if failed:
            raise error("\n".join([f"{told}:", *failed]) if len(failed) > 1 else f"{told}: {failed[0]}")
    return found


def _on_host(spec: Spec, op: str, arrays: Mapping[str, Any], backward: bool) -> dict[str, np.ndarray]:
    """The arrays that there are in NumPy's. Raises TypeError for one of another name."""
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
    """The results in NumPy's arrays, by name. Raises Wrong where there are more or less than there should be."""
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
    """Raise ValueError where a result lies in an input's place: the truth would be that of the result."""
    starts = {array.ctypes.data: name for name, array in given.items() if array.size}
    for name, result in results.items():
        if result.size and (over := starts.get(result.ctypes.data)):
            raise ValueError(f"{op}: {name} lies where {over} does, expected a copy of {over} from before the call")
