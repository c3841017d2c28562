"""Causal and sliding-window masks: -left <= j - position <= right is seen. Beltagy et al. 2020, arXiv:2004.05150."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Param, Problem
from ..domains import boolean, integer
from .option import UNBOUNDED, Option, Parts, Verbs


class Args(NamedTuple):
    left: Any  # keys before the query's position, and after it
    right: Any


def causal_mode(value: Any) -> bool | str:
    if isinstance(value, str) and value == "top_left":
        return "top_left"
    try:
        return boolean(value)
    except TypeError:
        raise ValueError("expected False, True or 'top_left'") from None


def sides(value: Any) -> tuple[int | None, int | None] | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError("expected None or a pair (left, right)")
    left, right = (None if side is None else integer(side) for side in value)
    if (left or 0) < 0 or (right or 0) < 0:
        raise ValueError("expected left and right to be None (unbounded) or at least 0")
    return left, right


def band(problem: Problem) -> Args:
    """Return how many keys before and after its own position a query sees: UNBOUNDED at most."""
    left, right = problem.window or (None, None)
    right = 0 if problem.causal else right
    return Args(*(UNBOUNDED if side is None else min(side, UNBOUNDED) for side in (left, right)))


def make(v: Verbs, facts: Any) -> Parts:
    integer, larger, smaller = v.integer, v.larger, v.smaller

    @v.verb
    def around(before, after, opposite, count):
        """Return opposite - before to opposite + after, clipped to 0 and count before a sum could exceed 32 bits."""
        end = smaller(opposite, integer(count - 1 - after)) + after + 1
        return integer(larger(opposite, integer(before)) - before), integer(end)

    @v.verb
    def keys(args, i, opposite, Sk):
        return around(args.left, args.right, opposite, Sk)

    @v.verb
    def queries(args, j, opposite, Sq):
        return around(args.right, args.left, opposite, Sq)

    return Parts(keys=keys, queries=queries)


BAND = Option(
    "band",
    inputs=(),
    params=(
        Param("causal", False, causal_mode, "False, True (aligned at the last key) or 'top_left'"),
        Param("window", None, sides, "(left, right): keys seen before and after a query's position, None: all"),
    ),
    variant=lambda problem: None if band(problem) == (UNBOUNDED, UNBOUNDED) else True,
    args=band,
    make=make,
)
