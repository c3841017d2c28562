"""Attention sinks: an additional logit per head, without a value. Xiao et al. 2023, arXiv:2309.17453."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Input, Problem, Role
from ..meta import Strided
from .option import Option, Parts, Verbs


class Args(NamedTuple):
    sinks: Any


def make(v: Verbs, dtype: str) -> Parts:
    number, read = v.number, v.reader(dtype, 1)

    @v.verb
    def sink(args, h):
        return number(read(args.sinks, h))

    return Parts(sink=sink)


def args(problem: Problem) -> Args:
    return Args(Strided("sinks", problem.arrays["sinks"].strides))


SINKS = Option(
    "sinks",
    inputs=(
        Input("sinks", ("H",), optional=True, role=Role.WEIGHT, doc="one more logit in the softmax, without a value"),
    ),
    params=(),
    variant=lambda problem: problem.dtype_of("sinks"),
    args=args,
    make=make,
)
