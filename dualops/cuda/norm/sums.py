"""dw and db: sums over all rows, in the same order every time, without atomics.

    1  every group of threads adds up its rows in registers, PIECE of them one by one
    2  the groups of a block add their sums, in order, to the block's row of `partials`        (partial_sums)
    3  a second kernel sums the rows of partials                                               (norm_sums)

partials [requested ones of dw and db; slots; N] are float32 (float64 for float64), with a slot for each possible block.
If fewer blocks run, they fill the remaining slots with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ...spec.meta import compute_dtype
from ..compiler.backend import Kernel, Members, builds, cuda, i32, i64, kept_noun, kernel, pointer, verb
from ..tile.numbers import numbers
from ..tile.rows import FULL_WARP
from ..tile.storage import access, storage
from .arguments import Variant

PIECE = 256  # rows added one by one: the error of a float32 sum of 256 is 2 eps, of 4096 it is 13 eps
LANES = 32


class Table(NamedTuple):
    """The blocks' sums, `partials`, and the shared array in which the groups of a block add up their sums."""

    partials: Any
    slots: int
    N: int
    smem: Any


@verb
def meet_block():
    """A barrier of the block."""
    cuda.syncthreads()


@kept_noun
def partial_sums(
    variant: Variant, row_threads: int, vectors: int, rows: int, aligned: bool, meet: Callable[[], None] = meet_block
) -> Members:
    """The verbs that add up the sums of a block's `rows` groups.

    A group has `row_threads` threads, each with `vectors` accesses per row.

    A frag is a thread's part of the block's columns. meet: a barrier of all groups' threads.
    """
    mem, dtype = storage(compute_dtype(variant.dtype)), variant.dtype
    num, vec = numbers(mem.number), access(compute_dtype(dtype), aligned)
    VECTOR, PART = access(dtype, aligned).vector, num.vector
    HALVINGS = max(32 // row_threads, 1).bit_length() - 1  # groups of a warp are added by shuffles
    TURN_THREADS = max(row_threads, 32)
    TURNS, STEP = rows * row_threads // TURN_THREADS, row_threads * VECTOR
    ELEMENTS, THREADS, ALONE = VECTOR * vectors, rows * row_threads, row_threads >= 32
    SHARED = row_threads * ELEMENTS if TURNS > 1 else PART

    @verb
    def table(partials, slots, N):
        """Return the table of partial sums; once in a kernel, by all threads."""
        return Table(partials, slots, N, cuda.shared.array(SHARED, mem.number, alignment=16))

    @verb
    def _write_one(table, row, columns, frag, more):
        tid = cuda.threadIdx.x
        turn, lane = tid // TURN_THREADS, tid % row_threads
        first_group = ALONE or tid % TURN_THREADS < row_threads  # of a warp, whose groups all have the same sums by now
        there = cuda.local.array(PART, mem.number)
        for step in range(HALVINGS):
            for i in range(ELEMENTS):
                frag[i] += num.shuffle(frag[i], row_threads << step, FULL_WARP)
        for other in range(TURNS):
            if (turn == other) & first_group:
                for i in range(0, ELEMENTS, PART):
                    if other > 0:
                        mem.load_shared(there, 0, table.smem, i * row_threads + lane * PART)
                        for c in range(PART):
                            frag[i + c] += there[c]
                    if other < TURNS - 1:
                        num.store_vector(table.smem, i * row_threads + lane * PART, frag, i)
            if TURNS > 1:
                meet()
        mine = (turn == TURNS - 1) & first_group
        first = row * table.N + columns.begin + lane * VECTOR
        left = i32(columns.width - lane * VECTOR)
        for j in range(vectors):
            keep = mine & (left > j * STEP)
            for c in range(0, VECTOR, vec.vector):
                vec.load(there, 0, table.partials, first + (j * STEP + c), keep & more, num.zero)
                for k in range(vec.vector):
                    frag[j * VECTOR + c + k] += there[k]
                vec.store(table.partials, first + (j * STEP + c), keep, frag, j * VECTOR + c)

    @verb
    def write(table, slot, columns, dw_frag, db_frag, more):
        """Write the sums to a slot; by all threads. more: add them to the slot's numbers."""
        if variant.dw:
            _write_one(table, slot, columns, dw_frag, more)
        if variant.db:
            _write_one(table, (variant.weight_gradients - 1) * table.slots + slot, columns, db_frag, more)

    @verb
    def clear(table, slot, count, columns):
        """Write zeros to every count-th slot after mine."""
        for other in range(count + slot, table.slots, count):
            for each in range(variant.weight_gradients):
                for n in range(cuda.threadIdx.x, columns.width, THREADS):
                    table.partials[(each * table.slots + other) * table.N + columns.begin + n] = num.zero

    return locals()


@dataclass(frozen=True)
class SumsConfig:
    """A block has LANES columns at once, and `slices` threads for each column."""

    slices: int
    batch: int = 8  # loads in flight per thread

    @cached_property
    def threads(self) -> int:
        return LANES * self.slices


@builds
def build_sums(config: SumsConfig, dtype: str, dw_dtype: str | None, db_dtype: str | None) -> Kernel:
    """Build norm_sums(dw, db, partials, slots, N). dtype: of partials; dw_dtype, db_dtype: None if not requested."""
    mem, dw_mem, db_mem = storage(dtype), storage(dw_dtype or dtype), storage(db_dtype or dtype)
    num = numbers(mem.number)
    WANTED = (dw_dtype is not None) + (db_dtype is not None)

    @kernel(pointer(dw_mem.element), pointer(db_mem.element), pointer(mem.element), i64, i32, threads=config.threads)
    def norm_sums(dw, db, partials, slots, N):
        parts = cuda.shared.array(config.threads, mem.number)
        tid = cuda.threadIdx.x
        lane = tid % LANES
        tiles = (N + LANES - 1) // LANES
        for tile in range(cuda.blockIdx.x, WANTED * tiles, cuda.gridDim.x):
            which, n = tile // tiles, tile % tiles * LANES + lane
            column = i64(which) * slots * N + n
            total, rest = num.zero, num.zero
            for first in range(tid // LANES, slots, config.slices * config.batch):
                batch = num.zero
                for i in range(config.batch):
                    slot = first + i * config.slices
                    if (slot < slots) & (n < N):
                        batch += partials[column + slot * N]
                total, rest = num.add_compensated(total, rest, batch)
            cuda.syncthreads()
            parts[tid] = total
            cuda.syncthreads()
            if (tid < LANES) & (n < N):
                for part in range(lane + LANES, config.threads, LANES):
                    total += parts[part]
                if dw_dtype is not None and which == 0:
                    dw_mem.store(dw, i64(n), total)
                elif db_dtype is not None:
                    db_mem.store(db, i64(n), total)

    return norm_sums
