"""The arguments that every kernel of retention has, and the verbs that read them.

All kernels do one thing, retention of a pass (see `passes`): rows look at columns that stand before them,

    out_r = sum_c scale * (q_r . k_c) * gamma^(r + offset - c) * v_c  +  state_scale * gamma^(r + later) * q_r @ state

with q of a row, k and v of a column. With log_decay a power of gamma is what is left between two places (`decays`). A
pass of the gradient walks from the last token to the first: its row 0 is the last one, and `direction` is -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import e, log2
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import compute_dtype, contiguous_strides
from ..compiler.backend import Members, Noun, i32, i64, members, noun, types, u32, verb
from ..launch.arrays import cdiv
from ..launch.step import Step
from ..launch.views import boundary, number_type, strided
from ..tile.numbers import numbers
from ..tile.storage import storage
from ..unowned import filled, unowned_steps

LONGEST_CHUNK = 256  # tokens whose contribution to a state is summed at once
NO_CHUNK = 2**30  # as a chunk's number or length: beyond all tokens
SIGNED, ABS = 1, 2  # by what a row is divided: max(1, |sum|) or max(1, sum of magnitudes)
OF_ROWS, OF_COLUMNS = 1, 2  # a norm [D] meets q and is of a row's sum, a norm [Dv] is one more row of the state


class Call(NamedTuple):
    """The sizes and options of a pass. Sizes of varlen are those of the longest sequence."""

    B: Any
    H: Any
    rows: Any
    columns: Any
    D: Any
    Dv: Any
    offset: Any  # column at which row 0 stands
    direction: Any  # 1: row 0 is the first token, -1: the last
    chunk: Any  # rows that see one another; what stands before them they see through a state
    first_chunk: Any  # the first one that has a state before it: 0, 1, or NO_CHUNK
    state_chunk: Any  # tokens from one state in the workspace to the next
    slots: Any  # states of a sequence there
    later: Any  # tokens from the state before a chunk to its first row: 1 for a state that holds the token before
    has_gamma: Any
    varlen: Any
    row_weighted: Any  # whether a row's result is multiplied by its weight, and its scores are more by its term
    row_term: Any
    column_weighted: Any  # the same for a column's scores
    column_term: Any
    normed: Any  # 0, or what the norms beside the states are for: OF_ROWS or OF_COLUMNS
    normalize: Any  # 0, SIGNED or ABS: rows are summed and divided
    sums: Any  # whether the rows' sums are wanted
    scale: Any  # of scores
    kept_scale: Any  # of what is added to a state
    state_scale: Any  # of what a state gives
    ends: Any  # cu_seqlens [B + 1] of varlen


class Inputs(NamedTuple):
    """The arrays that a pass reads, by the role that they play. weights and terms are those of rows or of columns."""

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
    """What kernels are built for, beside their Config."""

    dtype: str
    aligned: bool = False  # rows are whole 16-byte vectors
    mask: str = ""  # its dtype; a dense mask is in place of the decay
    normalized: bool = False  # there may be sums of rows, weights, terms and norms
    stepwise: bool = False  # a decay of each step, log_decay, is in place of that of the head

    @property
    def masked(self) -> bool:
        return bool(self.mask)

    @property
    def options(self) -> dict[str, bool]:
        """Of what builds, by keyword, a kernel whose only variants are these; nothing where it has gamma."""
        return {"stepwise": True} if self.stepwise else {}


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
    """What results of varlen, of either direction, have for tokens that belong to no sequence."""
    names = ("o", "dq", "dk", "dv", "dlog_decay")
    found = [filled(results, name) for name in names if name in results]
    if "row_sum" in results:
        found.append(filled(results, "row_sum", heads_first=True))
    return unowned_steps(problem, results, "cu_seqlens", found)


def slots_of(problem: Problem, chunk: int) -> tuple[int, int]:
    """States of a sequence, and of all sequences, in the workspace: one before each chunk.

    Sequence b of varlen begins at slot cu_seqlens[b] // chunk + b, which leaves room for all of its own.
    """
    each = cdiv(problem.Sk, chunk)
    return each, problem.total // chunk + problem.B if is_varlen(problem) else problem.B * each


def workspace(problem: Problem, shape: tuple[int, ...]) -> ArrayMeta:
    """An array of what is computed with, on q's device."""
    return ArrayMeta(shape, compute_dtype(problem.dtype), contiguous_strides(shape), problem.arrays["q"].device, 0)


# --- verbs -----------------------------------------------------------------------------------------


@verb
def span(call, b):
    """First token of sequence b, its rows and its columns."""
    first, rows, columns = 0, call.rows, call.columns
    if call.varlen != 0:
        first = i64(boundary(call.ends, b))
        rows = min(i64(boundary(call.ends, b + 1)) - first, rows)
        columns = rows
    return first, rows, columns


@verb
def origin(call, first, count):
    """The token that row or column 0 is."""
    return first if call.direction > 0 else first + count - 1


@verb
def slot_of(call, first, b, chunk):
    """Where the state before chunk number `chunk` of sequence b lies; `first`: its first token."""
    if call.varlen != 0:
        return i64(u32(first) // u32(call.state_chunk)) + b + chunk
    return b * call.slots + chunk


Decay = Noun  # what `decay` makes


@cache
@noun
def decay(dtype: str) -> Members:
    """Verbs on the decay of a head.

    The verbs for the arithmetic of problems of this dtype.
    """
    number = storage(dtype).number
    num = numbers(number)
    HALF, TWO, SQRT_HALF = (number(x) for x in (0.5, 2, 0.5**0.5))
    # log2(1 + x) = 2 * log2(e) * atanh(x / (2 + x)), |x| < 0.42: the next term is less than any rounding
    C0, C1, C2, C3, C4, C5 = (number(2 * log2(e) / (2 * k + 1)) for k in range(6))

    @verb
    def less_than_one(h):
        """Return gamma - 1 where none is given: -2^(-5 - h)."""
        less = -num.one
        for _ in range(5 + h):
            less *= HALF
        return less

    @verb
    def value(gamma, call, h):
        """Return gamma. A step is multiplied by it: by a rounded logarithm's power, its error would add up."""
        return gamma.data[h * gamma.strides[0]] if call.has_gamma != 0 else num.one + less_than_one(h)

    @verb
    def _log2_double(gamma, call, h):
        return num.log2(value(gamma, call, h))

    @verb
    def _log2_single(gamma, call, h):
        exponent = num.zero  # gamma = 2^exponent * (1 + less)
        if call.has_gamma != 0:
            mantissa = gamma.data[h * gamma.strides[0]]
            while (mantissa > num.zero) & (mantissa < SQRT_HALF):
                mantissa, exponent = mantissa * TWO, exponent - num.one
            less = mantissa - num.one
        else:
            less = less_than_one(h)
        s = less / (TWO + less)
        s2 = s * s
        return exponent + s * (C0 + s2 * (C1 + s2 * (C2 + s2 * (C3 + s2 * (C4 + s2 * C5)))))

    @verb
    def power(log2_gamma, n):
        """Return gamma^n."""
        return num.exp2(log2_gamma * number(n))

    return members(
        locals(),
        # (gamma, call, h) -> its logarithm, without loss where gamma is nearly 1
        log2=_log2_double if dtype == "float64" else _log2_single,
    )
