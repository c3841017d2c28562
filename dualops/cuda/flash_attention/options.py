"""The options of attention in kernels: the verbs that they are written in, and their arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...spec import Problem
from ...spec.attention import OPTIONS, At, Chain, OptionVariant, Verbs, compose, variants
from ...spec.attention.softcap import SOFTCAP
from ...spec.meta import Strided
from ..compiler.backend import SIMULATED, Namespace, i32, i64, types, u32, u64, verb
from ..launch.views import strided
from ..tile.fast_math import bounded_fast_tanh, fast_tanh_curve, fast_tanh_slope, near_tanh, near_tanh_slope
from ..tile.numbers import at_least_15_bits, mul_wide_u32, numbers
from ..tile.storage import fetch_global_b32, storage
from ..user_functions import typed


class Having(NamedTuple):
    """What a kernel is built for: the problem's options, and the types of their arguments."""

    variants: tuple[OptionVariant, ...]
    argtypes: Any

    @property
    def names(self) -> list[str]:
        return [option.name for option, _ in self.variants]

    def __repr__(self) -> str:
        return f"{list(self.variants)}"


WITHOUT_OPTIONS = Having((), types.Tuple([]))


def having(problem: Problem) -> Having:
    """Return what a kernel for this problem must know of its options."""
    found = variants(OPTIONS, problem)
    return Having(found, types.Tuple([_typed(option.args(problem), problem) for option, _ in found]))


def arguments(problem: Problem) -> tuple[Any, ...]:
    """Return the options' arguments of a launch, in order."""
    return tuple(option.args(problem) for option, _ in variants(OPTIONS, problem))


class OptionChain(Namespace):
    """A `Chain` as a noun of kernels.

    near_score, near_slope: `score` and `slope` with fewer special functions, valid for scores up to near_bound(args) in
    size; None if there are none.
    """

    __annotations__ = {**Chain.__annotations__, "near_score": Any, "near_slope": Any, "near_bound": Any}


def chain_of(found: Having, dtype: str, *, gradient: bool = False) -> OptionChain:
    """Return the options as device functions, in the arithmetic of this dtype; with slopes for a gradient."""
    verbs = _verbs(dtype, gradient)
    return OptionChain(**compose(found.variants, verbs)._asdict(), **_near(found, verbs))


def _near(found: Having, verbs: Verbs) -> dict[str, Any]:
    """Return the near verbs if softcap alone changes scores: most scores lie below it."""
    changing = [option for option in found.variants if option.option.make(verbs, option.facts).score is not None]
    if verbs.bounded is not bounded_fast_tanh or [option.option for option in changing] != [SOFTCAP]:
        return {"near_score": None, "near_slope": None, "near_bound": None}
    INDEX = found.variants.index(changing[0])

    @verb
    def bound(args):
        return args[INDEX].cap

    near = compose(found.variants, verbs._replace(bounded=near_tanh, tanh_slope=near_tanh_slope))
    return {"near_score": near.score, "near_slope": near.slope, "near_bound": bound}


@cache
def pair_places(number: Any) -> Callable[..., At]:
    """Return the verb that says where the score of query i and key j is. offset: position of query 0 among the keys."""

    @verb
    def pair_at(b, h, i, j, offset):
        return At(b, h, i32(i), i32(j), i32(i + offset), number(i32(i + offset - j)), j & 1)

    return pair_at


def _typed(args: Any, problem: Problem) -> Any:
    """Return the Numba type of an option's arguments."""
    number = storage(problem.dtype).number

    def kind(value: Any) -> Any:
        if isinstance(value, Strided):
            return strided(problem.arrays[value.data].dtype, len(value.strides))
        return number if isinstance(value, float) else i64

    return types.NamedTuple(tuple(map(kind, args)), type(args))


def _word(value: Any) -> Any:
    """Return the 64 bits of an integer that may be negative; in the simulator."""
    return np.uint64(int(value) & 0xFFFFFFFFFFFFFFFF)


def _low(value: Any) -> Any:
    """Return the 32 lowest bits of an integer that may be negative; in the simulator."""
    return np.uint64(int(value) & 0xFFFFFFFF)


def _verbs(dtype: str, gradient: bool) -> Verbs:
    mem, number = storage(dtype), storage(dtype).number
    num, approximate, (ONE, TWO, FOUR) = numbers(number), mem.itemsize == 2, map(number, (1, 2, 4))

    @verb
    def where(condition, a, b):
        return a if condition else b

    @verb
    def bounded(x, rate, size):
        return size * num.tanh(rate * x)

    @verb
    def tanh_slope(x, rate):
        # with e = exp(-2 |x|): 4 e / (1 + e)**2
        e = num.exp(-TWO * abs(rate * x))
        return FOUR * e / ((ONE + e) * (ONE + e))

    @verb
    def wide(place):
        """Convert a place without its sign, which is never negative. Divisions of it take 32 bits and no test of a
        sign.
        """
        return i64(u32(place))

    return Verbs(
        verb,
        number,
        i32,
        wide,
        _word if SIMULATED else u64,
        _low if SIMULATED else u32,
        mul_wide_u32,
        where,
        max,
        min,
        num.tanh,
        bounded_fast_tanh if approximate else bounded,
        fast_tanh_slope if approximate else tanh_slope,
        _reader,
        _reader_at,
        partial(typed, number=number, approximate=approximate),
        at_least_15_bits,
        gradient,
        _fetcher,
        fast_tanh_curve() if approximate else None,
    )


def _reader(dtype: str, rank: int) -> Callable[..., Any]:
    """Return the verb that reads an element of a Strided array."""
    mem: Any = storage(dtype) if dtype not in ("bool", "int64") else None

    @verb
    def read_scalar(array):
        return array.data[0]

    @verb
    def read_row(array, a):
        return mem.load(array.data, i64(a) * array.strides[0])

    @verb
    def read_flag(array, a, b):
        return array.data[i64(a) * array.strides[0] + i64(b) * array.strides[1]] != 0

    return {0: read_scalar, 1: read_row, 2: read_flag}[rank]


@verb
def _row(array, at):
    """Return where a Strided array has the row of a query."""
    return i64(at.b) * array.strides[0] + i64(at.h) * array.strides[1] + i64(at.i) * array.strides[2]


def _fetcher(dtype: str) -> tuple[Callable[..., Any], Any]:
    """Return the verb that fetches two neighbours at once from a Strided array of 16 bits, and the verb that unpacks
    one.
    """

    @verb
    def fetch(array, at):
        return fetch_global_b32(array.data, _row(array, at) + i64(at.j) - at.odd)

    return fetch, storage(dtype).one_of_pair


def _reader_at(dtype: str, order: str) -> Callable[..., Any]:
    """Return the verb that reads an element of a Strided array along batch, head, query and key."""
    mem, STEP, PAIRS = storage(dtype), order == "", order == "pairs"

    @verb
    def read(array, at):
        if PAIRS:
            return mem.load_of_pair(array.data, _row(array, at) + i64(at.j) - at.odd, at.odd)
        return mem.load(array.data, _row(array, at) + i64(at.j) * (array.strides[3] if STEP else 1))

    return read
