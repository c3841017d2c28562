"""Which chunks a block walks: those of a sequence, or of one of the segments that it is cut into; forth, or back."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ...compiler.backend import Members, i32, noun, u32, verb


class Chunks(NamedTuple):
    """Of a block."""

    count: Any
    m0: Any  # the token that the first one to be walked begins with


@cache
@noun
def chunk_range(chunk: int, back: bool) -> Members:
    """The verbs for chunks of so many tokens."""
    CHUNK = u32(chunk)  # no sign to look after in what follows

    @verb
    def last(rows):
        """Return the first token of the last chunk of so many rows."""
        return i32((u32(rows) - u32(1)) // CHUNK * CHUNK)

    @verb
    def chunks(part, call):
        """Return the chunks of segment number `part`."""
        before = i32(part * call.state_chunk)  # tokens that other blocks walk first
        length = max(min(i32(call.rows - before), i32(call.state_chunk)), i32(0))
        m0 = i32(last(call.rows) - before) if back else before
        return Chunks(u32((length + (chunk - 1)) // chunk), m0)

    return locals()
