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
    """How many keys before and after its own position a query sees."""
    left, right = problem.window or (None, None)
    right = 0 if problem.causal else right
    return Args(UNBOUNDED if left is None else left, UNBOUNDED if right is None else right)


def make(v: Verbs, facts: Any) -> Parts:
    @v.verb
    def visible(args, at):
        distance = at.j - at.position
        return (distance <= args.right) & (distance >= -args.left)

    @v.verb
    def key_range(args, m0, m1, offset):
        return m0 + offset - args.left, m1 + offset + args.right

    @v.verb
    def query_range(args, n0, n1, offset):
        return n0 - offset - args.right, n1 - offset + args.left

    @v.verb
    def full(args, m0, m1, n0, n1, offset):
        return (n1 - 1 <= m0 + offset + args.right) & (n0 >= m1 - 1 + offset - args.left)

    return Parts(visible=visible, key_range=key_range, query_range=query_range, full=full)


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
