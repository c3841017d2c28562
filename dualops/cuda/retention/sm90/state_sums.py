"""How a chunk's tokens come to the state: state = fade * state + (decayed K).T @ V.

Where o alone reads the state, which is rounded for it, the product is added to the state as it is, K as one number of
16 bits. Where the state is a result, K goes in three parts, and what a chunk adds is a sum of its own
(`tile.exact_products`): tensor cores round toward zero, which after a few chunks is further off than the rule of
accuracy allows (measured, of 700 tokens that keep all 1.4 of it, of 3000 4.7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...backend import Namespace, verb
from ...tile.carried import weighted_sums
from ...tile.exact_products import exact_sums
from ...tile.swizzle import Operand


class StateSums(Namespace):
    """The verbs, by all threads of a warpgroup."""

    size: int  # numbers of a thread
    fragment: Callable[..., Any]  # () -> a local array for the state
    room: Callable[..., Any]  # () -> local arrays that `add` needs beside it
    fade: Callable[..., None]  # (state, by): what of this can be done before `add`
    # (state, room, smem, places, args, by): of K and V at `places`; all of it, when it returns
    add: Callable[..., None]


def state_sums(k: Operand, v: Operand, exact: bool, weight: Callable[..., Any]) -> StateSums:
    """weight(args, token): what a token of the chunk is multiplied by."""
    return _as_a_result(k, v, weight) if exact else _rounded(k, v, weight)


def _rounded(k: Operand, v: Operand, weight: Callable[..., Any]) -> StateSums:
    sums = weighted_sums(k, v, 1, weight)

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

    return StateSums(size=sums.size, fragment=sums.fragment, room=room, fade=fade, add=add)


def _as_a_result(k: Operand, v: Operand, weight: Callable[..., Any]) -> StateSums:
    sums = exact_sums(k, v, weight, among_others=True)

    @verb
    def room():
        return sums.fragment(), sums.words()

    @verb
    def fade(state, by):
        pass

    @verb
    def add(state, room, smem, places, args, by):
        more, words = room
        sums.multiply(more, words, (places[0], args), smem, places[1])
        for j in range(sums.size // 4):
            for e in range(4):
                state[4 * j + e] = state[4 * j + e] * by + more[4 * j + e]

    return StateSums(size=sums.size, fragment=sums.fragment, room=room, fade=fade, add=add)
