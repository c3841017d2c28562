"""The options of attention in a kernel: the verbs that they are written in, and their arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...spec import Problem
from ...spec.attention import OPTIONS, Chain, OptionVariant, Verbs, compose, variants
from ...spec.meta import Strided
from ..backend import SIMULATED, Namespace, i64, types, u64, verb
from ..tile.numbers import numbers
from ..tile.storage import storage
from ..user_functions import typed
from ..views import strided


class Having(NamedTuple):
    """What a kernel is built for: the options that a problem has, and the types of their arguments."""

    variants: tuple[OptionVariant, ...]
    argtypes: Any

    def __repr__(self) -> str:
        return f"{list(self.variants)}"


WITHOUT_OPTIONS = Having((), types.Tuple([]))


def having(problem: Problem) -> Having:
    """What a kernel for this problem must know of its options."""
    found = variants(OPTIONS, problem)
    return Having(found, types.Tuple([_typed(option.args(problem), problem) for option, _ in found]))


def arguments(problem: Problem) -> tuple[Any, ...]:
    """The options' arguments at a launch, in order."""
    return tuple(option.args(problem) for option, _ in variants(OPTIONS, problem))


class OptionChain(Namespace):
    """A `Chain` as a noun of kernels."""

    __annotations__ = Chain.__annotations__


def chain_of(found: Having, dtype: str, *, gradient: bool = False) -> OptionChain:
    """The options as device functions, in the arithmetic of problems of this dtype; with slopes for a gradient."""
    return OptionChain(**compose(found.variants, _verbs(storage(dtype).number, gradient))._asdict())


def _typed(args: Any, problem: Problem) -> Any:
    """The Numba type of an option's arguments."""
    number = storage(problem.dtype).number

    def kind(value: Any) -> Any:
        if isinstance(value, Strided):
            return strided(problem.arrays[value.data].dtype, len(value.strides))
        return number if isinstance(value, float) else i64

    return types.NamedTuple(tuple(map(kind, args)), type(args))


def _word(value: Any) -> Any:
    """In the simulator: 64 bits of an integer that may be negative."""
    return np.uint64(int(value) & 0xFFFFFFFFFFFFFFFF)


def _verbs(number: Any, gradient: bool) -> Verbs:
    num = numbers(number)

    @verb
    def where(condition, a, b):
        return a if condition else b

    return Verbs(
        verb,
        number,
        _word if SIMULATED else u64,
        where,
        num.tanh,
        num.exp,
        _reader,
        partial(typed, number=number),
        gradient,
    )


def _reader(dtype: str, rank: int) -> Callable[..., Any]:
    """What reads an element of a Strided array."""
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

    @verb
    def read_matrices(array, a, b, c, d):
        s = array.strides
        return mem.load(array.data, i64(a) * s[0] + i64(b) * s[1] + i64(c) * s[2] + i64(d) * s[3])

    return {0: read_scalar, 1: read_row, 2: read_flag, 4: read_matrices}[rank]
