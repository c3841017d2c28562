"""Shares of what takes long: what CI runs, where running all is for those who change what it is of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar
from zlib import crc32

SOURCES = Path(__file__).parent.parent / "dualops"
Thing = TypeVar("Thing")


def share_of(everything: Sequence[Thing], one_in: int, of: str = "") -> list[Thing]:
    """One in so many, and one of fewer. Which follows from the sources: each change to them has another share.

    of: whose things they are, where many have the same: each then has a share of its own.
    """
    first = drawn() + crc32(of.encode())
    return list(everything[first % max(min(one_in, len(everything)), 1) :: one_in])


@cache
def drawn() -> int:
    """A number that one tree of sources always has."""
    number = 0
    for path in sorted(SOURCES.glob("**/*.py")):
        number = crc32(path.read_bytes(), number)
    return number
