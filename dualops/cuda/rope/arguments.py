"""The arguments that both kernels of rope have, and the verbs that find a token's row and a head's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ..compiler.backend import Members, i64, members, noun, types, verb
from ..launch.views import absent, by_token, strided
from ..tile.storage import storage


class Sizes(NamedTuple):
    S: Any
    tokens: Any  # B * S
    H: Any
    heads: Any  # H + Hkv: q's, then k's
    half: Any  # R / 2
    rows: Any  # of the tables


@dataclass(frozen=True)
class Variant:
    """What kernels are specialized for, in addition to their Config."""

    dtype: str
    table_dtype: str
    positions: str  # their dtype; "" where there are none
    interleaved: bool
    partial: bool  # there is something to copy: dimensions from R on, and not in place


def variant(problem: Problem) -> Variant:
    """What kernels for this problem are built for."""
    cos, positions = problem.arrays["cos"], problem.arrays.get("positions")
    partial = 2 * problem.half < problem.D and not problem.inplace
    return Variant(problem.dtype, cos.dtype, positions.dtype if positions else "", problem.interleaved, partial)


def width(problem: Problem) -> int:
    """Pairs of a head, and elements that are copied."""
    return problem.half if problem.inplace else problem.D - problem.half


def arguments(problem: Problem, results: Mapping[str, ArrayMeta], turn: float) -> tuple[Any, ...]:
    """q_rotated, k_rotated, q, k, cos, sin, positions, sizes, turn: 1 for the rotation, -1 for the one back.

    Heads [B, heads, S, D] come with strides along batch, head and token, tables and positions along batch and token,
    or a table's row; 0 along what they do not have.
    """
    p, metas = problem, {**results, **problem.arrays}
    inputs = list(p.arrays)[:2]
    sizes = Sizes(p.S, p.B * p.S, p.H, p.H + p.Hkv, p.half, p.rows)
    heads = [by_token(metas, name, varlen=False) for name in (*results, *inputs)]
    return (*heads, *(_rows(metas, name) for name in ("cos", "sin", "positions")), sizes, turn)


def _rows(metas: Mapping[str, ArrayMeta], name: str) -> Strided:
    if name not in metas:
        return absent(2)
    *batch, token = metas[name].strides[:-1] if name != "positions" else metas[name].strides
    shared = not batch or metas[name].shape[0] == 1
    return Strided(name, (0 if shared else batch[0], token))


def argument_types(variant: Variant) -> tuple[Any, ...]:
    """The types of `arguments`."""
    heads, table = strided(variant.dtype, 3), strided(variant.table_dtype, 2)
    sizes = types.NamedUniTuple(i64, len(Sizes._fields), Sizes)
    positions = strided(variant.positions or "int64", 2)
    return (*[heads] * 4, table, table, positions, sizes, storage(variant.dtype).number)


@verb
def start(x, b, s):
    """Where the heads of a token begin; of the tables or of positions, the row of a token."""
    return b * x.strides[0] + s * x.strides[-1]


@cache
@noun
def table_rows(positions: str) -> Members:
    """How tokens find their rows of the tables.

    The verb for positions of a dtype, or "" where there are none.
    """

    @verb
    def _of_token(positions, b, s, sizes):
        return s, s < sizes.rows

    @verb
    def _of_position(positions, b, s, sizes):
        row = i64(positions.data[start(positions, b, s)])
        return row, (row >= 0) & (row < sizes.rows)

    return members(
        locals(),
        # (positions, b, s, sizes) -> the row that token (b, s) uses, and whether there is one
        of=_of_position if positions else _of_token,
    )


@verb
def find(q, k, q_start, k_start, h, sizes):
    """The memory of head number h of a token, of all of q's and then k's, and where in it the head begins."""
    if h < sizes.H:
        return q.data, q_start + h * q.strides[1]
    return k.data, k_start + (h - sizes.H) * k.strides[1]
