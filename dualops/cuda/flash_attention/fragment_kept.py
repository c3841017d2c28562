"""Which probabilities of a tile stay, in the registers of whoever multiplies: known before there are scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..backend import Namespace, f32, i32, u32, u64, verb
from ..tile.numbers import numbers
from ..tile.products import opaque_i32
from .fragment_places import Places, my_row
from .options import OptionChain

CALLS = 2  # each of eight probabilities, at once: they fill one another's delays


class FragmentKept(Namespace):
    """The verbs, for quads of probabilities."""

    # (options, where) -> a bit for each probability: whether it stays. Asked while products run, in a loop whose bits
    # the assembler can't put off until they are over
    keeps: Callable[..., Any]
    keep: Callable[..., None]  # (probs, kept): those that stay are as they were, the others 0
    growth: Callable[..., Any]  # (options) -> what those that stay are to be multiplied by


def fragment_kept(chain: OptionChain, places: Places, quads: int) -> FragmentKept:
    num, ALL = numbers(f32), u64((1 << 4 * quads) - 1)
    step = 2 * CALLS if quads % (2 * CALLS) == 0 else 2

    @verb
    def keeps(options, where):
        kept, j = ALL, i32(0)
        if chain.weighs:
            kept = u64(0)
            while j < quads:
                for beside in range(0, step, 2):
                    corner = places.at_inside(where, my_row(), places.first(where), i32(8 * (j + beside)), f32(0))
                    kept |= u64(u64(chain.keeps(options, corner)) << u64(4 * (j + beside)))
                j = opaque_i32(j + step)
        return kept

    @verb
    def keep(probs, kept):
        if chain.weighs:
            for j in range(quads):
                quad = u32(u32(kept >> u64(32 * (j // 8))) >> u32(4 * (j % 8)))
                for e in range(4):
                    if (quad & u32(1 << e)) == u32(0):
                        probs[4 * j + e] = num.zero

    @verb
    def growth(options):
        return chain.growth(options)

    return FragmentKept(keeps=keeps, keep=keep, growth=growth)
