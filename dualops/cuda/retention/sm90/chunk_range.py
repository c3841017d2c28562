"""Which chunks a block walks: those of a sequence or of one of its segments, in either direction."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ...compiler.backend import Members, i32, noun, u32, verb


class Chunks(NamedTuple):
    """The chunks of a block."""

    count: Any
    m0: Any  # the first token of the chunk that comes first


@cache
@noun
def chunk_range(chunk: int, back: bool) -> Members:
    """The verbs for chunks of this many tokens."""
    CHUNK = u32(chunk)  # unsigned divisions are faster

    @verb
    def last(rows):
        """Return the first token of the last chunk of this many rows."""
        return i32((u32(rows) - u32(1)) // CHUNK * CHUNK)

    @verb
    def chunks(part, call):
        """Return the chunks of segment number `part`."""
        before = i32(part * call.state_chunk)  # tokens of the segments before
        length = max(min(i32(call.rows - before), i32(call.state_chunk)), i32(0))
        m0 = i32(last(call.rows) - before) if back else before
        return Chunks(u32((length + (chunk - 1)) // chunk), m0)

    return locals()
