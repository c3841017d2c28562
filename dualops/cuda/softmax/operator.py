"""softmax and its gradient as operators on rows (`rows.operator`).

softmax: the running maximum, and the sum of exp(x - maximum); then y = exp(x - row maximum) / row sum. Kept numbers
become exp(x - maximum of their warp), and are then multiplied by one factor. Milakov & Gimelshein 2018,
arXiv:1805.02867. The gradient: dot = sum(y * dy), then dx = y * (dy - dot). As an operator, its x is softmax's y, its
other input is dy, and its y is dx.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..compiler.backend import Members, members, noun, types, verb
from ..rows.operator import PLAIN, Keeping
from ..tile.numbers import numbers
from ..tile.storage import access, storage


class Known(NamedTuple):
    """The maximum and the sum of the numbers so far."""

    max: Any
    sum: Any  # sum of exp(x - max)


@dataclass(frozen=True)
class Softmax:
    """An operator, or its gradient."""

    dtype: str
    backward: bool = False
    rank: int = 1

    @property
    def inputs(self) -> int:
        return 1 + self.backward

    @property
    def params_type(self) -> Any:
        return types.Tuple(())

    def named(self, walk: str) -> str:
        return f"softmax_{walk}_backward" if self.backward else f"softmax_{walk}"

    def operator(self, keeping: Keeping) -> Any:
        return (gradient_operator if self.backward else softmax_operator)(self.dtype, keeping)

    def shared_bytes(self, columns: int) -> int:
        return 0


@noun
def softmax_operator(dtype: str, keeping: Keeping) -> Members:
    """The verbs of softmax."""
    mem, count = storage(dtype), access(dtype, keeping.aligned).vector
    num, group = numbers(mem.number), keeping.group
    FILL, ADDS = num.minus_inf, False

    @verb
    def none():
        return Known(num.minus_inf, num.zero)

    @verb
    def add(known, frag, other, present):
        new_max = known.max
        for c in range(len(frag)):
            new_max = num.maximum(new_max, frag[c])
        base, few = num.base(new_max), num.zero  # few: a sum of its own keeps the last bits of a long row's sum
        for c in range(len(frag)):
            few += num.exp(frag[c] - base)
        return Known(new_max, known.sum * num.exp(known.max - base) + few)

    @verb
    def of_warp(known, own):
        warp_max = group.in_warp.max(known.max)
        return warp_max, group.in_warp.sum(known.sum * num.exp(known.max - num.base(warp_max)))

    @verb
    def merge(sent, at, own, N):
        """Return the number that is subtracted from x in the row's exponents, and 1 / the row's sum."""
        row_max, row_sum = num.minus_inf, num.zero
        for k in range(group.LANE_PARTS):
            if group.given(k):
                row_max = num.maximum(row_max, group.a(sent, at, k))
        base = num.base(group.lanes.max(row_max))
        for k in range(group.LANE_PARTS):
            if group.given(k):
                row_sum += group.b(sent, at, k) * num.exp(group.a(sent, at, k) - base)
        return base, num.one / group.lanes.sum(row_sum)

    @verb
    def write(frag, at, other, found, own, column, inside):
        for c in range(at, at + count):
            frag[c] = num.exp(frag[c] - found[0]) * found[1]

    @verb
    def keep(frag, other, sent, left, own, N):
        """Return the factor of the numbers, which have become exp(x - the warp's maximum)."""
        warp_max, warp_sum = num.minus_inf, num.zero
        for i in range(len(frag)):
            warp_max = num.maximum(warp_max, frag[i])
        warp_max = group.in_warp.max(warp_max)
        base = num.base(warp_max)
        for i in range(len(frag)):
            frag[i] = num.exp(frag[i] - base)
            warp_sum += frag[i]
        warp_sum = group.in_warp.sum(warp_sum)
        if group.PARTS == 1:
            return num.one / warp_sum
        group.send(sent, 0, warp_max, warp_sum)
        row_base, inverse = merge(sent, group.wait(sent, 0), own, N)
        return num.exp(warp_max - row_base) * inverse

    @verb
    def write_kept(frag, at, other, found, own, column, inside):
        for c in range(at, at + count):
            frag[c] *= found

    return members(locals(), **PLAIN)


@noun
def gradient_operator(dtype: str, keeping: Keeping) -> Members:
    """The verbs of softmax's gradient."""
    mem, count = storage(dtype), access(dtype, keeping.aligned).vector
    num, group = numbers(mem.number), keeping.group
    FILL, ADDS = num.zero, False

    @verb
    def none():
        return num.zero

    @verb
    def add(known, frag, other, present):
        few = num.zero
        for c in range(len(frag)):
            few += frag[c] * other[c]
        return known + few

    @verb
    def of_warp(known, own):
        return group.in_warp.sum(known), num.zero

    @verb
    def merge(sent, at, own, N):
        return group.sum(sent, at)

    @verb
    def write(frag, at, other, found, own, column, inside):
        for c in range(at, at + count):
            frag[c] *= other[c] - found

    @verb
    def keep(frag, other, sent, left, own, N):
        return group.sum_of_row(add(num.zero, frag, other, 0), 0, sent)

    return members(locals(), write_kept=write, **PLAIN)
