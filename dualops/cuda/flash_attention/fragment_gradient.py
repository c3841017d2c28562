"""Gradients of scores in the registers of tensor cores' products, whose rows are keys and whose columns queries.

    P.T = exp2(scores * multiplier - lse)
    dS.T = P.T * (weight * dP.T - delta) * slope
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..backend import Namespace, f32, verb
from ..tile.numbers import numbers
from ..tile.softmax_rows import PAIRS
from ..tile.unrolled import one_after_another


class FragmentGradient(Namespace):
    """The verbs. lse (to base 2) and delta are a thread's columns, as `Columns` has them."""

    probabilities: Callable[..., None]  # (scores, lse, multiplier): scores become P
    d_scores: Callable[..., None]  # (d_probs, probs, delta): dP becomes dS, without slopes
    times: Callable[..., None]  # (values, factors): number by number
    pack: Callable[..., None]  # (words, values): rounded, in pairs
    pack_weighed: Callable[..., None]  # (words, values, weights): the products


def fragment_gradient(dtype: str, columns: int) -> FragmentGradient:
    """For tiles [64, columns] of a warpgroup, packed as "bfloat16" or "float16"."""
    num, quads, pack_two = numbers(f32), columns // 8, PAIRS[dtype]
    groups = [(first, min(first + 4, quads)) for first in range(0, quads, 4)]

    def for_all(of_quads: Callable[[int, int], Callable[..., None]]) -> Callable[..., None]:
        return one_after_another([of_quads(*group) for group in groups])

    def some_probabilities(first: int, end: int) -> Callable[..., None]:
        @verb
        def probabilities(scores, lse, multiplier, _):
            for j in range(first, end):
                for h in range(2):
                    for e in range(2):
                        at = 4 * j + 2 * h + e
                        scores[at] = num.exp2(scores[at] * multiplier - lse[2 * j + e])

        return probabilities

    def some_d_scores(first: int, end: int) -> Callable[..., None]:
        @verb
        def d_scores(d_probs, probs, delta, _):
            for j in range(first, end):
                for h in range(2):
                    for e in range(2):
                        at = 4 * j + 2 * h + e
                        d_probs[at] = probs[at] * (d_probs[at] - delta[2 * j + e])

        return d_scores

    def some_times(first: int, end: int) -> Callable[..., None]:
        @verb
        def times(values, factors, _, __):
            for at in range(4 * first, 4 * end):
                values[at] *= factors[at]

        return times

    def some_packs(first: int, end: int) -> Callable[..., None]:
        @verb
        def pack(words, values, _, __):
            for n in range(2 * first, 2 * end):
                words[n] = pack_two(values[2 * n], values[2 * n + 1])

        return pack

    def some_weighed(first: int, end: int) -> Callable[..., None]:
        @verb
        def pack_weighed(words, values, weights, _):
            for n in range(2 * first, 2 * end):
                words[n] = pack_two(values[2 * n] * weights[2 * n], values[2 * n + 1] * weights[2 * n + 1])

        return pack_weighed

    all_probabilities, all_d_scores = for_all(some_probabilities), for_all(some_d_scores)
    all_times, all_packs, all_weighed = for_all(some_times), for_all(some_packs), for_all(some_weighed)

    @verb
    def probabilities(scores, lse, multiplier):
        all_probabilities(scores, lse, multiplier, 0)

    @verb
    def d_scores(d_probs, probs, delta):
        all_d_scores(d_probs, probs, delta, 0)

    @verb
    def times(values, factors):
        all_times(values, factors, 0, 0)

    @verb
    def pack(words, values):
        all_packs(words, values, 0, 0)

    @verb
    def pack_weighed(words, values, weights):
        all_weighed(words, values, weights, 0)

    return FragmentGradient(
        probabilities=probabilities, d_scores=d_scores, times=times, pack=pack, pack_weighed=pack_weighed
    )
