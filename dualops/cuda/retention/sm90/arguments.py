"""Argument records of the sm90 kernels, and which chunks a block walks. `retention.arguments`: those of all rungs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from ....spec import ArrayMeta, Problem
from ...compiler.backend import Members, i32, i64, noun, tensor_map, types, u32, verb
from ...launch.views import number_type
from .config import DTYPE


class Loaded(NamedTuple):
    """Tensor maps of the arrays that a walk loads. As `apart`: 0 if all heads share the array, whose map then has one
    head; otherwise 1.
    """

    q: Any
    k: Any
    v: Any


class LoadedWithY(NamedTuple):
    """As `Loaded`, for the walks of log_decay's gradient."""

    q: Any
    k: Any
    v: Any
    y: Any


class SegmentStates(NamedTuple):
    """The states with which the walks of all segments begin, and those that they leave."""

    initial: Any  # [B, H, D, Dv] of segment 0
    final: Any
    step: Any  # numbers from one segment's state to the next
    count: Any  # segments of a sequence that are walked, from the first one on


SEGMENT_STATES = types.NamedTuple((*[number_type(DTYPE, 4)] * 2, i64, i32), SegmentStates)


def loaded_types(kind: Any) -> tuple[Any, Any]:
    """Return the types of the maps and of `apart`."""
    maps, apart = (types.NamedUniTuple(each, len(kind._fields), kind) for each in (tensor_map, i32))
    return maps, apart


def loaded(problem: Problem, kind: Any, names: Sequence[str]) -> tuple[Any, Any]:
    """Return the maps of these arrays, and `apart`."""
    apart = (int(not is_shared(problem.arrays[name])) for name in names)
    return kind(*(f"{name}_map" for name in names)), kind(*apart)


def is_shared(meta: ArrayMeta) -> bool:
    """Whether all heads of [B, H, S, width] are one in memory."""
    return meta.shape[1] > 1 and meta.strides[1] == 0


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
