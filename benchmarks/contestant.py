"""Whose implementation is timed: dualops' own, or a peer's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from .tree import spec


class Contestant(NamedTuple):
    """Somebody's implementation; arrays go in under the spec's names, parameters are bound already."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None


# Raises ImportError where the peer is not installed, NotImplementedError where it cannot do the problem.
PeerMaker = Callable[[spec.Problem], Contestant]


def dualops_contestant(operator: spec.Spec, case: spec.Case) -> Contestant:
    """The operator as the importable `dualops` has it. Raises NotImplementedError where it has not."""
    functions = import_module("dualops.cuda")
    if not hasattr(functions, operator.name):
        raise NotImplementedError(f"this dualops has no {operator.name}")
    backward = getattr(functions, f"{operator.name}_backward", None)
    return Contestant(
        "dualops",
        partial(getattr(functions, operator.name), **case.params),
        None if backward is None else partial(backward, **case.params),
    )
