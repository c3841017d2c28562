"""Random problems over the domains of the specs, and arrays for them that notice a stray write.

    for case in random_problems("softmax", seed=1, count=300):
        inputs = materialize(OPERATORS["softmax"], case, random_layouts(OPERATORS["softmax"], case), special=True)
        y = dualops.reference.softmax(inputs["x"].array, **case.params)
        for guarded in inputs.values():
            guarded.check()

Nothing here knows which library runs the problem. `Guarded.buffer` is one flat array; on a GPU a test uploads it, takes
the strided view (`offset`, `shape`, `strides`, in elements) there, and hands what it downloads to `Guarded.check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from zlib import crc32

import numpy as np

from dualops.spec import OPERATORS, Case, Spec
from dualops.spec.base import Input
from dualops.spec.meta import FLOATS, itemsize, numpy_dtype
from dualops.testing.ready import drawn, generated

GUARD = 64  # elements of canary before and after: more than a 16-byte access, or a warp of 2-byte ones, can stray
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# of floats a quiet NaN; of integers one that is no length and no place
_CANARY = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}
_CANARY |= {"int32": 0x7FC00000, "int64": 0x7FF8000000000000}
_CANARY_PERIOD = 61  # payloads 1 to 61: they fit in bfloat16's mantissa, and no power of two hides a shifted copy


# --- layouts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How an array lies in its buffer.

    order: its axes from the slowest to the fastest. gaps: for each axis, how many indices more the buffer has along it
    than the array, so that canaries lie between rows. step: stride of the fastest axis. broadcast: axes of stride 0.
    misalignment: elements by which element 0 is off a multiple of 16 bytes, or more.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    step: int = 1
    broadcast: frozenset[int] = frozenset()
    misalignment: int = 0

    @classmethod
    def dense(cls, rank: int) -> Layout:
        return cls(tuple(range(rank)), (0,) * rank)

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """In elements."""
        strides, step = [0] * len(shape), self.step
        for axis in reversed(self.order):
            if axis not in self.broadcast:
                strides[axis] = step
                step *= max(shape[axis] + self.gaps[axis], 1)
        return tuple(strides)

    def extent(self, shape: Sequence[int]) -> int:
        """Elements from the first to one past the last, at least 1."""
        return 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, self.strides(shape), strict=True))


def random_layout(
    shape: Sequence[int], rng: np.random.Generator, *, contiguous_last: bool = False, broadcast: bool = True
) -> Layout:
    """A layout for an input: dense and aligned in a third of the draws, otherwise permuted, padded, stepped, broadcast.

    With `contiguous_last` the last axis keeps stride 1; without `broadcast` every element keeps a place of its own.
    """
    rank = len(shape)
    if rng.random() < 1 / 3:
        return Layout.dense(rank)
    free = rank - 1 if contiguous_last else rank
    order = [int(axis) for axis in (rng.permutation(free) if rng.random() < 0.5 else np.arange(free))]
    if contiguous_last:
        order.append(rank - 1)
    gaps = tuple(int(rng.integers(1, 9)) if rng.random() < 0.4 else 0 for _ in shape)
    step = int(rng.integers(2, 4)) if not contiguous_last and rng.random() < 0.2 else 1
    repeated = frozenset(axis for axis in range(free) if rng.random() < 0.1 and broadcast)
    return Layout(tuple(order), gaps, step, repeated, int(rng.integers(0, 8)) if rng.random() < 0.5 else 0)


def random_layouts(spec: Spec, case: Case) -> dict[str, Layout]:
    """A layout for each input of the case, drawn from the case's seed."""
    return layouts_of(spec.inputs, case.shapes, np.random.default_rng([case.seed, 1]))


def layouts_of(
    inputs: Sequence[Input], shapes: Mapping[str, Sequence[int]], rng: np.random.Generator
) -> dict[str, Layout]:
    """A layout for each of the inputs that has a shape.

    What a value there follows from another is never broadcast: where sequences end, and the lse of a row.
    """
    return {
        entry.name: random_layout(
            shapes[entry.name],
            rng,
            contiguous_last=entry.contiguous_last,
            broadcast="int32" not in entry.dtypes and entry.name != "lse",
        )
        for entry in inputs
        if entry.name in shapes
    }


# --- guarded arrays ------------------------------------------------------------------------------


class Guarded:
    """A strided array inside a flat buffer whose every other element is a canary.

    The canaries are NaN, so that a kernel which reads one shows it in its result, and carry a payload that depends on
    the place, so that one which copies a canary elsewhere is seen too. Elements of the array start as canaries as well:
    `check_written` names one that was never written. Among integers the canaries are huge; among bools True and False.
    """

    def __init__(self, shape: Sequence[int], dtype: str, layout: Layout | None = None):
        self.shape, self.dtype = tuple(shape), dtype
        layout = layout or Layout.dense(len(self.shape))
        self.strides = layout.strides(self.shape)
        size, extent = itemsize(dtype), layout.extent(self.shape)
        total = 2 * GUARD + layout.misalignment + extent
        # the layout alone decides the alignment: the buffer starts at a multiple of 128 bytes
        raw = np.empty(total * size + 128, np.uint8)
        start = -raw.ctypes.data % 128
        self.buffer = raw[start : start + total * size].view(numpy_dtype(dtype))
        self.offset = GUARD + layout.misalignment
        self._bits(self.buffer)[:] = self._canaries()
        self._inside = np.zeros(total, bool)
        self._view(self._inside)[...] = True

    @classmethod
    def of(cls, values: np.ndarray, layout: Layout | None = None) -> Guarded:
        """`values` in that layout; along a broadcast axis the values at index 0 stand for all."""
        guarded = cls(values.shape, values.dtype.name, layout)
        broadcast = [stride == 0 and size > 0 for stride, size in zip(guarded.strides, values.shape, strict=True)]
        guarded.array[...] = values[tuple(slice(0, 1) if first else slice(None) for first in broadcast)]
        return guarded

    @property
    def array(self) -> np.ndarray:
        """The strided view, writable."""
        return self._view(self.buffer)

    def check(self, buffer: np.ndarray | None = None) -> None:
        """Raise AssertionError if a canary outside the array has changed, in `buffer` (a copy of ours) or in ours."""
        bits, canaries = self._bits(self.buffer if buffer is None else buffer), self._canaries()
        changed = np.flatnonzero((bits != canaries) & ~self._inside)
        if changed.size:
            offsets = [int(place) - self.offset for place in changed[:4]]
            raise AssertionError(
                f"{changed.size} elements outside the array were written, at offsets {offsets} from element 0 "
                f"(shape {self.shape}, strides {self.strides}, {self.dtype})"
            )

    def check_written(self, buffer: np.ndarray | None = None) -> None:
        """Raise AssertionError if an element of the array still holds its first value, a canary."""
        same = self._bits(self.buffer if buffer is None else buffer) == self._canaries()
        left = np.argwhere(self._view(same))
        if left.size:
            raise AssertionError(f"{len(left)} elements were never written, the first at {tuple(map(int, left[0]))}")

    def _view(self, flat: np.ndarray) -> np.ndarray:
        strides = [stride * flat.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides)

    def _bits(self, buffer: np.ndarray) -> np.ndarray:
        return buffer.view(_UNSIGNED[itemsize(self.dtype)])

    def _canaries(self) -> np.ndarray:
        bits = _UNSIGNED[itemsize(self.dtype)]
        payload = np.arange(self.buffer.size) % _CANARY_PERIOD + 1
        if self.dtype == "bool":
            return (payload % 2).astype(bits)
        return bits(_CANARY[self.dtype]) | payload.astype(bits)


# --- values --------------------------------------------------------------------------------------


def special_values(dtype: str, largest: float, *, infinities: bool = True) -> np.ndarray:
    """NaN, infinities, zeros, +-`largest`, the smallest denormal and the smallest normal number of a dtype."""
    numbers = numpy_dtype(dtype)
    bits = _UNSIGNED[itemsize(dtype)]
    mantissa_bits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype]
    tiny = np.array([1, 1 << mantissa_bits], bits).view(numbers)
    plain = [np.nan, 0.0, -0.0, largest, -largest, *((np.inf, -np.inf) if infinities else ())]
    return np.concatenate([np.array(plain).astype(numbers), tiny])


def sprinkle(array: np.ndarray, rng: np.random.Generator, choices: np.ndarray) -> np.ndarray:
    """A copy of `array` with one to four of its elements from `choices`, in half of the draws all of them the same."""
    array = array.copy()
    places = rng.integers(0, array.size, rng.integers(1, 5)) if array.size else np.zeros(0, int)
    chosen = rng.integers(0, len(choices), places.size)
    if rng.random() < 0.5:
        chosen[:] = chosen[:1]
    array.reshape(-1)[places] = choices[chosen]
    return array


def values(spec: Spec, case: Case, *, special: bool = False, backward: bool = False) -> dict[str, np.ndarray]:
    """The case's values in the order of the spec's inputs, from the case's seed.

    special: NaN, infinities, denormals and large numbers among the floats. backward: none so large that what is finite
    in a gradient's truth overflows.
    """
    arrays = generated(spec, case)
    if not special:
        return arrays
    rng = np.random.default_rng([case.seed, 2, crc32(case.id.encode())])  # other values in other cases
    for name, array in arrays.items():
        limits = spec.special(name, case, backward) if array.dtype.name in FLOATS else None
        if limits is not None and rng.random() < 0.7:
            largest, infinities = limits
            arrays[name] = sprinkle(array, rng, special_values(array.dtype.name, largest, infinities=infinities))
    return arrays


def materialize(
    spec: Spec, case: Case, layouts: Mapping[str, Layout] | None = None, *, special: bool = False
) -> dict[str, Guarded]:
    """The case's values in these layouts (dense where none is given), each in a buffer with canaries."""
    layouts = layouts or {}
    return {name: Guarded.of(array, layouts.get(name)) for name, array in values(spec, case, special=special).items()}


# --- problems ------------------------------------------------------------------------------------


def random_problems(
    op: str, seed: int, count: int, max_elements: int = 1 << 14, dtypes: Sequence[str] = FLOATS
) -> Iterator[Case]:
    """`count` cases of operator `op`, as `dualops.testing.random_cases` draws them, one by one.

    `max_elements` bounds the elements of every array, and of attention's B * H * Sq * Sk scores. Case number i does not
    depend on `count`, so that a long run begins with a short one's problems, and `case.seed` reproduces values and
    layouts.
    """
    return drawn(OPERATORS[op], count, seed, max_elements, dtypes)


def elements(case: Case) -> int:
    """Of the case's largest array, the scores of an attention and of a parallel retention included."""
    return max(*(prod(shape) for shape in case.shapes.values()), scores_of(case))


def scores_of(case: Case) -> int:
    """Scores that a case of attention or of retention's parallel form makes; 0 of others.

    Of attention's sequences of unknown lengths as many as they may have.
    """
    if not {"q", "k", "v"} <= case.shapes.keys():
        return 0
    q, k = case.shapes["q"], case.shapes["k"]
    if "cu_seqlens_q" in case.shapes:
        return q[1] * q[0] * min(k[0], case.params["max_seqlen_k"])
    of_retention = "form" in case.params or "cu_seqlens" in case.shapes
    return 0 if of_retention and case.params.get("form") != "parallel" else prod(q[:3]) * k[2]
