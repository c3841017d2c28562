"""How many elements of a row are copied at once, of q say: as many as lie at multiples of 16, 8 or 4 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ....spec import ArrayMeta
from ...launch.views import is_stored_whole, vector_of


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
