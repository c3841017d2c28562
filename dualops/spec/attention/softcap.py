"""Softcap: softcap * tanh(score / softcap) keeps scores within (-softcap, softcap). Gemma 2, arXiv:2408.00118, 2."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Param, Problem
from ..domains import finite, optional
from .option import Option, Parts, Verbs

USUAL = 1000.0  # an error beside 1 is so many times smaller than one of a score, at most


class Args(NamedTuple):
    cap: Any
    inverse: Any


def positive(value: Any) -> float:
    number = finite(value)
    if number <= 0:
        raise ValueError("expected a number above 0, or None")
    return number


def make(v: Verbs, usual: bool) -> Parts:
    ONE, TWO, FOUR, exp = v.number(1), v.number(2), v.number(4), v.exp
    tanh, bounded = v.tanh, v.bounded

    @v.verb
    def usual_score(score, args, at):
        return bounded(score, args.inverse, args.cap)

    @v.verb
    def any_score(score, args, at):
        return args.cap * tanh(score * args.inverse)

    @v.verb
    def slope(score, args, at):
        # 1 - tanh(x)**2, where that would cancel: 4 e / (1 + e)**2 with e = exp(-2 |x|)
        e = exp(-TWO * abs(score * args.inverse))
        return FOUR * e / ((ONE + e) * (ONE + e))

    return Parts(score=usual_score if usual else any_score, slope=slope)


def args(problem: Problem) -> Args:
    return Args(problem.softcap, 1.0 / problem.softcap)


SOFTCAP = Option(
    "softcap",
    inputs=(),
    params=(Param("softcap", None, optional(positive), "scores become softcap * tanh(score / softcap)"),),
    variant=lambda problem: None if problem.softcap is None else problem.softcap <= USUAL,
    args=args,
    make=make,
)
