"""The checker: one call of an operator, compared with its spec and reference, wherever it runs.

    check(OPERATORS["softmax"], case, dualops.cuda.softmax)                        # NumPy arrays, the simulator
    check(OPERATORS["softmax"], case, dualops.cuda.softmax, library=TORCH)         # tests/cuda/gpu

The inputs come from the spec's generator and lie in guarded buffers; so do results that the caller provides, which hold
canaries before the call. Afterwards every element of a result must have been written, nothing around results and inputs
may have changed, the inputs must be what they were, and the values must be as near the float64 truth as the spec asks.
What does not hold is `Rejected`, with the operator, the case and the way it was called.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dualops.spec import ArrayMeta, Case, Spec
from dualops.spec.base import Input, Role
from dualops.spec.meta import numpy_dtype
from dualops.testing.ready import gradient_arrays
from dualops.testing.terms import terms_of
from dualops.testing.truth import bind, expected, held, named
from tests.problems import Guarded, Layout, values

WAYS = ("given", "allocated")  # out= an array of ours; no out=. A third is "in place": out= inputs


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
    extra: Mapping[str, Any] | None = None,
    host: bool = False,
    narrow: bool = False,
) -> None:
    """Call `run(*arrays, out=..., **params)` in each of `ways` and raise Rejected for whatever is wrong.

    backward: `run` is the gradient. layouts: of its inputs, by name, dense where none is given; out_layout: of results
    of the inputs' rank in the way "given", dense by default. special: NaN, infinities and extremes among the values.
    extra: parameters beyond the case's, such as the gradient alone takes. host: what may be a number on the host is one
    (a seed). narrow: weights have the problem's dtype, not the one that it is computed in.
    Other exceptions of `run` pass through.
    """
    arrays = gradient_inputs(spec, case, special=special) if backward else values(spec, case, special=special)
    inputs = spec.gradient_inputs if backward else spec.inputs
    if narrow:
        arrays |= _narrowed(inputs, arrays, case.dtype)
    layouts, params = layouts or {}, {**case.params, **(extra or {})}
    arrays = {name: Guarded.of(array, layouts.get(name)).array for name, array in arrays.items()}
    problem = bind(spec, arrays, params, backward)
    outputs = problem.outputs(spec.gradients if backward else spec.outputs)
    truths, baselines = expected(spec, arrays, params, backward, list(outputs))
    terms = terms_of(spec, backward)(arrays, problem)
    for way in ways:
        where = f"{spec.name}{'_backward' if backward else ''} {case.id} {dict(case.shapes)} {params} ({way})"
        placed = {name: Placed(Guarded.of(array, layouts.get(name)), library) for name, array in arrays.items()}
        given = {name: each.array for name, each in placed.items()}
        if host:
            given |= {entry.name: arrays[entry.name].item() for entry in inputs if entry.host and entry.name in arrays}
        try:
            like = {output.name: output.like for output in (spec.gradients if backward else spec.outputs)}
            over = {name: placed[like[name]] for name in outputs} if way == "in place" else {}
            changed = way == "allocated" and not backward
            updated = {name: placed[spec.updates[name]] for name in outputs if changed and name in spec.updates}
            calling = partial(call, run, inputs, given, **params)
            actual = _call(calling, outputs, library, way, out_layout, over, updated)
            for name, each in placed.items():
                if each not in (*over.values(), *updated.values()) and not each.unchanged():
                    raise AssertionError(f"input {name}, or memory around it, was written")
        except AssertionError as error:
            raise Rejected(f"{where}: {error}") from error
        for name, found in held(spec, case.dtype, actual, truths, baselines, terms).items():
            if not found.passed:
                raise Rejected(f"{where}: {found.message}")
            if spec.exact and (differing := _differing(actual[name], baselines[name])):
                raise Rejected(f"{where}: {name} differs from the reference in the bits of {differing} elements")


def call(function: Callable[..., Any], inputs: Sequence[Input], arrays: Mapping[str, Any], **options: Any) -> Any:
    """The function of these arrays: those that every call has by position, the others and `options` by keyword."""
    needed = [arrays[entry.name] for entry in inputs if not entry.optional]
    optional = {entry.name: arrays[entry.name] for entry in inputs if entry.optional and entry.name in arrays}
    return function(*needed, **optional, **options)


def gradient_inputs(spec: Spec, case: Case, *, special: bool = False) -> dict[str, np.ndarray]:
    """What backward takes, as `dualops.testing` makes it; special: NaN, infinities and extremes among the values."""
    arrays = values(spec, case, special=special, backward=True)
    return gradient_arrays(spec, case, arrays, spec.special_gradients if special else ())


def _narrowed(inputs: Sequence[Input], arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The weights among the arrays, in the problem's dtype."""
    weights = [entry.name for entry in inputs if entry.role is Role.WEIGHT and entry.name in arrays]
    return {name: arrays[name].astype(numpy_dtype(dtype)) for name in weights}


def _call(
    run: Callable[..., Any],
    wanted: Mapping[str, ArrayMeta],
    library: Library,
    way: str,
    out_layout: Layout | None,
    over: Mapping[str, Placed],
    updated: Mapping[str, Placed],
) -> dict[str, np.ndarray]:
    """The results of `run(out=...)` or `run()`; over: the input that each is written over in the way "in place";
    updated: those that `run()` overwrites.
    """
    if updated:
        returned = named(run(), list(wanted))
        for name, each in updated.items():
            assert returned[name] is each.array, f"{name} is not the array that was to be overwritten"
        return {name: each.result() for name, each in updated.items()}
    if over:
        given = tuple(each.array for each in over.values())
        run(out=given[0] if len(given) == 1 else given)
        return {name: each.result() for name, each in over.items()}
    if way == "given":
        results = {}
        for name, meta in wanted.items():
            layout = out_layout if out_layout and len(out_layout.order) == len(meta.shape) else None
            results[name] = Placed(Guarded(meta.shape, meta.dtype, layout), library)
        given = tuple(result.array for result in results.values())
        run(out=given[0] if len(given) == 1 else given)
        return {name: result.result() for name, result in results.items()}
    returned = named(run(), list(wanted))
    actual = {}
    for name, meta in wanted.items():
        actual[name] = library.to_host(returned[name])
        strides = library.strides(returned[name])
        dtype = numpy_dtype(meta.dtype)
        assert actual[name].dtype == dtype, f"{name} has dtype {actual[name].dtype}, expected {dtype}"
        assert actual[name].shape == meta.shape, f"{name} has shape {actual[name].shape}, expected {meta.shape}"
        assert _same_strides(meta, strides), f"{name} has strides {strides}, expected {meta.strides}"
    return actual


def _differing(one: np.ndarray, two: np.ndarray) -> int:
    """In how many elements two arrays of one dtype differ, even by the sign of a zero; a NaN is like any other."""
    bits = np.dtype(f"u{one.itemsize}")
    unlike = np.ascontiguousarray(one).view(bits) != np.ascontiguousarray(two).view(bits)
    return int((unlike & ~(np.isnan(one.astype(np.float64)) & np.isnan(two.astype(np.float64)))).sum())


def _same_strides(meta: ArrayMeta, strides: Sequence[int]) -> bool:
    """Whether strides are those of `meta` where they mean something: an axis of size 1 may have any."""
    return 0 in meta.shape or all(
        size == 1 or mine == theirs for size, mine, theirs in zip(meta.shape, meta.strides, strides, strict=True)
    )
