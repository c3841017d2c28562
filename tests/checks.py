"""The checker: one call of an operator, held against its spec and reference, wherever it runs.

    check(OPERATORS["softmax"], case, dualops.cuda.softmax)                        # NumPy arrays, the simulator
    check(OPERATORS["softmax"], case, dualops.cuda.softmax, library=TORCH)         # tests/cuda/gpu

The inputs come from the spec's generator and lie in guarded buffers; so do results that the caller provides, which hold
canaries before the call. Afterwards every element of a result must have been written, nothing around results and inputs
may have changed, the inputs must be what they were, and the values must be as near the float64 truth as the spec asks.
What does not hold is `Rejected`, with the operator, the case and the way it was called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dualops import reference
from dualops.spec import ArrayMeta, Case, Problem, Spec, compare
from dualops.spec.base import Output, numpy_dtype
from tests.problems import Guarded, Layout, values

WAYS = ("given", "allocated")  # out= an array of ours; no out=. A third is "in place": out= the first input


class Rejected(AssertionError):
    """What was checked is wrong, and why."""


class Library(NamedTuple):
    """How arrays get to where an operator runs, and back."""

    to_device: Callable[[np.ndarray], Any]  # a flat array: a copy, or the same memory
    to_host: Callable[[Any], np.ndarray]  # an array of any strides; waits until it is there
    view: Callable[[Any, Sequence[int], Sequence[int], int], Any]  # (flat array, shape, strides, offset in elements)
    strides: Callable[[Any], tuple[int, ...]]  # of an array, in elements


def _numpy_view(flat: np.ndarray, shape: Sequence[int], strides: Sequence[int], offset: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, [stride * flat.itemsize for stride in strides])


NUMPY = Library(
    to_device=lambda flat: flat,
    to_host=lambda array: array,
    view=_numpy_view,
    strides=lambda array: tuple(stride // array.itemsize for stride in array.strides),
)


class Placed:
    """A guarded array where the operator runs."""

    def __init__(self, guarded: Guarded, library: Library):
        self.guarded, self.library = guarded, library
        self.before = guarded.buffer.copy()
        self.flat = library.to_device(guarded.buffer)
        self.array = library.view(self.flat, guarded.shape, guarded.strides, guarded.offset)

    def unchanged(self) -> bool:
        return self.library.to_host(self.flat).tobytes() == self.before.tobytes()

    def result(self) -> np.ndarray:
        """The values there now. Raises AssertionError for a changed canary or an element that was never written."""
        buffer = self.library.to_host(self.flat)
        self.guarded.check(buffer)
        self.guarded.check_written(buffer)
        return _numpy_view(buffer, self.guarded.shape, self.guarded.strides, self.guarded.offset)


def check(
    spec: Spec,
    case: Case,
    run: Callable[..., Any],
    *,
    backward: bool = False,
    library: Library = NUMPY,
    layouts: Mapping[str, Layout] | None = None,
    out_layout: Layout | None = None,
    special: bool = False,
    ways: Sequence[str] = WAYS,
) -> None:
    """Call `run(*arrays, out=..., **params)` in each of `ways` and raise Rejected for whatever is wrong.

    backward: `run` is the gradient. layouts: of its inputs, by name, dense where none is given; out_layout: of results
    of the inputs' rank in the way "given", dense as a rule. special: NaN, infinities and extremes among the values.
    Other exceptions of `run` pass through.
    """
    inputs = gradient_inputs(spec, case, special=special) if backward else values(spec, case, special=special)
    layouts = layouts or {}
    arrays = {name: Guarded.of(array, layouts.get(name)).array for name, array in inputs.items()}
    problem = bind(spec, arrays, case.params, backward)
    outputs = spec.gradients if backward else spec.outputs
    expected = _expected(spec, arrays, case.params, backward)
    terms = _TERMS[problem.spec.name, backward](arrays, problem)
    for way in ways:
        where = (
            f"{spec.name}{'_backward' if backward else ''} {case.id} {dict(case.shapes)} {dict(case.params)} ({way})"
        )
        placed = {name: Placed(Guarded.of(array, layouts.get(name)), library) for name, array in arrays.items()}
        try:
            actual = _call(run, problem, outputs, placed, case.params, library, way, out_layout)
            for name, each in placed.items():
                if not (way == "in place" and name == next(iter(placed))) and not each.unchanged():
                    raise AssertionError(f"input {name}, or memory around it, was written")
        except AssertionError as error:
            raise Rejected(f"{where}: {error}") from error
        for name, (truth, baseline) in expected.items():
            found = compare(actual[name], truth, baseline, dtype=case.dtype, floor=spec.floor, name=name, terms=terms)
            if not found.passed:
                raise Rejected(f"{where}: {found.message}")


def bind(spec: Spec, arrays: Mapping[str, np.ndarray], params: Mapping[str, Any], backward: bool) -> Problem:
    """The problem that these NumPy arrays state."""
    metas = {name: ArrayMeta.of_numpy(array) for name, array in arrays.items()}
    return spec.bind_backward(metas, params) if backward else spec.bind(metas, params)


def gradient_inputs(spec: Spec, case: Case, *, special: bool = False) -> dict[str, np.ndarray]:
    """What backward takes: inputs and results that forward saved, the results from the reference, and gradients."""
    saved = values(spec, case, special=special)
    problem = bind(spec, saved, case.params, False)
    results = _named(getattr(reference, spec.name)(*saved.values(), **case.params), list(problem.outputs()))
    rng = np.random.default_rng([case.seed, 3])
    for name, result in results.items():
        gradient = rng.standard_normal(result.shape)
        if special and gradient.size and rng.random() < 0.5:
            gradient.reshape(-1)[rng.integers(gradient.size)] = rng.choice([np.nan, np.inf, 0.0])
        saved[f"d{name}"] = gradient.astype(result.dtype)
    saved |= results
    return {wanted.name: saved[wanted.name] for wanted in spec.gradient_inputs}


def _expected(
    spec: Spec, arrays: Mapping[str, np.ndarray], params: Mapping[str, Any], backward: bool
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(truth, baseline) of each result."""
    function = getattr(reference, f"{spec.name}_backward" if backward else spec.name)
    names = list(bind(spec, arrays, params, backward).outputs(spec.gradients if backward else spec.outputs))
    with np.errstate(over="ignore", invalid="ignore"):
        truth = _named(function(*[array.astype(np.float64, order="C") for array in arrays.values()], **params), names)
        baseline = _named(function(*arrays.values(), **params), names)
    return {name: (truth[name], baseline[name]) for name in names}


def _softmax_backward_terms(arrays: Mapping[str, np.ndarray], problem: Problem) -> float:
    """dx = y * (dy - dot): the largest |y| * (|dy| + sum |y * dy|) of a row whose values are finite."""
    y, dy = (np.abs(np.moveaxis(array.astype(np.float64), problem.axis, -1)) for array in arrays.values())
    with np.errstate(over="ignore", invalid="ignore"):
        terms = y * (dy + (y * dy).sum(axis=-1, keepdims=True))
    return float(terms[np.isfinite(terms)].max(initial=0.0))


# what a result is a difference of, for `compare`; 0 where nothing cancels that the truth would not show
_TERMS: dict[tuple[str, bool], Callable[[Mapping[str, np.ndarray], Problem], float]] = {
    ("softmax", False): lambda arrays, problem: 0.0,
    ("softmax", True): _softmax_backward_terms,
    ("flash_attention", False): lambda arrays, problem: 0.0,
}


def _call(
    run: Callable[..., Any],
    problem: Problem,
    outputs: Sequence[Output],
    inputs: Mapping[str, Placed],
    params: Mapping[str, Any],
    library: Library,
    way: str,
    out_layout: Layout | None,
) -> dict[str, np.ndarray]:
    wanted = problem.outputs(outputs)
    arrays = [each.array for each in inputs.values()]
    if way == "in place":
        (name,) = wanted
        first = next(iter(inputs.values()))
        run(*arrays, out=first.array, **params)
        return {name: first.result()}
    if way == "given":
        results = {}
        for name, meta in wanted.items():
            layout = out_layout if out_layout and len(out_layout.order) == len(meta.shape) else None
            results[name] = Placed(Guarded(meta.shape, meta.dtype, layout), library)
        given = tuple(result.array for result in results.values())
        run(*arrays, out=given[0] if len(given) == 1 else given, **params)
        return {name: result.result() for name, result in results.items()}
    returned = _named(run(*arrays, **params), list(wanted))
    actual = {}
    for name, meta in wanted.items():
        actual[name] = library.to_host(returned[name])
        told = library.strides(returned[name])
        dtype = numpy_dtype(meta.dtype)
        assert actual[name].dtype == dtype, f"{name} has dtype {actual[name].dtype}, expected {dtype}"
        assert actual[name].shape == meta.shape, f"{name} has shape {actual[name].shape}, expected {meta.shape}"
        assert _same_strides(meta, told), f"{name} has strides {told}, expected {meta.strides}"
    return actual


def _same_strides(meta: ArrayMeta, told: Sequence[int]) -> bool:
    """Whether strides are those of `meta` where they mean something: an axis of size 1 may have any."""
    return 0 in meta.shape or all(
        size == 1 or mine == theirs for size, mine, theirs in zip(meta.shape, meta.strides, told, strict=True)
    )


def _named(results: Any, names: Sequence[str]) -> dict[str, Any]:
    found = results if isinstance(results, tuple) else (results,)
    return dict(zip(names, found, strict=True))
