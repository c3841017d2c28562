"""Gradients of scores in the registers of tensor cores' products, whose rows are keys and whose columns queries.

P.T = exp2(scores * multiplier - lse)
dS.T = P.T * (weight * dP.T - delta) * slope
"""

from __future__ import annotations

from collections.abc import Callable

from ..backend import Namespace, cuda, f32, i32, verb
from ..tile.numbers import numbers
from ..tile.softmax_rows import pairs_of
from ..tile.unrolled import one_after_another
from .options import OptionChain


class GradientOfKeys(Namespace):
    """The verbs. Packed is what is rounded and in pairs, as the left factor of a product has it.

    slots, at: where in shared memory lse (to base 2) or delta of a thread's columns begin, two of every eight.
    """

    # (packed, scores, weights, slots, at, multiplier): scores become P, and weight * P is packed
    probabilities: Callable[..., None]
    d_scores: Callable[..., None]  # (d_probs, probs, weights, slopes, slots, at): dP becomes dS
    pack: Callable[..., None]  # (packed, values)


def gradient_of_keys(chain: OptionChain, dtype: str, columns: int) -> GradientOfKeys:
    """For tiles [64, columns] of a warpgroup, packed as "bfloat16" or "float16", or of "float32" as `thirds`."""
    num, put, eights = numbers(f32), pairs_of(dtype, columns // 4), range(0, columns // 2, 8)

    def probabilities_from(first: int) -> Callable[..., None]:
        @verb
        def some(both, weights, place, multiplier):
            """Of two quads of columns, whose statistics are loaded when they are needed: registers are few."""
            packed, scores = both
            slots, at = place
            lse = cuda.local.array(4, f32)
            num.load_four(lse, 0, slots, i32(at + first // 2))
            for n in range(first // 2, first // 2 + 4):
                for e in range(2):
                    scores[2 * n + e] = num.exp2(scores[2 * n + e] * multiplier - lse[(n - first // 2) // 2 * 2 + e])
                if chain.weighs:
                    put(packed, n, scores[2 * n] * weights[2 * n], scores[2 * n + 1] * weights[2 * n + 1])
                else:
                    put(packed, n, scores[2 * n], scores[2 * n + 1])

        return some

    def d_scores_from(first: int) -> Callable[..., None]:
        @verb
        def some(d_probs, probs, factors, place):
            weights, slopes = factors
            slots, at = place
            delta = cuda.local.array(4, f32)
            num.load_four(delta, 0, slots, i32(at + first // 2))
            for n in range(first // 2, first // 2 + 4):
                for e in range(2):
                    if chain.weighs:
                        d_probs[2 * n + e] *= weights[2 * n + e]
                    d_probs[2 * n + e] = probs[2 * n + e] * (d_probs[2 * n + e] - delta[(n - first // 2) // 2 * 2 + e])
                    if chain.bends:
                        d_probs[2 * n + e] *= slopes[2 * n + e]

        return some

    def packs_from(first: int) -> Callable[..., None]:
        @verb
        def some(packed, values, _, __):
            for n in range(first // 2, first // 2 + 4):
                put(packed, n, values[2 * n], values[2 * n + 1])

        return some

    all_probabilities, all_d_scores, all_packs = (
        one_after_another([made(first) for first in eights]) for made in (probabilities_from, d_scores_from, packs_from)
    )

    @verb
    def probabilities(packed, scores, weights, slots, at, multiplier):
        all_probabilities((packed, scores), weights, (slots, at), multiplier)

    @verb
    def d_scores(d_probs, probs, weights, slopes, slots, at):
        all_d_scores(d_probs, probs, (weights, slopes), (slots, at))

    @verb
    def pack(packed, values):
        all_packs(packed, values, 0, 0)

    return GradientOfKeys(probabilities=probabilities, d_scores=d_scores, pack=pack)
