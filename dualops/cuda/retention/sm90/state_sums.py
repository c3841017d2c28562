"""How a chunk's tokens come to the state: state = fade * state + (decayed K).T @ V.

Where o alone reads the state, which is rounded for it, the product is added to the state as it is, K as one number of
16 bits. Where the state is a result, K goes in three parts, and what a chunk adds is a sum of its own
(`retention.exact_products`): tensor cores round toward zero, which after a few chunks is further off than the rule of
accuracy allows (measured, of 700 tokens that keep all 1.4 of it, of 3000 4.7).

Of wide heads the state is transposed, so that V takes K's place (`state_of_values`). Beside it no registers are left
for another sum as large: a chunk's own is made by boxes of 64 keys, one after another, and all parts of V stay for all.
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
    """The verbs, by all threads of a warpgroup."""

    size: int  # numbers of a thread
    fragment: Callable[..., Any]  # () -> a local array for the state
    room: Callable[..., Any]  # () -> local arrays that `add` needs beside it
    fade: Callable[..., None]  # (state, by): what of this can be done before `add`
    # (state, room, smem, places, args, by): of K and V at `places`; all of it, when it returns
    add: Callable[..., None]


def state_sums(k: Operand, v: Operand, exact: bool, weight: Callable[..., Any], *, beside: bool = False) -> StateSums:
    """weight(args, token): what a token of the chunk is multiplied by. beside: as `exact_products` has it."""
    return _as_a_result(k, v, weight, beside) if exact else _rounded(weighted_sums(k, v, weight))


def state_of_values(v: Operand, k: Operand, exact: bool, weight: Callable[..., Any]) -> StateSums:
    """Of wide heads: state = fade * state + (decayed V).T @ K, of a warpgroup's 64 columns of V and all of its keys;
    `places` are of V and K.
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
    """Nothing: `add` multiplies each number and adds to it at once."""


def _as_a_result(k: Operand, v: Operand, weight: Callable[..., Any], beside: bool) -> StateSums:
    sums = exact_sums(k, v, weight, beside=beside)

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
    BOXES, size = k.width // BOX, k.width // 2  # of K; of the state, numbers of a thread
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
