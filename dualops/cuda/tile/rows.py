"""Verbs that reduce over the lanes of a warp that share a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Members, cuda, kept_noun, verb
from ..ptx.warp import (
    shfl_idx_f32 as shfl_idx_f32,
    shfl_idx_i32 as shfl_idx_i32,
    vote_any as vote_any,
    vote_ballot as vote_ballot,
)
from .numbers import numbers

FULL_WARP = 0xFFFFFFFF


@kept_noun
def lane_reductions(number: Any, lanes: int) -> Members:
    """Reductions over `lanes` neighbouring lanes (a power of two up to 32); every lane gets the result.

    The verbs for numbers of type f32 or f64. All 32 lanes of the warp must call them.
    """
    num = numbers(number)
    STEPS, FAR = lanes.bit_length() - 1, lanes // 2

    @verb
    def max(x):
        for step in range(STEPS):
            x = num.maximum(x, num.shuffle(x, 1 << step, FULL_WARP))
        return x

    @verb
    def sum(x):
        for step in range(STEPS):
            x += num.shuffle(x, 1 << step, FULL_WARP)
        return x

    @verb
    def sum_two(a, b):
        """Return both sums, with only one shuffle more than for one sum: half of the lanes add up each."""
        if lanes > 1:
            upper = (cuda.threadIdx.x & FAR) != 0
            mine = (b if upper else a) + num.shuffle(a if upper else b, FAR, FULL_WARP)
            for step in range(STEPS - 1):
                mine += num.shuffle(mine, 1 << step, FULL_WARP)
            other = num.shuffle(mine, FAR, FULL_WARP)
            a, b = (other if upper else mine), (mine if upper else other)
        return a, b

    return locals()


def transposed(number: Any) -> Callable[..., Any]:
    """Return the verb (a, b, c, d) -> four numbers: the transpose among four neighbouring lanes.

    Lane r of the four gets argument r of each lane. All 32 lanes of the warp must call it.
    """
    num = numbers(number)

    @verb
    def swap(upper, first, second, distance):
        """Exchange, between lanes `distance` apart, the lower lane's `second` and the upper lane's `first`."""
        other = num.shuffle(first if upper else second, distance, FULL_WARP)
        return other if upper else first, second if upper else other

    @verb
    def transpose(a, b, c, d):
        lane = cuda.threadIdx.x % 4
        odd, high = lane % 2 == 1, lane >= 2
        a, b = swap(odd, a, b, 1)
        c, d = swap(odd, c, d, 1)
        a, c = swap(high, a, c, 2)
        b, d = swap(high, b, d, 2)
        return a, b, c, d

    return transpose
