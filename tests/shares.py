"""Shares of long tests: CI runs a share; who changes what they test runs all of them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar
from zlib import crc32

SOURCES = Path(__file__).parent.parent / "dualops"
Thing = TypeVar("Thing")


def share_of(everything: Sequence[Thing], one_in: int, of: str = "") -> list[Thing]:
    """Return one in `one_in`, or one if there are fewer. The sources decide which: each change to them gives another
    share.

    of: the owner of the things, if several owners share in the same way: each then has another share.
    """
    first = drawn() + crc32(of.encode())
    return list(everything[first % max(min(one_in, len(everything)), 1) :: one_in])


@cache
def drawn() -> int:
    """Return a number that depends only on the sources."""
    number = 0
    for path in sorted(SOURCES.glob("**/*.py")):
        number = crc32(path.read_bytes(), number)
    return number
