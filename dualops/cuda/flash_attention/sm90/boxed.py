"""Which arrays of attention can be loaded and stored as boxes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ....spec import ArrayMeta
from ....spec.meta import itemsize

MOST = 2**31 - 2**10  # of tokens, as coordinates have 32 bits, of a tile that begins in them
MULTIPLE = 16  # bytes


class Boxed(NamedTuple):
    """[B, H, S, width] of an array, or of varlen [1, H, total, width], as boxes of so many rows."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def boxed(metas: Mapping[str, ArrayMeta], name: str, varlen: bool) -> Boxed | None:
    """None for what can't be loaded as boxes: rows that don't lie at multiples of 16 bytes, or lie one upon another."""
    meta = metas[name]
    shape, strides = meta.shape, meta.strides
    if varlen:
        shape, strides = (1, shape[1], shape[0], shape[2]), (0, strides[1], strides[0], strides[2])
    nbytes = itemsize(meta.dtype)
    steps = [stride * nbytes for size, stride in zip(shape[:3], strides) if size > 1]
    apart = all(step > 0 and step % MULTIPLE == 0 and step < 2**40 for step in steps)
    if not apart or meta.pointer % MULTIPLE or any(size < 1 or size > MOST for size in shape):
        return None
    return Boxed(name, shape, strides)


def how_stored(metas: Mapping[str, ArrayMeta], name: str, varlen: bool) -> str:
    """How a result is stored (`output.STORED`). Boxes of varlen would pass the ends of sequences."""
    found = boxed(metas, name, varlen)
    if found is None or found.shape[-1] * itemsize(metas[name].dtype) % MULTIPLE:
        return "elements"
    return "vectors" if varlen else "boxes"
