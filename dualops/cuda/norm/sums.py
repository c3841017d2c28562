"""dw and db: sums over all rows, in the same order every time, without atomics.

    1  every group of threads that takes rows adds them up in registers, PIECE of them one by one
    2  the groups of a block add theirs, one after another, to the block's row of `partials`   (PartialSums)
    3  a second kernel sums the rows of partials                                               (norm_sums)

partials [dw and db, those that are wanted; slots; N] are float32 (float64 for float64), a slot for each block that
there may be. Where fewer ran, they fill those left over with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ...spec.meta import compute_dtype
from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer, verb
from ..tile import access, numbers, storage
from ..tile.rows import FULL_WARP

PIECE = 256  # rows added one by one: a float32 sum of 256 is off by 2 eps, one of 4096 by 13
LANES = 32


class PartialSums(NamedTuple):
    """How a block brings its groups' sums together."""

    size: int  # of the shared array of numbers that is handed in
    # (partials, row, N, begin, width, frag, shared, tid, more): by all threads; more: add to what is there
    write: Callable[..., None]
    clear: Callable[..., None]  # (partials, slot, slots, N, begin, width, tid): zeros in a slot, for dw and db


@cache
def partial_sums(
    dtype: str, row_threads: int, vectors: int, rows: int, aligned: bool, sums: int, meet: Callable[[], None]
) -> PartialSums:
    """The verbs for `rows` groups of `row_threads` threads, each with `vectors` accesses a row.

    frag is a thread's part of the columns begin to begin + width; sums: how many there are, of dw and db; meet: a
    barrier of all groups' threads.
    """
    number, vector, computed = storage(dtype).number, access(dtype, aligned).vector, compute_dtype(dtype)
    own, load, store = access(computed, aligned)
    load_shared, store_shared, part = (
        storage(computed).load_shared,
        numbers(number).store_vector,
        numbers(number).vector,
    )
    shuffle = numbers(number).shuffle
    ROW_THREADS, VECTOR, VECTORS, OWN, PART = row_threads, vector, vectors, own, part
    HALVINGS = max(32 // row_threads, 1).bit_length() - 1  # groups of a warp meet by shuffles
    TURN_THREADS = max(row_threads, 32)
    TURNS, STEP = rows * row_threads // TURN_THREADS, row_threads * vector
    ELEMENTS, SUMS, THREADS, ZERO, ALONE = vector * vectors, sums, rows * row_threads, number(0), row_threads >= 32

    @verb
    def write(partials, row, N, begin, width, frag, shared, tid, more):
        turn, lane = tid // TURN_THREADS, tid % ROW_THREADS
        first_group = ALONE or tid % TURN_THREADS < ROW_THREADS  # of a warp: all of them have the same sums by then
        there = cuda.local.array(PART, number)
        for step in range(HALVINGS):
            for i in range(ELEMENTS):
                frag[i] += shuffle(frag[i], ROW_THREADS << step, FULL_WARP)
        for other in range(TURNS):
            if (turn == other) & first_group:
                for i in range(0, ELEMENTS, PART):
                    if other > 0:
                        load_shared(there, 0, shared, i * ROW_THREADS + lane * PART)
                        for c in range(PART):
                            frag[i + c] += there[c]
                    if other < TURNS - 1:
                        store_shared(shared, i * ROW_THREADS + lane * PART, frag, i)
            if TURNS > 1:
                meet()
        mine = (turn == TURNS - 1) & first_group
        first, left = row * N + begin + lane * VECTOR, i32(width - lane * VECTOR)
        for j in range(VECTORS):
            keep = mine & (left > j * STEP)
            for c in range(0, VECTOR, OWN):
                load(there, 0, partials, first + (j * STEP + c), keep & more, ZERO)
                for k in range(OWN):
                    frag[j * VECTOR + c + k] += there[k]
                store(partials, first + (j * STEP + c), keep, frag, j * VECTOR + c)

    @verb
    def clear(partials, slot, slots, N, begin, width, tid):
        for each in range(SUMS):
            for n in range(tid, width, THREADS):
                partials[(each * slots + slot) * N + begin + n] = ZERO

    return PartialSums(row_threads * ELEMENTS if TURNS > 1 else part, write, clear)


@dataclass(frozen=True)
class SumsConfig:
    """How partial sums are dealt to threads: a block has LANES columns at once, and `slices` threads for each."""

    slices: int
    batch: int = 8  # loads that a thread has under way

    @property
    def threads(self) -> int:
        return LANES * self.slices


@builds
def build_sums(config: SumsConfig, dtype: str, dw_dtype: str | None, db_dtype: str | None) -> Kernel:
    """norm_sums(dw, db, partials, slots, N): dtype is that of partials; dw_dtype, db_dtype: None where not wanted."""
    number = storage(dtype).number
    add = numbers(number).add_compensated
    store_dw, store_db = storage(dw_dtype or dtype).store, storage(db_dtype or dtype).store
    elements = [pointer(storage(each or dtype).element) for each in (dw_dtype, db_dtype)]
    DW, DB, SLICES, BATCH = dw_dtype is not None, db_dtype is not None, config.slices, config.batch
    SUMS, THREADS = DW + DB, config.threads
    ZERO = number(0)

    @kernel(*elements, pointer(number), i64, i32, threads=THREADS)
    def norm_sums(dw, db, partials, slots, N):
        parts = cuda.shared.array(THREADS, number)
        tid = cuda.threadIdx.x
        lane = tid % LANES
        tiles = (N + LANES - 1) // LANES
        for tile in range(cuda.blockIdx.x, SUMS * tiles, cuda.gridDim.x):
            which, n = tile // tiles, tile % tiles * LANES + lane
            column = i64(which) * slots * N + n
            total, rest = ZERO, ZERO
            for first in range(tid // LANES, slots, SLICES * BATCH):
                batch = ZERO
                for i in range(BATCH):
                    slot = first + i * SLICES
                    if (slot < slots) & (n < N):
                        batch += partials[column + slot * N]
                total, rest = add(total, rest, batch)
            cuda.syncthreads()
            parts[tid] = total
            cuda.syncthreads()
            if (tid < LANES) & (n < N):
                for part in range(lane + LANES, THREADS, LANES):
                    total += parts[part]
                if DW and which == 0:
                    store_dw(dw, i64(n), total)
                elif DB:
                    store_db(db, i64(n), total)

    return norm_sums
