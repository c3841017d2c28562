"""Softcap: softcap * tanh(score / softcap) is within (-softcap, softcap). Gemma 2, arXiv:2408.00118, section 2."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Param, Problem
from ..domains import finite, optional
from .option import Curve, Option, Parts, Verbs

USUAL = 1000.0  # an error in a term next to 1 counts as at most this many times smaller than one in a score


class Args(NamedTuple):
    cap: Any
    inverse: Any


def positive(value: Any) -> float:
    number = finite(value)
    if number <= 0:
        raise ValueError("expected a number above 0, or None")
    return number


def make(v: Verbs, usual: bool) -> Parts:
    tanh, bounded, tanh_slope = v.tanh, v.bounded, v.tanh_slope

    @v.verb
    def usual_score(score, args, at):
        return bounded(score, args.inverse, args.cap)

    @v.verb
    def any_score(score, args, at):
        return args.cap * tanh(score * args.inverse)

    @v.verb
    def slope(score, args, at):
        return tanh_slope(score, args.inverse)

    @v.verb
    def rate(args):
        return args.inverse

    @v.verb
    def size(args):
        return args.cap

    if not usual:
        return Parts(score=any_score, slope=slope)
    return Parts(score=usual_score, slope=slope, curve=v.tanh_curve and Curve(rate, size, v.tanh_curve))


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
