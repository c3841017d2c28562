"""Slices of V's columns, where a warpgroup's registers don't hold a result of all: pieces of work for the same queries.

Each slice makes the scores anew. Those of the same queries follow one another, and find Q and K in L2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ...compiler.backend import Namespace, i32, u32, verb


class Slices(Namespace):
    """The verbs."""

    total: Callable[..., Any]  # (pieces) -> how many there are, where the walk has so many
    walk: Callable[..., Any]  # (number) -> the number of the walk's piece
    column: Callable[..., Any]  # (number) -> the first column of its slice


@verb
def _same(number):
    return number


@verb
def _none_before(number):
    return i32(0)


@cache
def slices_of(count: int, width: int) -> Slices:
    """The verbs of so many slices of so many columns."""
    COUNT = u32(count)

    if count == 1:
        return Slices(total=_same, walk=_same, column=_none_before)

    @verb
    def total(pieces):
        return i32(pieces * count)

    @verb
    def walk(number):
        return i32(u32(number) // COUNT)

    @verb
    def column(number):
        return i32(u32(number) % COUNT * u32(width))

    return Slices.from_locals(locals())
