"""A user's own score and mask: score_mod(score, b, h, i, j) -> score, mask_mod(b, h, i, j) -> bool.

b, h, i, j: batch, query head, query and key in their sequence, integers of 64 bits, so that i * j is the same as in
Python. The functions see one score at a time. Public functions first pass both through `as_they_are`, so that a call
and its gradient read the same values of variables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Param
from ..domains import optional
from .function import UserFunction, function_of
from .option import Option, Parts, Verbs


class Args(NamedTuple):
    nothing: Any


def make_score(v: Verbs, function: UserFunction) -> Parts:
    own, wide = v.function(function), v.wide

    @v.verb
    def score(score, args, at):
        return own(score, wide(at.b), wide(at.h), wide(at.i), wide(at.j))

    if not v.gradient:
        return Parts(score=score)
    own_slope = v.function(function.derivative)

    @v.verb
    def slope(score, args, at):
        return own_slope(score, wide(at.b), wide(at.h), wide(at.i), wide(at.j))

    return Parts(score=score, slope=slope)


def make_mask(v: Verbs, function: UserFunction) -> Parts:
    own, wide = v.function(function), v.wide

    @v.verb
    def pick(args, at):
        return own(wide(at.b), wide(at.h), wide(at.i), wide(at.j))

    return Parts(pick=pick)


SCORE_MOD = Option(
    "score_mod",
    inputs=(),
    params=(
        Param(
            "score_mod", None, optional(function_of("score", "b", "h", "i", "j")), "(score, b, h, i, j) -> new score"
        ),
    ),
    variant=lambda problem: problem.score_mod,
    args=lambda problem: Args(0),
    make=make_score,
)
MASK_MOD = Option(
    "mask_mod",
    inputs=(),
    params=(Param("mask_mod", None, optional(function_of("b", "h", "i", "j")), "(b, h, i, j) -> whether i sees j"),),
    variant=lambda problem: problem.mask_mod,
    args=lambda problem: Args(0),
    make=make_mask,
)


def as_they_are(score_mod: Any, mask_mod: Any) -> tuple[Any, Any]:
    """Return both as UserFunctions, with the current values of the variables that they read.

    Anything else is returned unchanged, for `Spec.bind` to refuse.
    """
    if score_mod is not None:
        score_mod = _as_it_is(SCORE_MOD, score_mod)
    if mask_mod is not None:
        mask_mod = _as_it_is(MASK_MOD, mask_mod)
    return score_mod, mask_mod


def _as_it_is(option: Option, value: Any) -> Any:
    try:
        return option.params[0].domain(value)
    except (TypeError, ValueError):
        return value
