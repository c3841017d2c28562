"""The update of the state by a chunk's tokens: state = fade * state + (decayed K).T @ V.

If o alone reads the state, which it rounds, the product is added to the state directly, with K as one number of 16
bits. If the state is a result, K has three parts, and a chunk's contribution is a sum of its own
(`retention.exact_products`). Tensor cores round toward zero: after a few chunks that error is larger than the rule of
accuracy allows (measured, for 700 tokens without decay 1.4 times as large, for 3000 4.7 times).

For wide heads the state is transposed, so that V takes K's place (`state_of_values`). No registers are left for another
sum as large as the state. So a chunk's contribution is computed for 64 keys at a time, and all parts of V stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import Namespace, cuda, f32, i32, verb
from ...tile.swizzle import Operand
from ...tile.unrolled import one_after_another
from ..exact_products import exact_pieces, exact_sums
from ..state_smem import WeightedSums, weighted_sums
from .config import BOX


class StateSums(Namespace):
    """The verbs, called by all threads of a warpgroup."""

    size: int  # numbers of a thread
    fragment: Callable[..., Any]  # () -> a local array for the state
    room: Callable[..., Any]  # () -> local arrays that `add` needs too
    fade: Callable[..., None]  # (state, by): the part of the fade that comes before `add`
    # (state, room, smem, places, args, by): of K and V at `places`; complete when it returns
    add: Callable[..., None]


def state_sums(
    k: Operand, v: Operand, exact: bool, weight: Callable[..., Any], *, overlapped: bool = False
) -> StateSums:
    """weight(args, token): the factor of a token of the chunk. overlapped: see `exact_products`."""
    return _as_a_result(k, v, weight, overlapped) if exact else _rounded(weighted_sums(k, v, weight))


def state_of_values(v: Operand, k: Operand, exact: bool, weight: Callable[..., Any]) -> StateSums:
    """For wide heads: state = fade * state + (decayed V).T @ K, for a warpgroup's 64 columns of V and all of its keys;
    `places` are those of V and K.
    """
    return _in_boxes(v, k, weight) if exact else _rounded(weighted_sums(v, k, weight, alike=True))


def _rounded(sums: WeightedSums) -> StateSums:
    @verb
    def room():
        return ()

    @verb
    def fade(state, by):
        for j in range(sums.size // 4):
            for e in range(4):
                state[4 * j + e] *= by

    @verb
    def add(state, room, smem, places, args, by):
        sums.add(state, smem, places, args)
        sums.wait(state)

    return StateSums.from_locals(locals(), size=sums.size, fragment=sums.fragment)


@verb
def fade_in_add(state, by):
    """Do nothing: `add` multiplies each number and adds to it at once."""


def _as_a_result(k: Operand, v: Operand, weight: Callable[..., Any], overlapped: bool) -> StateSums:
    sums = exact_sums(k, v, weight, overlapped=overlapped)

    @verb
    def room():
        return sums.fragment(), sums.words()

    @verb
    def add(state, room, smem, places, args, by):
        more, words = room
        sums.multiply(more, words, (places[0], args), smem, places[1])
        for j in range(sums.size // 4):
            for e in range(4):
                state[4 * j + e] = state[4 * j + e] * by + more[4 * j + e]

    return StateSums(size=sums.size, fragment=sums.fragment, room=room, fade=fade_in_add, add=add)


def _in_boxes(v: Operand, k: Operand, weight: Callable[..., Any]) -> StateSums:
    BOXES, size = k.width // BOX, k.width // 2  # boxes of K; numbers of a thread's state
    sums = exact_pieces(v, Operand(k.lines, BOX, 2, 128, "mn"), weight)

    def add_box(box: int) -> Callable[..., None]:
        FIRST = sums.size * box

        @verb
        def add_one(state, room, place, by):
            (more, words), (smem, k_at) = room, place
            sums.multiply(more, words, smem, i32(k_at + box * k.box))
            for e in range(sums.size):
                state[FIRST + e] = state[FIRST + e] * by + more[e]

        return add_one

    add_all = one_after_another([add_box(box) for box in range(BOXES)])

    @verb
    def fragment():
        return cuda.local.array(size, f32)

    @verb
    def room():
        return sums.fragment(), sums.words()

    @verb
    def add(state, room, smem, places, args, by):
        sums.fill(room[1], (places[0], args), smem)
        add_all(state, room, (smem, places[1]), by)

    return StateSums.from_locals(locals(), fade=fade_in_add)
