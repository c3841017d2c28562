"""Verbs that reduce over the lanes of a warp that share a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, verb
from ..ptx.warp import shfl_idx_f32 as shfl_idx_f32, shfl_idx_i32 as shfl_idx_i32, vote_any as vote_any
from .numbers import numbers

FULL_WARP = 0xFFFFFFFF


class LaneReductions(Namespace):
    """Reductions over `lanes` neighbouring lanes (a power of two up to 32); every lane gets the result."""

    max: Callable[..., Any]
    sum: Callable[..., Any]


@cache
def lane_reductions(number: Any, lanes: int) -> LaneReductions:
    """The verbs for numbers of type f32 or f64. All 32 lanes of the warp must call them."""
    num = numbers(number)
    STEPS = lanes.bit_length() - 1

    @verb
    def lanes_max(x):
        for step in range(STEPS):
            x = num.maximum(x, num.shuffle(x, 1 << step, FULL_WARP))
        return x

    @verb
    def lanes_sum(x):
        for step in range(STEPS):
            x += num.shuffle(x, 1 << step, FULL_WARP)
        return x

    return LaneReductions(max=lanes_max, sum=lanes_sum)
