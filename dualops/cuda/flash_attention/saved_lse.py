"""P = exp(score - lse), where the score is recomputed and lse was saved by forward.

If lse is large, a recomputed score may differ from forward's by a few ulps, which is more than 1. So a few ulps are
subtracted from lse, and P is at most 1: scores within these ulps of the maximum count as equal to it.

    P = exp2(min(score - lse', 0) * log2(e))           lse': `lowered`

If no option changes products, or softcap alone, which bounds them, P is one fma and one exponential instead:

    P = exp2(product * (scale * log2(e)) - lse * log2(e))

Then half an ulp of lse * log2(e) must be small. A row of large lse has NaN in place of lse, and everything that becomes
NaN is recomputed (`nan_repair`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import f32, f64, verb
from ..tile.numbers import LOG2_E, numbers
from .options import OptionChain
from .score_coords import min_or_nan

NUM, DOUBLES, LOG2 = numbers(f32), numbers(f64), f32(LOG2_E)
LARGE = f32(2.0**14)  # half an ulp of lse * log2(e) is 2 ** -10 there, less than the rounding of P to bfloat16
LOWERED_FROM, SLACK = f32(2.0**20), f32(2.0**-21)
LEAST = f32(-3.4028234663852886e38)  # finite float32


@verb
def is_large(lse):
    return abs(lse) >= LARGE


@verb
def lowered(lse):
    """Return lse', 0 if a row sees nothing. It is finite if lse is, so that P of a score of -inf is 0."""
    lse = NUM.base(lse)
    return max(lse - abs(lse) * SLACK, LEAST) if abs(lse) > LOWERED_FROM else lse


@verb
def _to_base_2(lse):
    """Return lse * log2(e); 0 if a row sees nothing, NaN if lse is large."""
    lse = NUM.base(lse)
    return NUM.nan if is_large(lse) else lse * LOG2


def is_natural(chain: OptionChain) -> bool:
    """Return whether exponents use lse as it is, lowered: options may produce any score."""
    return chain.scores and chain.near_score is None


def base_of(chain: OptionChain) -> Callable[..., Any]:
    """Return the verb (lse) -> base, which exponents are relative to."""
    return lowered if is_natural(chain) else _to_base_2


@verb
def exponent_less(score, base):
    """Return the exponent to base 2 of a score, relative to a lowered lse."""
    return min_or_nan(score - base, NUM.zero) * LOG2


@verb
def _exponent_by_base_2(score, base):
    return score * LOG2 - base


def exponent_of(chain: OptionChain) -> Callable[..., Any]:
    """Return the verb (score, base) -> the exponent to base 2 of a finished score."""
    return exponent_less if is_natural(chain) else _exponent_by_base_2


@verb
def _single(score, lse):
    lse = NUM.base(lse)
    return NUM.exp(min_or_nan(score - lowered(lse), NUM.zero) if is_large(lse) else score - lse)


@verb
def _double(score, lse):
    return DOUBLES.exp(score - DOUBLES.base(lse))


def exponential_of(number: Any) -> Callable[..., Any]:
    """Return the verb (score, lse) -> P on CUDA cores, in this arithmetic. Forward may have used tensor cores."""
    return _double if number is f64 else _single


@verb
def exponential(score, lse, slack):
    """Return P of a score that was computed by other arithmetic than forward's, and may differ by `slack`."""
    lse = NUM.base(lse)
    return NUM.exp(min_or_nan(score - lse + (slack + abs(lse) * SLACK), NUM.zero) if is_large(lse) else score - lse)
