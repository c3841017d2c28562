"""Gradients of scores of a warp that has two strips of 16 keys, APART from one another."""

from __future__ import annotations

from collections.abc import Callable

from ...backend import Namespace, cuda, i32, u32, verb
from ...tile.strips import APART
from ...tile.unrolled import one_after_another
from ..fragment_scores import FragmentScores
from ..gradient_of_keys import GradientOfKeys
from ..tiles import Where
from .fused_config import STRIPS
from .scores_of_strips import part_of


class StripsOfKeys(Namespace):
    """The verbs."""

    # (packed, scores, (options, factors, where), seed, slots, at): products become P * slope, P is packed
    probabilities: Callable[..., None]
    d_scores: Callable[..., None]  # (packed, d_probs, probs, given, seed, slots, at): dS, packed


def strips_of_keys(score: FragmentScores, gradient: GradientOfKeys, size: int) -> StripsOfKeys:
    """size: scores of a thread in a strip."""
    WORDS = size // 2

    def probabilities_of(strip: int) -> Callable[..., None]:
        take, FIRST, WORD, FURTHER = part_of(size, strip), size * strip, WORDS * strip, APART * strip

        @verb
        def one(both, given, seed, place):
            packed, scores = both
            options, factors, where = given
            slots, at = place
            part, words = take(scores), cuda.local.array(WORDS, u32)
            here = Where(where.b, where.h, where.m0, i32(where.n0 + FURTHER), where.Sq, where.Sk, where.offset)
            kept = score.keeps(options, here, seed)
            score.finish(part, options, factors[0], here)
            gradient.probabilities(words, part, (options, factors, here, 0), kept, slots, at)
            for e in range(size):
                scores[FIRST + e] = part[e]
            for n in range(WORDS):
                packed[WORD + n] = words[n]

        return one

    def d_scores_of(strip: int) -> Callable[..., None]:
        take, WORD = part_of(size, strip), WORDS * strip

        @verb
        def one(all_three, given, seed, place):
            packed, d_probs, scores = all_three
            options, _, where = given
            slots, at = place
            part, probs, words = take(d_probs), take(scores), cuda.local.array(WORDS, u32)
            kept = score.keeps(options, where, seed)
            gradient.d_scores(part, probs, options, kept, slots, at)
            gradient.pack(words, part)
            for n in range(WORDS):
                packed[WORD + n] = words[n]

        return one

    all_probabilities, all_d_scores = (
        one_after_another([made(strip) for strip in range(STRIPS)]) for made in (probabilities_of, d_scores_of)
    )

    @verb
    def probabilities(packed, scores, given, seed, slots, at):
        all_probabilities((packed, scores), given, seed, (slots, at))

    @verb
    def d_scores(packed, d_probs, probs, given, seed, slots, at):
        all_d_scores((packed, d_probs, probs), given, seed, (slots, at))

    return StripsOfKeys(probabilities=probabilities, d_scores=d_scores)
