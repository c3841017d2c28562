"""The arguments of both kernels of rope, and the verbs for the addresses of a token's row and of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ..compiler.backend import Members, i64, kept_noun, types, verb
from ..launch.views import absent, by_token, strided
from ..tile.storage import storage


class Heads(NamedTuple):
    """q and k, or both rotated: [B, heads, S, D], with strides along batch, head and token."""

    q: Strided
    k: Strided


class Tables(NamedTuple):
    """cos, sin and positions, with strides along batch and token, or a table's row; 0 along a missing axis."""

    cos: Strided
    sin: Strided
    positions: Strided


class Sizes(NamedTuple):
    """Sizes of a call."""

    S: Any
    tokens: Any  # B * S
    H: Any
    heads: Any  # H + Hkv: q's, then k's
    half: Any  # R / 2
    rows: Any  # rows of the tables


@dataclass(frozen=True)
class Variant:
    """The compile-time values of kernels, in addition to their Config."""

    dtype: str
    table_dtype: str
    positions: str  # their dtype; "" without positions
    interleaved: bool
    partial: bool  # whether dimensions from R on are copied: not in place


def variant(problem: Problem) -> Variant:
    """Return the compile-time values for this problem."""
    cos, positions = problem.arrays["cos"], problem.arrays.get("positions")
    partial = 2 * problem.half < problem.D and not problem.inplace
    return Variant(problem.dtype, cos.dtype, positions.dtype if positions else "", problem.interleaved, partial)


def width(problem: Problem) -> int:
    """Return the number of a head's pairs and of the elements that are copied."""
    return problem.half if problem.inplace else problem.D - problem.half


def arguments(problem: Problem, results: Mapping[str, ArrayMeta], turn: float) -> tuple[Any, ...]:
    """Return rotated, x, tables, sizes and turn: Heads, Heads, Tables, Sizes, and 1 to rotate or -1 to rotate back."""
    p, metas = problem, {**results, **problem.arrays}
    rotated, x = (
        Heads(*(by_token(metas, name, varlen=False) for name in names)) for names in (results, [*p.arrays][:2])
    )
    tables = Tables(*(_rows(metas, name) for name in Tables._fields))
    return rotated, x, tables, Sizes(p.S, p.B * p.S, p.H, p.H + p.Hkv, p.half, p.rows), turn


def _rows(metas: Mapping[str, ArrayMeta], name: str) -> Strided:
    if name not in metas:
        return absent(2)
    *batch, token = metas[name].strides[:-1] if name != "positions" else metas[name].strides
    shared = not batch or metas[name].shape[0] == 1
    return Strided(name, (0 if shared else batch[0], token))


def argument_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of `arguments`."""
    heads = types.NamedUniTuple(strided(variant.dtype, 3), 2, Heads)
    table, positions = strided(variant.table_dtype, 2), strided(variant.positions or "int64", 2)
    tables = types.NamedTuple((table, table, positions), Tables)
    sizes = types.NamedUniTuple(i64, len(Sizes._fields), Sizes)
    return heads, heads, tables, sizes, storage(variant.dtype).number


@verb
def start(x, b, s):
    """Return the index at which the heads of a token begin, or its row of a table or of positions."""
    return b * x.strides[0] + s * x.strides[-1]


@verb
def starts(heads, b, s):
    """Return the indices at which a token's heads of q and of k begin."""
    return start(heads.q, b, s), start(heads.k, b, s)


@kept_noun
def table_rows(positions: str) -> Members:
    """The verb by which a token finds its row of the tables. positions: their dtype, "" without positions."""

    HAS_POSITIONS = positions != ""

    @verb
    def of(positions, b, s, sizes):
        """Return the row that token (b, s) uses, and whether there is one."""
        if not HAS_POSITIONS:
            return s, s < sizes.rows
        row = i64(positions.data[start(positions, b, s)])
        return row, (row >= 0) & (row < sizes.rows)

    return locals()


@verb
def find(heads, begin, h, sizes):
    """Return the array of head number h of a token, q's heads first, and the head's index in it.

    begin: `starts` of the token.
    """
    if h < sizes.H:
        return heads.q.data, begin[0] + h * heads.q.strides[1]
    return heads.k.data, begin[1] + (h - sizes.H) * heads.k.strides[1]
