"""Softcap: softcap * tanh(score / softcap) keeps scores within (-softcap, softcap). Gemma 2, arXiv:2408.00118, 2."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Param, Problem
from ..domains import finite, optional
from .option import Option, Parts, Verbs


class Args(NamedTuple):
    cap: Any
    inverse: Any


def positive(value: Any) -> float:
    number = finite(value)
    if number <= 0:
        raise ValueError("expected a number above 0, or None")
    return number


def make(v: Verbs, facts: Any) -> Parts:
    ONE, tanh = v.number(1), v.tanh

    @v.verb
    def score(score, args, at):
        return args.cap * tanh(score * args.inverse)

    @v.verb
    def slope(score, args, at):
        bent = tanh(score * args.inverse)
        return ONE - bent * bent

    return Parts(score=score, slope=slope)


def args(problem: Problem) -> Args:
    return Args(problem.softcap, 1.0 / problem.softcap)


SOFTCAP = Option(
    "softcap",
    inputs=(),
    params=(Param("softcap", None, optional(positive), "scores become softcap * tanh(score / softcap)"),),
    variant=lambda problem: None if problem.softcap is None else True,
    args=args,
    make=make,
)
