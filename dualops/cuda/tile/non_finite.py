"""Test whether a thread's accumulators are finite, with one multiply-add each: 0 times a non-finite number is NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import f32, verb
from .numbers import numbers


@cache
def non_finite_of(size: int) -> Callable[..., Any]:
    """Return the verb (acc) -> two numbers, for my upper and my lower row: 0 if the row's numbers are finite, else NaN.

    acc has `size` numbers per thread, in quads (`fragment.accumulator`).
    """
    num, quads = numbers(f32), size // 4

    @verb
    def row(acc, h):
        total = num.zero
        for j in range(quads):
            total += acc[4 * j + 2 * h] * num.zero
            total += acc[4 * j + 2 * h + 1] * num.zero
        return total

    @verb
    def zero_or_nan(acc):
        return row(acc, 0), row(acc, 1)

    return zero_or_nan
