"""How many elements of a row of q, k, v and o are copied at once: as many as lie at multiples of 16, 8 or 4 bytes."""

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


def vectors_of(metas: Mapping[str, ArrayMeta]) -> Vectors:
    """For all arrays of a call. Rows of o are stored by 16 bytes or one by one."""
    q, k, v, o = (vector_of(metas[name]) for name in ("q", "k", "v", "o"))
    whole = o * itemsize(metas["o"].dtype) == SIZES[0] and metas["o"].shape[-1] % o == 0
    return Vectors(q, k, v, o if whole else 1)


def vector_of(meta: ArrayMeta) -> int:
    """For one of them: whose last axis is contiguous."""
    each = itemsize(meta.dtype)
    steps = [stride * each for size, stride in zip(meta.shape[:-1], meta.strides[:-1]) if size > 1]
    for nbytes in SIZES:
        if meta.pointer % nbytes == 0 and all(step % nbytes == 0 for step in steps):
            return nbytes // each
    return 1
