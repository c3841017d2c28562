"""How many elements of a row are copied at once, of q say: as many as lie at multiples of 16, 8 or 4 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ....spec import ArrayMeta
from ....spec.meta import itemsize

SIZES = (16, 8, 4)  # bytes of a copy


class Vectors(NamedTuple):
    """Elements at once; 1 where rows lie anywhere."""

    q: int
    k: int
    v: int
    o: int


class GradientVectors(NamedTuple):
    """Elements at once of what the gradient loads."""

    q: int
    k: int
    v: int
    do: int


def vectors_of(metas: Mapping[str, ArrayMeta]) -> Vectors:
    """For all arrays of a call. Rows of o are stored by 16 bytes or one by one."""
    q, k, v, o = (vector_of(metas[name]) for name in Vectors._fields)
    return Vectors(q, k, v, o if is_stored_whole(metas["o"]) else 1)


def gradient_vectors_of(metas: Mapping[str, ArrayMeta]) -> GradientVectors:
    return GradientVectors(*(vector_of(metas[name]) for name in GradientVectors._fields))


def is_stored_whole(meta: ArrayMeta) -> bool:
    """Whether rows of a result lie at multiples of 16 bytes, and fill such."""
    vector = vector_of(meta)
    return vector * itemsize(meta.dtype) == SIZES[0] and meta.shape[-1] % vector == 0


def vector_of(meta: ArrayMeta) -> int:
    """For one of them, [B, H, S, D] or [total, H, D], whose last axis is contiguous.

    An axis of one element has any stride, but that of tokens: a tile's rows beyond the last are asked for too, none of
    their bytes, at addresses of whole vectors.
    """
    each, tokens = itemsize(meta.dtype), 2 if len(meta.shape) == 4 else 0
    axes = enumerate(zip(meta.shape[:-1], meta.strides[:-1]))
    steps = [stride * each for axis, (size, stride) in axes if size > 1 or axis == tokens]
    for nbytes in SIZES:
        if meta.pointer % nbytes == 0 and all(step % nbytes == 0 for step in steps):
            return nbytes // each
    return 1
