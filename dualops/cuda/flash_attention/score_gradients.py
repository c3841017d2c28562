"""Gradients of scores, in registers.

If rows are queries (dq):

    P = exp2(scores - lse) * slope;  dS = P * (weight * dP - delta)

If rows are keys and columns queries (dk and dv):

    P.T = exp2(scores * multiplier - lse)
    dS.T = (P.T * slope) * (weight * dP.T - delta)

`split_gradient` is for two warpgroups, of which one has P.T and the other dP.T. The first rounds weight * P.T, the left
factor of dv, and hands P.T * slope to the other (`tile.warpgroup_exchange`).
"""

from __future__ import annotations

from collections.abc import Callable

from ..compiler.backend import Members, Noun, cuda, f32, i32, members, noun, verb
from ..launch.views import start
from ..tile.a_fragment import WORDS
from ..tile.numbers import numbers
from ..tile.products import opaque_f32
from ..tile.softmax_rows import ROWS, SoftmaxRows, pairs_of
from ..tile.unrolled import local_array, one_after_another, unrolled
from ..tile.warpgroup_exchange import EIGHT, Handover
from .fragment_scores import FragmentScores, my_row
from .options import OptionChain
from .saved_lse import base_of


@noun
def rows_of_queries(acc_size: int) -> Members:
    """The verbs of a tile's rows of dq, for `acc_size` numbers of a thread, in rows r and r + 8."""
    num, quads = numbers(f32), acc_size // 4

    @verb
    def read(found, x, task, row):
        """Read x for my rows, 0 beyond the end. row: the warpgroup's first."""
        for h in range(ROWS):
            found[h] = num.zero
            i = task.m0 + row + my_row() + 8 * h
            if i < task.Sq:
                found[h] = x.data[start(x, task.b, task.h, task.q_first + i)]

    @verb
    def clear(acc):
        for n in range(acc_size):
            acc[n] = num.zero

    @unrolled(range(ROWS))
    def scale(acc, factor, lse, h):
        """Turn dS @ K into dq; 0 if a row sees nothing."""
        seen = lse[h] != num.minus_inf
        for j in range(quads):
            acc[4 * j + 2 * h] = acc[4 * j + 2 * h] * factor if seen else num.zero
            acc[4 * j + 2 * h + 1] = acc[4 * j + 2 * h + 1] * factor if seen else num.zero

    return members(locals(), pair=local_array(ROWS, f32))


@noun
def gradient_of_queries(
    chain: OptionChain, score: FragmentScores, rows: SoftmaxRows, scores_size: int, acc_size: int
) -> Members:
    """The verbs of tiles with these numbers of scores and dq of a thread, in rows r and r + 8. base, delta and lse:
    arrays of two numbers. If options have slopes, `finish` must leave products.
    """
    quads, own, to_base = scores_size // 4, rows_of_queries(acc_size), base_of(chain)

    @verb
    def bases(base, lse):
        """Fill base (`saved_lse`)."""
        for h in range(ROWS):
            base[h] = to_base(lse[h])

    @verb
    def probs(scores, held, options, scale, where, base):
        """Turn finished scores into P. held: of `bend`."""
        if chain.scores:
            score.bend(scores, held, options, (scale, base[0], base[1]), where)
        else:
            factor = rows.pair()
            for h in range(ROWS):
                factor[h] = score.units(scale)[0]
            rows.exp2(scores, base, factor)
        rows.settle(scores)

    @unrolled(range(ROWS))
    def _d_scores(scores, d_probs, delta, h):
        for j in range(quads):
            scores[4 * j + 2 * h] *= d_probs[4 * j + 2 * h] - delta[h]
            scores[4 * j + 2 * h + 1] *= d_probs[4 * j + 2 * h + 1] - delta[h]

    @verb
    def d_scores(scores, d_probs, options, where, delta):
        """Turn P into dS."""
        score.weigh(d_probs, options, where)
        _d_scores(scores, d_probs, delta)

    return members(locals(), pair=own.pair, read=own.read, clear=own.clear, scale=own.scale)


def d_scores_apart(score: FragmentScores, box: Handover, size: int) -> Callable[..., None]:
    """Return the verb (d_probs, smem, place, options, where, delta) that turns dP into dS. Another warpgroup put `size`
    numbers of P * slope into a place of the box.
    """

    @unrolled(range(0, size, EIGHT))
    def d_scores_of_eight(d_probs, smem, place, delta, first):
        probs = cuda.local.array(EIGHT, f32)
        box.get(probs, smem, place, first)
        for n in range(EIGHT):
            d_probs[first + n] = probs[n] * (d_probs[first + n] - delta[n // 2 % ROWS])

    @verb
    def d_scores(d_probs, smem, place, options, where, delta):
        score.weigh(d_probs, options, where)
        d_scores_of_eight(d_probs, smem, place, delta)

    return d_scores


GradientOfKeys = Noun  # of `gradient_of_keys`


def _sixteens(score: FragmentScores, columns: int, keep: Callable[..., None], near: bool) -> list[Callable[..., None]]:
    """Return the verbs ((target, scores), given, place, kept), each for 16 columns."""
    num = numbers(f32)

    def pair_from(n: int) -> Callable[..., None]:
        pair = score.pair(n // 2, n % 2, near)

        @verb
        def keep_pair(both, given, bases, kept):
            target, scores = both
            probs, bent = pair((scores[2 * n], scores[2 * n + 1]), given, bases)
            keep(target, scores, n, probs, bent, given.options, kept)

        return keep_pair

    def probabilities_from(first: int) -> Callable[..., None]:
        keep_a, keep_b, keep_c, keep_d = (pair_from(first // 2 + n) for n in range(4))

        @verb
        def some(both, given, place, kept):
            """For two quads of columns. Statistics are loaded when they are needed, to save registers."""
            slots, at = place
            lse = cuda.local.array(4, f32)
            num.load_four(lse, 0, slots, i32(at + first // 2))
            keep_a(both, given, (lse[0], lse[1]), kept)
            keep_b(both, given, (lse[0], lse[1]), kept)
            keep_c(both, given, (lse[2], lse[3]), kept)
            keep_d(both, given, (lse[2], lse[3]), kept)

        return some

    return [probabilities_from(first) for first in range(0, columns // 2, 8)]


def probabilities_of_keys(
    chain: OptionChain, score: FragmentScores, columns: int, keep: Callable[..., None]
) -> Callable[..., None]:
    """Return the verb (target, scores, given, kept, place) that computes P of a tile [64, columns]. place: as in
    `gradient_of_keys`.

    keep: the verb (target, scores, n, probs, bent, options, kept) that gets P and P * slope of a thread's pair n of
    neighbouring columns.
    """
    NEAR = chain.near_score is not None
    of_near, of_any = (one_after_another(_sixteens(score, columns, keep, near)) for near in (True, False))

    @verb
    def probabilities(target, scores, given, kept, place):
        if NEAR and score.near(scores, given.options, given.factors[0], given.where):
            of_near((target, scores), given, place, kept)
        else:
            of_any((target, scores), given, place, kept)

    return probabilities


@noun
def gradient_of_keys(chain: OptionChain, score: FragmentScores, dtype: str, columns: int) -> Members:
    """The verbs of tiles [64, columns] of a warpgroup. `pack` rounds to "bfloat16" or "float16", or splits "float32" in
    three parts, and packs pairs in the layout of a left factor. If options have slopes, `score.finish` must leave
    products.

    place: the shared array, and where lse (to base 2) or delta of a thread's columns begins in it, two of every eight.
    """
    num, put, eights = numbers(f32), pairs_of(dtype, columns // 4), range(0, columns // 2, 8)
    put_in_step = pairs_of(dtype, WORDS)

    @verb
    def _keep_pair(packed, scores, n, probs, bent, options, kept):
        scores[2 * n], scores[2 * n + 1] = bent
        if chain.weighs:
            growth = score.growth(options)
            first, second = score.weight(kept, growth, 2 * n), score.weight(kept, growth, 2 * n + 1)
            put(packed, n, probs[0] * first, probs[1] * second)
        else:
            put(packed, n, probs[0], probs[1])

    @verb
    def _keep_in_step(packed, scores, n, probs, bent, options, kept):
        scores[2 * n], scores[2 * n + 1] = bent
        put_in_step(packed, n % WORDS, probs[0], probs[1])

    @unrolled(eights)
    def _d_scores(d_probs, probs, options, kept, place, first):
        slots, at = place
        delta, growth = cuda.local.array(4, f32), score.growth(options)
        num.load_four(delta, 0, slots, i32(at + first // 2))
        for n in range(first, first + 8):
            if chain.weighs:
                d_probs[n] *= score.weight(kept, growth, n)
            d_probs[n] = probs[n] * (d_probs[n] - delta[(n - first) // 4 * 2 + n % 2])

    @verb
    def d_scores(d_probs, probs, options, kept, place):
        """Turn dP into dS."""
        _d_scores(d_probs, probs, options, score.again(kept), place)

    @unrolled(eights)
    def pack(packed, values, first):
        for n in range(first // 2, first // 2 + 4):
            put(packed, n, values[2 * n], values[2 * n + 1])

    @unrolled(range(2))
    def _forget(d_scores, where, h):
        if not score.there(where, h):
            zero = opaque_f32(num.zero)  # else each number of each tile would be selected by a condition
            for n in range(columns // 8):
                d_scores[4 * n + 2 * h] = zero
                d_scores[4 * n + 2 * h + 1] = zero

    @verb
    def forget_others(d_scores, where):
        """Make rows 0 that may be another sequence's keys, since dq sums over a tile's keys."""
        if score.passes(where):
            _forget(d_scores, where)

    return members(
        locals(),
        # (packed, scores, given, kept, place): scores become P * slope, and weight * P is packed. given: `Given`. kept:
        # as in `dropout_mask`
        probabilities=probabilities_of_keys(chain, score, columns, _keep_pair),
        # ((packed, scores), given, place, kept): `probabilities` of 16 columns each, packed as the left factor of one
        # step; without near scores and without dropout
        steps=tuple(_sixteens(score, columns, _keep_in_step, False)),
    )


@noun
def split_gradient(chain: OptionChain, score: FragmentScores, dtype: str, columns: int, box: Handover) -> Members:
    """The verbs of tiles [64, columns] of a warpgroup, as in `gradient_of_keys`. `box` has P * slope."""
    num, eights, own = numbers(f32), range(0, columns // 2, EIGHT), gradient_of_keys(chain, score, dtype, columns)

    @verb
    def _keep_pair(others, scores, n, probs, bent, options, _):
        scores[2 * n], scores[2 * n + 1] = probs
        if chain.bends:
            others[2 * n], others[2 * n + 1] = bent

    probabilities_and_bent = probabilities_of_keys(chain, score, columns, _keep_pair)

    @unrolled(eights)
    def _weigh(values, growth, kept, first):
        for n in range(first, first + EIGHT):
            values[n] *= score.weight(kept, growth, n)

    @verb
    def probabilities(scores, bent, given, place):
        """Turn scores into P. If options have slopes, bent becomes P * slope."""
        probabilities_and_bent(bent, scores, given, 0, place)

    @verb
    def weigh(values, options, kept):
        if chain.weighs:
            _weigh(values, score.growth(options), kept)

    @unrolled(eights)
    def d_scores(d_probs, smem, probs_at, place, first):
        """Turn weight * dP into dS, with P * slope from a place of the box."""
        slots, at = place
        delta, probs = cuda.local.array(4, f32), cuda.local.array(EIGHT, f32)
        num.load_four(delta, 0, slots, i32(at + first // 2))
        box.get(probs, smem, probs_at, first)
        for n in range(4):
            for e in range(2):
                i = first + 2 * n + e
                d_probs[i] = probs[2 * n + e] * (d_probs[i] - delta[n // 2 * 2 + e])

    return members(locals(), pack=own.pack)
