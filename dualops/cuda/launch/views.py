"""Strided arguments of kernels, for all operators: their types, how they are made from arrays, and addresses of rows.

A `Strided` (`spec.meta`) describes an array to a launch: its memory and as many strides as the kernel needs. These are
the strides of all axes (`whole`), or those along batch, head and token of an array that has a row for each token
(`by_token`). A missing array is a null pointer; a kernel that is built for such calls never reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...spec import ArrayMeta
from ...spec.meta import Strided, compute_dtype, itemsize
from ..compiler.backend import i32, i64, pointer, types, u8, verb
from ..tile.storage import storage

MOST = 2**31 - 2**10  # most tokens: the coordinates of their tiles have 32 bits
MULTIPLE = 16  # bytes: alignment of a box's rows
SIZES = (16, 8, 4)  # bytes of an asynchronous copy
_ELEMENTS = {"bool": u8, "int32": i32, "int64": i64}  # types of masks, lengths and other integer arrays


def strided(dtype: str, rank: int) -> Any:
    """Return the type of an array of this dtype with `rank` strides."""
    element = _ELEMENTS[dtype] if dtype in _ELEMENTS else storage(dtype).element
    return types.NamedTuple((pointer(element), types.UniTuple(i64, rank)), Strided)


def number_type(dtype: str, rank: int) -> Any:
    """Return the type of an array in the dtype of the arithmetic: of statistics, states, or weights of rows."""
    return strided(compute_dtype(dtype), rank)


def absent(rank: int) -> Strided:
    """Return the argument for a missing array."""
    return Strided("", (0,) * rank)


def whole(metas: Mapping[str, ArrayMeta], name: str, rank: int) -> Strided:
    """Return an array of `rank` axes with all its strides."""
    return Strided(name, metas[name].strides) if name in metas else absent(rank)


def by_token(metas: Mapping[str, ArrayMeta], name: str, varlen: bool) -> Strided:
    """Return an array with strides along batch, head and token.

    It is [B, H, S, width] or [B, H, S], of varlen [total, H, width] or [H, total].
    """
    if name not in metas:
        return absent(3)
    strides = metas[name].strides
    if not varlen:
        return Strided(name, strides[:3])
    head, token = strides if len(strides) == 2 else (strides[1], strides[0])
    return Strided(name, (0, head, token))


class Boxed(NamedTuple):
    """An array [B, H, S, width], of varlen [1, H, total, width], as boxes of a number of rows."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def boxed(metas: Mapping[str, ArrayMeta], name: str, varlen: bool) -> Boxed | None:
    """Return the array as boxes, None if its rows overlap or don't begin at multiples of 16 bytes."""
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
    """Return how a result is stored: "boxes", "vectors" or "elements". Boxes of varlen would cross sequences' ends."""
    found = boxed(metas, name, varlen)
    if found is None or found.shape[-1] * itemsize(metas[name].dtype) % MULTIPLE:
        return "elements"
    return "vectors" if varlen else "boxes"


def is_stored_whole(meta: ArrayMeta) -> bool:
    """Return whether rows of a result begin and end at multiples of 16 bytes."""
    vector = vector_of(meta)
    return vector * itemsize(meta.dtype) == SIZES[0] and meta.shape[-1] % vector == 0


def vector_of(meta: ArrayMeta) -> int:
    """Return the elements of the longest aligned copy for an array [B, H, S, D] or [total, H, D].

    Its last axis is contiguous. The stride of an axis of size 1 does not matter, except that of tokens: the copies for
    rows of a tile after the last token read no bytes, but their addresses must be aligned, too.
    """
    each, tokens = itemsize(meta.dtype), 2 if len(meta.shape) == 4 else 0
    axes = enumerate(zip(meta.shape[:-1], meta.strides[:-1]))
    steps = [stride * each for axis, (size, stride) in axes if size > 1 or axis == tokens]
    for nbytes in SIZES:
        if meta.pointer % nbytes == 0 and all(step % nbytes == 0 for step in steps):
            return nbytes // each
    return 1


# --- verbs -----------------------------------------------------------------------------------------


@verb
def start(x, b, h, token):
    """Return the index at which a token's row of an array begins."""
    return i64(b) * x.strides[0] + i64(h) * x.strides[1] + i64(token) * x.strides[2]


@verb
def boundary(ends, b):
    """Return the first token of sequence b of varlen, in 32 bits. ends [B + 1]: cu_seqlens."""
    return ends.data[b * ends.strides[0]]
