"""ALiBi: - slope_h * |position of the query - key|. Press et al. 2022, arXiv:2108.12409."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Input, Problem, Role
from ..meta import Strided
from .option import Option, Parts, Verbs


class Args(NamedTuple):
    slopes: Any


def make(v: Verbs, dtype: str) -> Parts:
    number, read = v.number, v.reader(dtype, 1)

    @v.verb
    def score(score, args, at):
        return score - number(read(args.slopes, at.h)) * abs(at.distance)

    return Parts(score=score)


def args(problem: Problem) -> Args:
    return Args(Strided("alibi_slopes", problem.arrays["alibi_slopes"].strides))


ALIBI = Option(
    "alibi",
    inputs=(Input("alibi_slopes", ("H",), optional=True, role=Role.WEIGHT, doc="- slope * |position - j| is added"),),
    params=(),
    variant=lambda problem: problem.dtype_of("alibi_slopes"),
    args=args,
    make=make,
)
