"""How products of a tile become scores: through the options, in the registers of whoever multiplies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...spec.attention import At
from ..compiler.backend import Members, cuda, f32, i32, members, noun, u32, verb
from ..tile.numbers import numbers
from ..tile.rows import FULL_WARP, vote_any
from ..tile.unrolled import one_after_another
from .masked import max_or_nan
from .options import OptionChain
from .score_coords import Places, my_row


@verb
def _own_word(held, number):
    return held[number]


@noun
def fragment_score_mod(
    chain: OptionChain,
    places: Places,
    groups: list[tuple[int, int]],
    there: Callable[..., Any],
    *,
    apart: bool,
    fetches: bool,
    word: Callable[..., Any] | None = None,
) -> Members:
    """The verbs, for quads of scores.

    groups: first and end of the quads whose loop is left to the compiler. there: as `fragment_scores` has it. apart,
    word: as in `fragment_scores`.
    """
    quads, num, word, DOWN = groups[-1][1], numbers(f32), word or _own_word, 8 if places.steady else 0

    def changed(
        place: Callable[..., At], first: int, end: int, score: Callable[..., Any] = chain.score
    ) -> Callable[..., None]:
        @verb
        def change(scores, options, scale, where):
            for j in range(first, end):
                for h in range(2):
                    row, key, down = i32(my_row() + 8 * h), places.first(where), DOWN * h
                    distance = places.ahead(where, i32(row - down), key)
                    for e in range(2):
                        at = place(where, row, key, 8 * j + e, distance, down)
                        scores[4 * j + 2 * h + e] = score(scores[4 * j + 2 * h + e] * scale, options, at)

        return change

    change, change_inside = (
        one_after_another([changed(make, *group) for group in groups]) for make in (places.at, places.at_inside)
    )

    # every other group: special functions of the others run beside its arithmetic
    NEAR, near_groups = chain.near_score is not None, groups[::2]
    near_quads = tuple(j for group in near_groups for j in range(*group))
    change_near = one_after_another(
        [
            changed(places.at, *group, score=chain.near_score if NEAR and group in near_groups else chain.score)
            for group in groups
        ]
    )

    def greater_of(j: int, h: int) -> Callable[..., None]:
        @verb
        def greater(most, scores, scale, where):
            for e in range(2):
                most[0] = max_or_nan(most[0], abs(scores[4 * j + 2 * h + e]))

        return greater

    greatest_upper, greatest_lower = (one_after_another([greater_of(j, h) for j in near_quads]) for h in range(2))

    @verb
    def near(scores, options, scale, where):
        """Return whether `near_score` is exact enough for all products of its quads. Of the scores of a warp, none of
        which is a NaN then: neither is the mark of a mask.
        """
        most = cuda.local.array(1, f32)
        most[0] = num.zero
        if there(where, 0):
            greatest_upper(most, scores, scale, i32(0))
        if there(where, 1):
            greatest_lower(most, scores, scale, i32(0))
        return not vote_any(i32(not most[0] * scale <= chain.near_bound(options)), FULL_WARP)

    def changed_held(first: int, end: int) -> Callable[..., None]:
        @verb
        def change(both, options, scale, where):
            scores, held = both
            for j in range(first, end):
                for h in range(2):
                    row, key = i32(my_row() + 8 * h), places.first(where)
                    distance = places.ahead(where, row, key)
                    for e in range(2):
                        at = places.at(where, row, key, 8 * j + e, distance)
                        score = scores[4 * j + 2 * h + e] * scale
                        scores[4 * j + 2 * h + e] = chain.score_fetched(score, options, at, word(held, 2 * j + h), e)

        return change

    def fetched(place: Callable[..., At], first: int, end: int) -> Callable[..., None]:
        @verb
        def fetch_some(held, options, scale, where):
            for j in range(first, end):
                for h in range(2):
                    row, key = i32(my_row() + 8 * h), places.first(where)
                    held[2 * j + h] = chain.fetch(options, place(where, row, key, 8 * j, f32(0)))

        return fetch_some

    change_held = one_after_another([changed_held(*group) for group in groups])
    fetch_some, fetch_inside = (
        one_after_another([fetched(make, *group) for group in groups]) for make in (places.at, places.at_inside)
    )
    WORDS = 2 * quads if fetches else 1

    @verb
    def held():
        """Return a local array for what options read before the scores are there."""
        return cuda.local.array(WORDS, u32)

    @verb
    def fetch(held, options, where):
        """Start to read it."""
        if fetches:
            if places.inside(where):
                fetch_inside(held, options, f32(1), where)
            else:
                fetch_some(held, options, f32(1), where)

    @verb
    def through(scores, options, scale, where):
        if NEAR and near(scores, options, scale, where):
            change_near(scores, options, scale, where)
        elif apart and chain.reads and places.inside(where):
            change_inside(scores, options, scale, where)
        else:
            change(scores, options, scale, where)

    @verb
    def through_held(scores, held, options, scale, where):
        """Do the same with what `fetch` has read."""
        if fetches:
            change_held((scores, held), options, scale, where)
        else:
            through(scores, options, scale, where)

    return members(
        locals(),
        fetches=fetches,  # whether there is anything to fetch
        near_quads=near_quads,  # of the quads of a thread
    )
