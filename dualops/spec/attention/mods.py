"""A user's own score and mask: score_mod(score, b, h, i, j) -> score, mask_mod(b, h, i, j) -> bool.

b, h, i, j: batch, query head, query and key in their sequence, integers. The functions see one score at a time.
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
    own = v.function(function)

    @v.verb
    def score(score, args, at):
        return own(score, at.b, at.h, at.i, at.j)

    if not v.gradient:
        return Parts(score=score)
    own_slope = v.function(function.derivative)

    @v.verb
    def slope(score, args, at):
        return own_slope(score, at.b, at.h, at.i, at.j)

    return Parts(score=score, slope=slope)


def make_mask(v: Verbs, function: UserFunction) -> Parts:
    own = v.function(function)

    @v.verb
    def visible(args, at):
        return own(at.b, at.h, at.i, at.j)

    return Parts(visible=visible)


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
