"""P = exp(score - lse), of a score that is made once more and the lse that forward saved.

Where lse is large, a score may differ from forward's by a few ulps of it, that is by more than 1. So a few ulps are
taken from lse, and P is at most 1: scores that differ from the greatest one by so little count as equal to it.

    P = exp2(min(score - lse', 0) * log2(e))           lse': `lowered`

Where no option changes products, or softcap alone, which bounds them, P is one fma and one exponential instead:

    P = exp2(product * (scale * log2(e)) - lse * log2(e))

Half an ulp of lse * log2(e) must be small then. For a row of large lse it is a NaN in place of lse, and what that makes
NaN is made once more (`nan_repair`, `nan_repair_keys`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import f32, f64, verb
from ..tile.numbers import LOG2_E, numbers
from .options import OptionChain
from .score_coords import min_or_nan

NUM, DOUBLES, LOG2 = numbers(f32), numbers(f64), f32(LOG2_E)
LARGE = f32(2.0**14)  # half an ulp of lse * log2(e) is 2 ** -10 there: less than P of bfloat16 is rounded by
LOWERED_FROM, SLACK = f32(2.0**20), f32(2.0**-21)
LEAST = f32(-3.4028234663852886e38)  # finite float32


@verb
def is_large(lse):
    return abs(lse) >= LARGE


@verb
def lowered(lse):
    """lse', 0 where a row has seen nothing. It is finite where lse is: P of a score of -inf is 0 there."""
    lse = NUM.base(lse)
    return max(lse - abs(lse) * SLACK, LEAST) if abs(lse) > LOWERED_FROM else lse


@verb
def _to_base_2(lse):
    """What exponents of 2 are less by; 0 where a row has seen nothing, NaN where lse is large."""
    lse = NUM.base(lse)
    return NUM.nan if is_large(lse) else lse * LOG2


def is_natural(chain: OptionChain) -> bool:
    """Whether exponentials are made of lse as it is, lowered: options may make any score."""
    return chain.scores and chain.near_score is None


def base_of(chain: OptionChain) -> Callable[..., Any]:
    """The verb (lse) -> base, which exponents are made of."""
    return lowered if is_natural(chain) else _to_base_2


@verb
def exponent_less(score, base):
    """The exponent of 2 of a score, by a lowered lse."""
    return min_or_nan(score - base, NUM.zero) * LOG2


@verb
def _exponent_by_base_2(score, base):
    return score * LOG2 - base


def exponent_of(chain: OptionChain) -> Callable[..., Any]:
    """The verb (score, base) -> the exponent of 2 of a finished score."""
    return exponent_less if is_natural(chain) else _exponent_by_base_2


@verb
def _single(score, lse):
    lse = NUM.base(lse)
    return NUM.exp(min_or_nan(score - lowered(lse), NUM.zero) if is_large(lse) else score - lse)


@verb
def _double(score, lse):
    return DOUBLES.exp(score - DOUBLES.base(lse))


def exponential_of(number: Any) -> Callable[..., Any]:
    """The verb (score, lse) -> P on CUDA cores, in this arithmetic. Forward may have been on tensor cores."""
    return _double if number is f64 else _single


@verb
def exponential(score, lse, slack):
    """P of a score that is made by other arithmetic than forward's, of a product that differs from forward's so that
    the score does by `slack`.
    """
    lse = NUM.base(lse)
    return NUM.exp(min_or_nan(score - lse + (slack + abs(lse) * SLACK), NUM.zero) if is_large(lse) else score - lse)
