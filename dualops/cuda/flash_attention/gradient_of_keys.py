"""Gradients of scores in the registers of tensor cores' products, whose rows are keys and whose columns queries.

P.T = exp2(scores * multiplier - lse)
dS.T = (P.T * slope) * (weight * dP.T - delta)
"""

from __future__ import annotations

from collections.abc import Callable

from ..compiler.backend import Members, Noun, cuda, f32, i32, members, noun, verb
from ..tile.a_fragment import WORDS
from ..tile.numbers import numbers
from ..tile.products import opaque_f32
from ..tile.softmax_rows import pairs_of
from ..tile.unrolled import one_after_another
from .fragment_scores import FragmentScores
from .options import OptionChain

GradientOfKeys = Noun  # what `gradient_of_keys` makes


def _sixteens(score: FragmentScores, columns: int, keep: Callable[..., None], near: bool) -> list[Callable[..., None]]:
    """The verbs ((target, scores), given, (slots, at), kept), each for 16 columns."""
    num = numbers(f32)

    def pair_from(n: int) -> Callable[..., None]:
        pair = score.pair(n // 2, n % 2, near)

        @verb
        def keep_pair(both, given, bases, kept):
            target, scores = both
            probs, bent = pair((scores[2 * n], scores[2 * n + 1]), given, bases)
            keep(target, scores, n, probs, bent, given[0], kept)

        return keep_pair

    def probabilities_from(first: int) -> Callable[..., None]:
        keep_a, keep_b, keep_c, keep_d = (pair_from(first // 2 + n) for n in range(4))

        @verb
        def some(both, given, place, kept):
            """Of two quads of columns, whose statistics are loaded when they are needed: registers are few."""
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
    """The verb (target, scores, given, kept, slots, at): P of a tile [64, columns], by `keep`, a verb (target, scores,
    n, probs, bent, options, kept): of two neighbouring columns, pair n of a thread's, P and P * slope.
    """
    NEAR = chain.near_score is not None
    of_near, of_any = (one_after_another(_sixteens(score, columns, keep, near)) for near in (True, False))

    @verb
    def probabilities(target, scores, given, kept, slots, at):
        if NEAR and score.near(scores, given[0], given[1][0], given[2]):
            of_near((target, scores), given, (slots, at), kept)
        else:
            of_any((target, scores), given, (slots, at), kept)

    return probabilities


@noun
def gradient_of_keys(chain: OptionChain, score: FragmentScores, dtype: str, columns: int) -> Members:
    """The verbs for tiles [64, columns] of a warpgroup, packed as "bfloat16" or "float16", or of "float32" as `thirds`.
    Where options have slopes, `score.finish` leaves products.

    Packed is what is rounded and in pairs, as the left factor of a product has it.

    slots, at: where in shared memory lse (to base 2) or delta of a thread's columns begin, two of every eight.
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

    def d_scores_from(first: int) -> Callable[..., None]:
        @verb
        def some(d_probs, probs, options_and_kept, place):
            options, kept = options_and_kept
            slots, at = place
            delta, growth = cuda.local.array(4, f32), score.growth(options)
            num.load_four(delta, 0, slots, i32(at + first // 2))
            for n in range(first, first + 8):
                if chain.weighs:
                    d_probs[n] *= score.weight(kept, growth, n)
                d_probs[n] = probs[n] * (d_probs[n] - delta[(n - first) // 4 * 2 + n % 2])

        return some

    def packs_from(first: int) -> Callable[..., None]:
        @verb
        def some(packed, values, _, __):
            for n in range(first // 2, first // 2 + 4):
                put(packed, n, values[2 * n], values[2 * n + 1])

        return some

    probabilities = probabilities_of_keys(chain, score, columns, _keep_pair)
    all_d_scores, all_packs = (
        one_after_another([made(first) for first in eights]) for made in (d_scores_from, packs_from)
    )

    @verb
    def d_scores(d_probs, probs, options, kept, slots, at):
        """Turn dP into dS."""
        all_d_scores(d_probs, probs, (options, score.again(kept)), (slots, at))

    @verb
    def pack(packed, values):
        all_packs(packed, values, 0, 0)

    def forget_row(h: int) -> Callable[..., None]:
        @verb
        def forget(d_scores, where, _, __):
            if not score.there(where, h):
                zero = opaque_f32(num.zero)  # or else it would be a choice for each number of all tiles
                for n in range(columns // 8):
                    d_scores[4 * n + 2 * h] = zero
                    d_scores[4 * n + 2 * h + 1] = zero

        return forget

    forget_both = one_after_another([forget_row(h) for h in range(2)])

    @verb
    def forget_others(d_scores, where):
        """Write 0 to rows that may be another sequence's keys: sums over a tile's keys would include them."""
        if score.passes(where):
            forget_both(d_scores, where, 0, 0)

    steps = tuple(_sixteens(score, columns, _keep_in_step, False))
    return members(
        locals(),
        # (packed, scores, given, kept, slots, at): scores become P * slope, and weight * P is packed. given: as
        # `PairProbabilities` has it. kept: as `dropout_mask` has it
        probabilities=probabilities,
        # ((packed, scores), given, (slots, at), kept): `probabilities` of 16 columns after the others, each packed as
        # the left factor of a step of its own; where nothing is near and nothing weighs
        steps=steps,
    )
