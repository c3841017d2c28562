"""Key padding: keys that no query of their batch sees."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Input, Problem, Role
from ..meta import Strided
from .option import Option, Parts, Verbs


class Args(NamedTuple):
    keep: Any


def make(v: Verbs, facts: Any) -> Parts:
    read = v.reader("bool", 2)

    @v.verb
    def pick(args, at):
        return read(args.keep, at.b, at.j)

    return Parts(pick=pick, picks_keys=True)


def args(problem: Problem) -> Args:
    return Args(Strided("key_padding_mask", problem.arrays["key_padding_mask"].strides))


PADDING = Option(
    "key_padding_mask",
    inputs=(Input("key_padding_mask", ("B", "Sk"), ("bool",), optional=True, role=Role.OTHER, doc="True keeps a key"),),
    params=(),
    variant=lambda problem: problem.dtype_of("key_padding_mask"),
    args=args,
    make=make,
)
