"""A thread's mean of its columns, and squares about it, vectors after vectors: no second pass waits for the last.

Of two sets of numbers, n * m / (n + m) * (difference of means)^2 more than of both alone: Chan et al. 1979.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, i32, noun, verb
from ..tile.numbers import numbers
from ..tile.storage import storage
from .variant import Variant


class Moments(NamedTuple):
    """Of the columns so far; without a mean the sum of squares alone."""

    total: Any
    mean: Any
    squares: Any  # about the mean
    columns: Any


@noun
def thread_moments(variant: Variant, vectors: int) -> Members:
    """The verbs, for frags of so many vectors."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)

    @verb
    def none():
        return Moments(num.zero, num.zero, num.zero, num.zero)

    @verb
    def _squares_of(frag, mean, present):
        squares = num.zero
        for v in range(vectors):
            few = num.zero  # a vector's own sum, so that no chain of additions is long
            for c in range(v * mem.vector, (v + 1) * mem.vector):
                apart = frag[c] - mean if variant.centred else frag[c]
                few += apart * apart
            squares += few if not variant.centred or present > i32(v) else num.zero
        return squares

    @verb
    def add(so_far, frag, present):
        """Add so many vectors of frag, behind which are zeros."""
        if not variant.centred:
            return Moments(num.zero, num.zero, so_far.squares + _squares_of(frag, num.zero, present), num.zero)
        total = num.zero
        for v in range(vectors):
            few = num.zero
            for c in range(v * mem.vector, (v + 1) * mem.vector):
                few += frag[c]
            total += few
        count = mem.number(i32(i32(min(max(present, i32(0)), i32(vectors))) * mem.vector))
        mean = total * num.reciprocal(max(count, num.one))
        apart, columns = mean - so_far.mean, so_far.columns + count
        weight = count * num.reciprocal(max(columns, num.one))
        squares = _squares_of(frag, mean, present) + apart * apart * so_far.columns * weight
        return Moments(so_far.total + total, so_far.mean + apart * weight, so_far.squares + squares, columns)

    @verb
    def squares(moments, mean):
        """Return the squares about another mean, which is that of more columns."""
        apart = moments.mean - mean
        return moments.squares + moments.columns * apart * apart

    return locals()
