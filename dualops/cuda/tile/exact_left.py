"""A product whose left factor is a warpgroup's accumulators, with all their digits: in three parts of bfloat16.

    out [64, n] = acc [64, K] @ B [K, n]

    product = exact_left(b)
    product.multiply(out, acc, smem, b_at)          out is there when it returns

Element e of a thread's accumulators is element e of what it has of a left factor (`fragment`), so that parts are
packed where they are. B has 16 bits, and is one part. Parts are cut off, not rounded (`thirds`), the smallest is
multiplied first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, f32, verb
from .carried import DTYPE
from .swizzle import Operand
from .thirds import PARTS, packed_parts, upper_part
from .unrolled import one_after_another
from .warpgroup import register_mma


class ExactLeft(Namespace):
    """The verbs, by all threads of a warpgroup."""

    size: int  # accumulators of a thread, of out
    fragment: Callable[..., Any]  # () -> a local array for out
    multiply: Callable[..., None]  # (out, acc, smem, b_at); no number of acc is infinite, or NaN comes of it


@cache
def exact_left(b: Operand) -> ExactLeft:
    """For a tile of bfloat16."""
    mma = register_mma(DTYPE, b)
    steps = b.steps

    def multiply_part(part: int) -> Callable[..., None]:
        first = part == PARTS - 1

        @verb
        def multiply_one(both, acc, smem, b_at):
            out, left = both
            for step in range(steps):
                for word in range(4):
                    at = 4 * step + word
                    low, high = acc[2 * at], acc[2 * at + 1]
                    for _ in range(part):
                        low, high = f32(low - upper_part(low)), f32(high - upper_part(high))
                    left[at] = packed_parts(low, high)
            mma.add(out, left, smem, b_at, 0 if first else 1)
            mma.wait(out)

        return multiply_one

    multiply_all = one_after_another([multiply_part(part) for part in reversed(range(PARTS))])

    @verb
    def multiply(out, acc, smem, b_at):
        multiply_all((out, mma.left()), acc, smem, b_at)

    return ExactLeft(size=mma.size, fragment=mma.fragment, multiply=multiply)
