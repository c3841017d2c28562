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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dualops.spec import OPERATORS, Case, Spec, Tag
from dualops.spec.base import FLOATS, itemsize, numpy_dtype

Shapes = dict[str, tuple[int, ...]]

GUARD = 64  # elements of canary before and after: more than a 16-byte access, or a warp of 2-byte ones, can stray
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_QUIET_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}
_FUZZED = frozenset({Tag.TEST})
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


def random_layout(shape: Sequence[int], rng: np.random.Generator, *, contiguous_last: bool = False) -> Layout:
    """A layout for an input: dense and aligned in a third of the draws, otherwise permuted, padded, stepped, broadcast.

    With `contiguous_last` the last axis keeps stride 1.
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
    broadcast = frozenset(axis for axis in range(free) if rng.random() < 0.1)
    return Layout(tuple(order), gaps, step, broadcast, int(rng.integers(0, 8)) if rng.random() < 0.5 else 0)


def random_layouts(spec: Spec, case: Case) -> dict[str, Layout]:
    """A layout for each input of the case, drawn from the case's seed."""
    rng = np.random.default_rng([case.seed, 1])
    wanted = {entry.name: entry for entry in spec.inputs}
    return {
        name: random_layout(shape, rng, contiguous_last=wanted[name].contiguous_last)
        for name, shape in case.shapes.items()
    }


# --- guarded arrays ------------------------------------------------------------------------------


class Guarded:
    """A strided array inside a flat buffer whose every other element is a canary.

    The canaries are NaN, so that a kernel which reads one shows it in its result, and carry a payload that depends on
    the place, so that one which copies a canary elsewhere is seen too. Elements of the array start as canaries as well:
    `check_written` names one that was never written.
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
        return bits(_QUIET_NAN[self.dtype]) | payload.astype(bits)


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


def values(spec: Spec, case: Case, *, special: bool = False) -> dict[str, np.ndarray]:
    """The case's values, from its seed. `special` puts NaN, infinities, denormals and large numbers among them."""
    arrays = spec.generate(spec, case, np.random.default_rng(case.seed))
    if not special:
        return arrays
    rng = np.random.default_rng([case.seed, 2])
    return {
        name: sprinkle(array, rng, _SPECIALS[spec.name](name, case)) if rng.random() < 0.7 else array
        for name, array in arrays.items()
    }


def materialize(
    spec: Spec, case: Case, layouts: Mapping[str, Layout] | None = None, *, special: bool = False
) -> dict[str, Guarded]:
    """The case's values in these layouts (dense where none is given), each in a buffer with canaries."""
    layouts = layouts or {}
    return {name: Guarded.of(array, layouts.get(name)) for name, array in values(spec, case, special=special).items()}


# --- problems ------------------------------------------------------------------------------------


def random_size(rng: np.random.Generator, limit: int) -> int:
    """A size up to `limit`, with a liking for 0, 1, primes, and powers of two and their neighbours."""
    kind = rng.random()
    if limit < 2 or kind < 0.1:
        size = 1
    elif kind < 0.13:
        size = 0
    elif kind < 0.5:
        size = (1 << int(rng.integers(1, limit.bit_length() + 1))) + int(rng.integers(-1, 2))
    elif kind < 0.7:
        size = _prime_below(int(rng.integers(2, limit + 1)))
    else:  # evenly over the magnitudes
        size = int(np.exp(rng.uniform(0.0, np.log(limit))))
    return min(size, limit)


def _prime_below(limit: int) -> int:
    return next((n for n in range(limit, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1))), 2)


def random_problems(
    op: str, seed: int, count: int, max_elements: int = 1 << 14, dtypes: Sequence[str] = FLOATS
) -> Iterator[Case]:
    """`count` cases of operator `op`, the same for the same arguments, each one legal for the spec.

    `max_elements` bounds the elements of every array, and of attention's B * H * Sq * Sk scores. Case number i does not
    depend on `count`, so that a long run begins with a short one's problems, and `case.seed` reproduces values and
    layouts.
    """
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        dtype = str(rng.choice(list(dtypes)))
        shapes, params = _DOMAINS[op](rng, max_elements)
        backward = bool(OPERATORS[op].gradients)
        yield Case(f"fuzz{seed}_{i}", dtype, shapes, params, _FUZZED, backward, seed=int(rng.integers(1 << 31)))


def _softmax(rng: np.random.Generator, max_elements: int) -> tuple[Shapes, dict[str, Any]]:
    rank = int(rng.integers(1, 6))
    axis = int(rng.integers(-rank, rank))
    shape, left = [1] * rank, max_elements
    # the row first: it is what the kernels differ by
    for place in [axis % rank, *(place for place in range(rank) if place != axis % rank)]:
        shape[place] = random_size(rng, left)
        left = max(left // max(shape[place], 1), 1)
    return {"x": tuple(shape)}, {"axis": axis}


def _flash_attention(rng: np.random.Generator, max_elements: int) -> tuple[Shapes, dict[str, Any]]:
    D, Dv = (max(random_size(rng, min(512, max_elements)), 1) for _ in range(2))
    rows = max(max_elements // max(D, Dv), 1)  # B * H * S of any one array
    Sq, Sk = random_size(rng, rows), random_size(rng, rows)
    if Sq * Sk > max_elements:
        Sq = max_elements // Sk
    heads = max(min(rows // max(Sq, Sk, 1), max_elements // max(Sq * Sk, 1)), 1)  # B * H
    Hkv = 1 + int(rng.integers(min(heads, 4)))
    group = 1 + int(rng.integers(min(heads // Hkv, 4)))
    B = random_size(rng, min(heads // (Hkv * group), 3))
    params: dict[str, Any] = {"causal": [False, True, "top_left"][rng.integers(3)], "return_lse": bool(rng.integers(2))}
    if rng.random() < 0.4:
        params["scale"] = float(rng.choice([0.0, 1.0, -0.25, rng.normal()]))
    return {"q": (B, Hkv * group, Sq, D), "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv)}, params


_DOMAINS: dict[str, Callable[[np.random.Generator, int], tuple[Shapes, dict[str, Any]]]] = {
    "softmax": _softmax,
    "flash_attention": _flash_attention,
}

# a quarter of the largest number; in float64 what can still be squared
_HUGE = {"float16": 16376.0, "bfloat16": 2.0**125, "float32": 2.0**125, "float64": 2.0**500}


def _softmax_specials(name: str, case: Case) -> np.ndarray:
    return special_values(case.dtype, _HUGE[case.dtype])


def _flash_attention_specials(name: str, case: Case) -> np.ndarray:
    """What must come out alike in float32 and in float64.

    q, k: no score so large that its own rounding decides the row. v: no sum over the keys that overflows, and no
    infinity, since a probability that is tiny in float64 and 0 in float32 makes of it an infinity here and a NaN there.
    """
    if name == "v":
        return special_values(case.dtype, _HUGE[case.dtype] / (case.shapes["k"][2] + 1), infinities=False)
    return special_values(case.dtype, 4.0)


_SPECIALS: dict[str, Callable[[str, Case], np.ndarray]] = {
    "softmax": _softmax_specials,
    "flash_attention": _flash_attention_specials,
}


def domains() -> frozenset[str]:
    """The operators that `random_problems` and `values` can draw for."""
    return frozenset(_DOMAINS) & frozenset(_SPECIALS)


def elements(case: Case) -> int:
    """Of the case's largest array, the scores of an attention included."""
    sizes = [prod(shape) for shape in case.shapes.values()]
    if {"q", "k"} <= case.shapes.keys():
        sizes.append(prod(case.shapes["q"][:3]) * case.shapes["k"][2])
    return max(sizes)
