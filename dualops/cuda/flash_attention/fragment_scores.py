"""Turn products in registers into scores: options, masks, weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import Members, Noun, called_verb, cuda, f32, i32, members, noun, u32, u64, verb
from ..launch.views import start
from ..tile.numbers import LOG2_E, numbers
from ..tile.products import opaque_i32
from ..tile.softmax_rows import LANES as LANES
from ..tile.unrolled import one_after_another, unrolled
from .options import OptionChain
from .score_coords import is_marked, mark, my_column as my_column, my_row as my_row, places_of_keys, places_of_queries
from .score_masks import dropout_mask, fragment_keys
from .score_mod import PairProbabilities, fragment_score_mod, pair_probabilities, pair_slopes

GROUP = 2  # quads whose loop the compiler unrolls: an option may take many instructions for one


FragmentScores = Noun  # of `fragment_scores`


@verb
def store_lse(lse, task, row, value):
    """Store lse of a row; by one of the lanes that share it."""
    i = i32(task.m0 + row)
    if i < task.Sq and cuda.threadIdx.x % LANES == 0:
        lse.data[start(lse, task.b, task.h, task.q_first + i)] = value


@noun
def fragment_scores(
    chain: OptionChain,
    columns: int,
    heads: int = 1,
    *,
    apart: bool = True,
    bent: bool = False,
    mark_hidden: bool = False,
    products: bool = False,
    transposed: bool = False,
    word: Callable[..., Any] | None = None,
    parts: int = 1,
    others: bool = False,
) -> Members:
    """The verbs of tiles [64, columns] of scores of a warpgroup. A thread has quads: rows r and r + 8, two neighbours
    of each. where: as in `Places`.

    Scores are multiplied by `scale` if an option changes them; otherwise the exponents include it.

    heads: rows of each query, for heads that follow one another; then there is no dropout. apart: tiles without rows or
        columns beyond the end get code of their own if options read arrays; this takes registers. bent: `finish` marks
        hidden products (`score_coords.mark`) for `bend`. mark_hidden: `finish` marks hidden scores instead of
        making them -inf. products: `finish` leaves products, -inf where ranges hide one. transposed: rows are keys and
        columns queries; then there is no `weigh`. word: the verb (held, number) that returns fetched words, number
        2 * j + h for quad j and row h; None: they are in the array `held`. parts: as in `dropout_mask`. others: rows
        beyond the end may be another sequence's; otherwise they are zeros.
    """
    num, quads, LOG2, changes = numbers(f32), columns // 8, f32(LOG2_E), chain.scores and not (bent or products)
    places = places_of_keys(chain, columns) if transposed else places_of_queries(chain, columns, heads)
    groups = [(first, min(first + GROUP, quads)) for first in range(0, quads, GROUP)]
    fetches = chain.fetches and changes and (word is not None or not transposed)  # a fetched word has two keys

    @verb
    def there(where, h):
        """Return whether my row h of two is not another sequence's."""
        return places.there(where, my_row() + 8 * h) if others else True

    @verb
    def passes(where):
        """Return whether some rows of the tile may be another sequence's."""
        return places.passes(where) if others else False

    change = fragment_score_mod(chain, places, groups, there, apart=apart, fetches=fetches, word=word)
    keeping = dropout_mask(chain, places, quads, transposed=transposed, parts=parts)
    keys, NEAR = fragment_keys(chain, places, columns, transposed=transposed), chain.near_score is not None

    MARKS = bent or mark_hidden

    @verb
    def _masked():
        return mark() if MARKS else num.minus_inf

    @verb
    def _is_masked(score):
        return is_marked(score) if MARKS else score == num.minus_inf

    @verb
    def _zero():
        return num.zero

    @verb
    def units(scale):
        """Return what turns a number of `scores` into its exponent to base 2, and into its score."""
        return (LOG2, num.one) if chain.scores else (scale * LOG2, scale)

    @verb
    def _before(column):
        """Return bits for those of my scores of a row that lie before this column, counted from my first one."""
        column = min(max(column, i32(0)), i32(columns))
        count = 2 * (u32(column) // u32(8)) + min(u32(column) % u32(8), u32(2))
        return u32(u64(u64(0xFFFFFFFF) << u64(count)) >> u64(32))

    @verb
    def _shown_by_ranges(options, where, h):
        mine = i32(places.origin(where) + my_column())
        first, end = places.seen(options, where, i32(my_row() + 8 * h))
        return _before(i32(end - mine)) & ~_before(i32(first - mine))

    @verb
    def _shown_by_keys(options, where, seen, h):
        shown = keys.of_row(seen, h)
        if not places.within(options, where):
            shown &= _shown_by_ranges(options, where, h)
        return shown

    def hidden(value: Callable[[], Any]) -> Callable[..., None]:
        @unrolled(range(2))
        def hide(scores, options, seen, where, h):
            shown = _shown_by_keys(options, where, seen, h) if chain.picks_keys else _shown_by_ranges(options, where, h)
            for j in range(quads):
                for e in range(2):
                    if shown & u32(1 << (2 * j + e)) == u32(0):
                        scores[4 * j + 2 * h + e] = value()

        return hide

    @verb
    def _hide_columns(scores, shown):
        """Hide columns of both rows."""
        for j in range(quads):
            for e in range(2):
                if shown & u32(1 << (2 * j + e)) == u32(0):
                    scores[4 * j + e] = _masked()
                    scores[4 * j + e + 2] = _masked()

    pairs, hide, hide_probs = [(j, h) for j in range(quads) for h in range(2)], hidden(_masked), hidden(_zero)

    @unrolled(pairs)
    def _pick(scores, options, where, j, h):
        row, first = i32(my_row() + 8 * h), places.first(where)
        distance = places.ahead(where, row, first)
        for e in range(2):
            at = places.at(where, row, first, 8 * j + e, distance)
            if not _is_masked(scores[4 * j + 2 * h + e]) and not chain.pick(options, at):
                scores[4 * j + 2 * h + e] = _masked()

    @verb
    def clear(probs, options, where):
        """Make probabilities 0 where ranges hide a score."""
        if not places.within(options, where):
            hide_probs(probs, options, num.one, where)

    @verb
    def finish(scores, options, scale, where):
        """Turn products into scores, -inf where a mask hides them."""
        if changes:
            change.through(scores, options, scale, where)
        _mask(scores, options, where, keys.sees(keys.ask(options, where)))

    @verb
    def finish_held(scores, held, options, scale, where, seen):
        """Do what `finish` does, after `fetch` and `sees`."""
        if changes:
            change.through_held(scores, held, options, scale, where)
        _mask(scores, options, where, seen)

    @verb
    def _mask(scores, options, where, seen):
        if chain.picks_keys:
            if transposed or not places.within(options, where):
                hide(scores, options, seen, where)
            elif not keys.all_seen(seen):
                _hide_columns(scores, seen.mine)
        elif chain.picks or not places.within(options, where):
            hide(scores, options, seen, where)
            if chain.picks:
                _pick(scores, options, where)

    @cache
    def slopes_of(*, near: bool) -> Callable[..., Any]:
        """Return the verb for the probabilities and slopes of a pair of products (`pair_slopes`). It is
        compiled once, and all pairs call it.
        """
        return called_verb(pair_slopes(chain, places, near=near, skips=False, word=word))

    def pair(j: int, h: int, near: bool) -> PairProbabilities:
        slopes = slopes_of(near=near and j in change.near_quads)

        @verb
        def bends(products, held, options, scale, bases, where):
            return slopes(products, held, options, scale, bases, where, j, h)

        return pair_probabilities(chain, bends)

    @cache
    def bend_of(*, near: bool) -> Callable[..., None]:
        slopes = pair_slopes(chain, places, near=near, skips=True, word=word)

        @called_verb
        def bend_one(scores, held, options, factors, where, j, h):
            at, (scale, base) = 4 * j + 2 * h, factors
            _, found = slopes((scores[at], scores[at + 1]), held, options, scale, (base, base), where, j, h)
            scores[at], scores[at + 1] = found

        return bend_one

    def bent_pair(j: int, h: int, near: bool) -> Callable[..., None]:
        bend_one = bend_of(near=near and j in change.near_quads)

        @verb
        def bend_pair(both, options, factors, where):
            bend_one(both[0], both[1], options, (factors[0], factors[1 + h]), where, j, h)

        return bend_pair

    bend_near, bend_any = (one_after_another([bent_pair(*each, near) for each in pairs]) for near in (True, False))

    @verb
    def bend(scores, held, options, factors, where):
        """Turn products, marked where hidden, into probabilities times the options' slopes. held: the first argument of
        `word`. factors: scale, and for each of my two rows what its exponents are relative to.
        """
        if NEAR and change.near(scores, options, factors[0], where):
            bend_near((scores, held), options, factors, where)
        else:
            bend_any((scores, held), options, factors, where)

    bits = u32 if transposed and quads <= 8 else u64  # registers are few where rows are keys
    ALL = bits((1 << 4 * quads) - 1)

    @verb
    def picks(options, where, all_seen):
        """Return a bit for each score of a thread: whether mask_mod and key_padding_mask show it. all_seen: 1 if all
        are known to be shown. Evaluated before there are scores, so that a user's function has registers.
        """
        row, first, found, j = my_row(), places.first(where), ALL, i32(0)
        if all_seen == 0:
            found = bits(0)
            while j < quads:
                quad = u32(0)
                for h in range(2):
                    for e in range(2):
                        this = i32(row + 8 * h)
                        distance = places.ahead(where, this, first)
                        if chain.pick(options, places.at(where, this, first, i32(8 * j + e), distance)):
                            quad |= u32(1 << (2 * h + e))
                found = bits(found | bits(bits(quad) << bits(4 * j)))
                j = opaque_i32(j + 1)
        return found

    @verb
    def finish_picked(scores, held, options, scale, where, found):
        """Do what `finish` does, after `picks`."""
        if changes:
            change.through_held(scores, held, options, scale, where)
        if not places.within(options, where):
            hide(scores, options, scale, where)
        if found != ALL:
            for j in range(quads):
                quad = u32(u32(found >> bits(32 * (j // 8))) >> u32(4 * (j % 8)))
                for e in range(4):
                    if (quad & u32(1 << e)) == u32(0):
                        scores[4 * j + e] = _masked()

    @unrolled(groups)
    def _weigh(scores, options, where, first, end):
        for j in range(first, end, 2):
            corner = places.at_inside(where, my_row(), places.first(where), 8 * j, f32(0))
            near, far = chain.weights(options, corner)
            for e in range(4):
                scores[4 * j + e] *= near[e]
                scores[4 * j + 4 + e] *= far[e]

    @verb
    def weigh(scores, options, where):
        """Multiply numbers in the layout of probabilities by the weights of dropout."""
        if chain.weighs:
            _weigh(scores, options, where)

    return members(
        locals(),
        size=4 * quads,  # scores of a thread
        # of `fragment_score_mod`
        fetches=change.fetches,
        held=change.held,
        fetch=change.fetch,
        # of `fragment_keys`
        ask=keys.ask,
        sees=keys.sees,
        # of `dropout_mask`
        seed=keeping.seed,
        keeps=keeping.keeps,
        keep=keeping.keep,
        drop=keeping.drop,
        growth=keeping.growth,
        again=keeping.again,
        weight=keeping.weight,
        near=change.near,  # (scores, options, scale, where) -> whether `near_score` is valid for its quads
        # no verb: (j, h, near) -> the verb of `pair_probabilities` for quad j and row h
        pair=pair,
    )
