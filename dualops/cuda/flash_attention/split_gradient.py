"""Gradients of scores of which one warpgroup has P and another dP, in the registers of tensor cores' products, whose
rows are keys and whose columns queries.

P.T = exp2(scores * multiplier - lse)                      of it one makes weight * P.T, rounded, the left factor of dv
dS.T = (P.T * slope) * (weight * dP.T - delta)             of it the other gets P.T * slope (`tile.warpgroup_exchange`)

given, kept: as `gradient_of_keys` has them.
"""

from __future__ import annotations

from collections.abc import Callable

from ..compiler.backend import Members, Noun, cuda, f32, i32, noun, verb
from ..tile.numbers import numbers
from ..tile.softmax_rows import pairs_of
from ..tile.unrolled import one_after_another
from ..tile.warpgroup_exchange import EIGHT, Handover
from .fragment_scores import FragmentScores
from .gradient_of_keys import probabilities_of_keys
from .options import OptionChain

GradientApart = Noun  # what `split_gradient` makes


@noun
def split_gradient(chain: OptionChain, score: FragmentScores, dtype: str, columns: int, box: Handover) -> Members:
    """The verbs for tiles [64, columns] of a warpgroup, packed as "bfloat16" or "float16", or of "float32" as `thirds`;
    `box` has P * slope.

    Packed is what is rounded and in pairs, as the left factor of a product has it.

    slots, at: where in shared memory lse (to base 2) or delta of a thread's columns begin, two of every eight.
    """
    num, put, eights = numbers(f32), pairs_of(dtype, columns // 4), range(0, columns // 2, EIGHT)

    @verb
    def _keep_pair(others, scores, n, probs, bent, options, _):
        scores[2 * n], scores[2 * n + 1] = probs
        if chain.bends:
            others[2 * n], others[2 * n + 1] = bent

    probabilities_and_bent = probabilities_of_keys(chain, score, columns, _keep_pair)

    def weights_from(first: int) -> Callable[..., None]:
        @verb
        def some(values, growth, kept, _):
            for n in range(first, first + EIGHT):
                values[n] *= score.weight(kept, growth, n)

        return some

    def d_scores_from(first: int) -> Callable[..., None]:
        @verb
        def some(d_probs, smem, place, statistics):
            slots, at = statistics
            delta, probs = cuda.local.array(4, f32), cuda.local.array(EIGHT, f32)
            num.load_four(delta, 0, slots, i32(at + first // 2))
            box.get(probs, smem, place, first)
            for n in range(4):
                for e in range(2):
                    i = first + 2 * n + e
                    d_probs[i] = probs[2 * n + e] * (d_probs[i] - delta[n // 2 * 2 + e])

        return some

    def packs_from(first: int) -> Callable[..., None]:
        @verb
        def some(packed, values, _, __):
            for n in range(first // 2, first // 2 + 4):
                put(packed, n, values[2 * n], values[2 * n + 1])

        return some

    all_weights, all_d_scores, all_packs = (
        one_after_another([made(first) for first in eights]) for made in (weights_from, d_scores_from, packs_from)
    )

    @verb
    def probabilities(scores, bent, given, slots, at):
        """Turn scores into P, and bent, where there are slopes, into P * slope."""
        probabilities_and_bent(bent, scores, given, 0, slots, at)

    @verb
    def weigh(values, options, kept):
        if chain.weighs:
            all_weights(values, score.growth(options), kept, 0)

    @verb
    def d_scores(d_probs, smem, place, slots, at):
        """Turn weight * dP into dS, by the numbers at a place in shared memory."""
        all_d_scores(d_probs, smem, place, (slots, at))

    @verb
    def pack(packed, values):
        all_packs(packed, values, 0, 0)

    return locals()
