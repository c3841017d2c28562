"""The arguments of all retention kernels, and the verbs (device functions) that read them.

All kernels compute retention of one pass (`passes`). Row r reads the columns c before it:

    out_r = sum_c scale * (q_r . k_c) * gamma^(r + offset - c) * v_c  +  state_scale * gamma^(r + later) * q_r @ state

q belongs to a row, k and v to a column. With log_decay, `decays` gives what a power of gamma stands for here. Some
passes of the gradient go from the last token to the first. Their row 0 is the last token, and `direction` is -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import compute_dtype, contiguous_strides
from ..compiler.backend import i32, i64, types, u32, verb
from ..launch.arrays import cdiv
from ..launch.step import Step
from ..launch.views import boundary, number_type, strided
from ..tile.storage import storage
from ..unowned import filled, unowned_steps

LONGEST_CHUNK = 256  # tokens whose contribution to a state is summed at once
NO_CHUNK = 2**30  # as a chunk's number or length: beyond all tokens
SIGNED, ABS = 1, 2  # a row's divisor: max(1, |sum|) or max(1, sum of magnitudes)
OF_ROWS, OF_COLUMNS = 1, 2  # a norm [D] is multiplied by q, for row sums; a norm [Dv] is one more row of the state


class Call(NamedTuple):
    """The sizes and options of a pass. For varlen the sizes are those of the longest sequence."""

    B: Any
    H: Any
    rows: Any
    columns: Any
    D: Any
    Dv: Any
    offset: Any  # the column at the position of row 0
    direction: Any  # 1: row 0 is the first token, -1: the last
    chunk: Any  # rows that read each other directly; earlier tokens reach them through a state
    first_chunk: Any  # the first chunk that has a state before it: 0, 1, or NO_CHUNK
    state_chunk: Any  # tokens from one state in the workspace to the next
    slots: Any  # states of a sequence in the workspace
    later: Any  # tokens from the state before a chunk to its first row: 1 if the state holds the token before
    has_gamma: Any
    varlen: Any
    row_weighted: Any  # whether weights multiply the rows' results
    row_term: Any  # whether the rows' terms are added to their scores
    column_weighted: Any  # whether weights multiply the columns' scores
    column_term: Any  # whether the columns' terms are added to their scores
    normed: Any  # 0, or what the norms are for: OF_ROWS or OF_COLUMNS
    normalize: Any  # 0, or how rows are divided: SIGNED or ABS
    sums: Any  # whether the row sums are a result
    scale: Any  # of scores
    kept_scale: Any  # factor of a token's contribution to a state
    state_scale: Any  # of what a state gives
    ends: Any  # cu_seqlens [B + 1] of varlen


class Inputs(NamedTuple):
    """The arrays that a pass reads, by role. weights and terms belong to the rows or to the columns."""

    q: Any  # [B, H, rows, D]
    k: Any  # [B, H, columns, D]
    v: Any  # [B, H, columns, Dv]
    weights: Any  # [B, H, tokens]: a factor of a row's result, or of a column's scores
    terms: Any  # [B, H, tokens]: added to the scores of a row, or of a column
    mask: Any  # [H, rows, columns]


class State(NamedTuple):
    """The states [B, H, D, Dv] of all sequences at both ends, or their norms [B, H, width]."""

    initial: Any
    final: Any
    begins: Any  # 1 if `initial` is given
    finishes: Any  # 1 if `final` is wanted


class ChunkStates(NamedTuple):
    """The state before each chunk, by slot (`slot_of`) and head."""

    states: Any  # [slots, H, D * Dv]
    norms: Any  # [slots, H, D]


@dataclass(frozen=True)
class Variant:
    """What a kernel is built for, in addition to its Config."""

    dtype: str
    aligned: bool = False  # rows are whole 16-byte vectors
    mask: str = ""  # its dtype; a dense mask replaces the decay
    normalized: bool = False  # row sums, weights, terms and norms are possible
    stepwise: bool = False  # each step has its own decay, log_decay, instead of one decay per head

    @property
    def masked(self) -> bool:
        return bool(self.mask)


@cache
def call_type(dtype: str) -> Any:
    """Return the type of `Call`."""
    numbers = [storage(dtype).number] * 3
    return types.NamedTuple((*[i32] * (len(Call._fields) - 4), *numbers, strided("int32", 1)), Call)


def inputs_type(dtype: str, mask: str = "") -> Any:
    """Return the type of `Inputs`."""
    arrays = [strided(dtype, 3)] * 3, [number_type(dtype, 3)] * 2
    return types.NamedTuple((*arrays[0], *arrays[1], strided(mask or dtype, 3)), Inputs)


def state_type(dtype: str, rank: int = 4) -> Any:
    """Return the type of `State`. rank: 3 for norms."""
    return types.NamedTuple((*[number_type(dtype, rank)] * 2, i64, i64), State)


def chunk_states_type(dtype: str) -> Any:
    """Return the type of `ChunkStates`."""
    return types.NamedUniTuple(number_type(dtype, 3), 2, ChunkStates)


def is_varlen(problem: Problem) -> bool:
    return "cu_seqlens" in problem.arrays


def unowned(problem: Problem, results: Mapping[str, ArrayMeta]) -> Sequence[Step]:
    """Return the steps that fill the results of varlen, in both directions, for tokens outside all sequences."""
    names = ("o", "dq", "dk", "dv", "dlog_decay")
    found = [filled(results, name) for name in names if name in results]
    if "row_sum" in results:
        found.append(filled(results, "row_sum", heads_first=True))
    return unowned_steps(problem, results, "cu_seqlens", found)


def slots_of(problem: Problem, chunk: int) -> tuple[int, int]:
    """Return the number of states in the workspace, one before each chunk: of a sequence, and of all sequences.

    Sequence b of varlen begins at slot cu_seqlens[b] // chunk + b. This leaves room for all of its states.
    """
    each = cdiv(problem.Sk, chunk)
    return each, problem.total // chunk + problem.B if is_varlen(problem) else problem.B * each


def workspace(problem: Problem, shape: tuple[int, ...]) -> ArrayMeta:
    """Return an array on q's device, of the dtype that is computed with."""
    return ArrayMeta(shape, compute_dtype(problem.dtype), contiguous_strides(shape), problem.arrays["q"].device, 0)


# --- verbs -----------------------------------------------------------------------------------------


@verb
def span(call, b):
    """Return the first token of sequence b, and its numbers of rows and columns."""
    first, rows, columns = 0, call.rows, call.columns
    if call.varlen != 0:
        first = i64(boundary(call.ends, b))
        rows = min(i64(boundary(call.ends, b + 1)) - first, rows)
        columns = rows
    return first, rows, columns


@verb
def origin(call, first, count):
    """Return the token of row or column 0."""
    return first if call.direction > 0 else first + count - 1


@verb
def slot_of(call, first, b, chunk):
    """Return the slot of the state before chunk number `chunk` of sequence b. first: the sequence's first token."""
    if call.varlen != 0:
        return i64(u32(first) // u32(call.state_chunk)) + b + chunk
    return b * call.slots + chunk
