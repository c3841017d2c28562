"""P of a tile on its way from the warpgroup that has dv to the one that has dk (`dkv_split`, `dkv_split_f32`)."""

from __future__ import annotations

from collections.abc import Callable

from ...compiler.backend import verb
from ...tile.warpgroup_exchange import Handover
from ..fragment_scores import FragmentScores
from ..options import OptionChain
from ..split_gradient import GradientApart
from .q_tiles import QTiles


def split_probs(
    chain: OptionChain, score: FragmentScores, visits: QTiles, gradient: GradientApart, box: Handover
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The verbs (smem, bars, i, scores, picks, bent, statistics, factors, options, where), of the one, and (smem, bars,
    i, d_probs, statistics, options, where), of the other.
    """
    BENDS = chain.bends

    @verb
    def hand_probs(smem, bars, i, scores, picks, bent, statistics, factors, options, where):
        """S.T becomes P.T, of which P.T * slope is handed over, and then weight * P.T."""
        slots, at = statistics
        visits.finish(scores, options, factors[0], where, picks)
        gradient.probabilities(scores, bent, (options, factors, where, 0), slots, at)
        place = box.claim(bars, i)
        if BENDS:
            box.put(smem, place, bent)
        else:
            box.put(smem, place, scores)
        box.hand(bars, i)
        gradient.weigh(scores, options, score.keeps(options, where, score.seed(options)))

    @verb
    def take_probs(smem, bars, i, d_probs, statistics, options, where):
        """dP.T becomes dS.T."""
        slots, at = statistics
        gradient.weigh(d_probs, options, score.keeps(options, where, score.seed(options)))
        gradient.d_scores(d_probs, smem, box.take(bars, i), slots, at)

    return hand_probs, take_probs
