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

from ...spec.meta import compute_dtype
from ..backend import Kernel, Namespace, builds, cuda, i32, i64, kernel, pointer, verb
from ..tile.numbers import numbers
from ..tile.rows import FULL_WARP
from ..tile.storage import access, storage

PIECE = 256  # rows added one by one: a float32 sum of 256 is off by 2 eps, one of 4096 by 13
LANES = 32


class PartialSums(Namespace):
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
    num_mem, partials_vec = storage(compute_dtype(dtype)), access(compute_dtype(dtype), aligned)
    num = numbers(num_mem.number)
    ROW_THREADS, VECTOR, VECTORS, PART = row_threads, access(dtype, aligned).vector, vectors, num.vector
    HALVINGS = max(32 // row_threads, 1).bit_length() - 1  # groups of a warp meet by shuffles
    TURN_THREADS = max(row_threads, 32)
    TURNS, STEP = rows * row_threads // TURN_THREADS, row_threads * VECTOR
    ELEMENTS, SUMS, THREADS, ALONE = VECTOR * vectors, sums, rows * row_threads, row_threads >= 32

    @verb
    def write(partials, row, N, begin, width, frag, shared, tid, more):
        turn, lane = tid // TURN_THREADS, tid % ROW_THREADS
        first_group = ALONE or tid % TURN_THREADS < ROW_THREADS  # of a warp: all of them have the same sums by then
        there = cuda.local.array(PART, num_mem.number)
        for step in range(HALVINGS):
            for i in range(ELEMENTS):
                frag[i] += num.shuffle(frag[i], ROW_THREADS << step, FULL_WARP)
        for other in range(TURNS):
            if (turn == other) & first_group:
                for i in range(0, ELEMENTS, PART):
                    if other > 0:
                        num_mem.load_shared(there, 0, shared, i * ROW_THREADS + lane * PART)
                        for c in range(PART):
                            frag[i + c] += there[c]
                    if other < TURNS - 1:
                        num.store_vector(shared, i * ROW_THREADS + lane * PART, frag, i)
            if TURNS > 1:
                meet()
        mine = (turn == TURNS - 1) & first_group
        first, left = row * N + begin + lane * VECTOR, i32(width - lane * VECTOR)
        for j in range(VECTORS):
            keep = mine & (left > j * STEP)
            for c in range(0, VECTOR, partials_vec.vector):
                partials_vec.load(there, 0, partials, first + (j * STEP + c), keep & more, num.zero)
                for k in range(partials_vec.vector):
                    frag[j * VECTOR + c + k] += there[k]
                partials_vec.store(partials, first + (j * STEP + c), keep, frag, j * VECTOR + c)

    @verb
    def clear(partials, slot, slots, N, begin, width, tid):
        for each in range(SUMS):
            for n in range(tid, width, THREADS):
                partials[(each * slots + slot) * N + begin + n] = num.zero

    return PartialSums(size=row_threads * ELEMENTS if TURNS > 1 else PART, write=write, clear=clear)


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
    mem, dw_mem, db_mem = storage(dtype), storage(dw_dtype or dtype), storage(db_dtype or dtype)
    num = numbers(mem.number)
    DW, DB, SLICES, BATCH = dw_dtype is not None, db_dtype is not None, config.slices, config.batch
    SUMS, THREADS = DW + DB, config.threads

    @kernel(pointer(dw_mem.element), pointer(db_mem.element), pointer(mem.element), i64, i32, threads=THREADS)
    def norm_sums(dw, db, partials, slots, N):
        parts = cuda.shared.array(THREADS, mem.number)
        tid = cuda.threadIdx.x
        lane = tid % LANES
        tiles = (N + LANES - 1) // LANES
        for tile in range(cuda.blockIdx.x, SUMS * tiles, cuda.gridDim.x):
            which, n = tile // tiles, tile % tiles * LANES + lane
            column = i64(which) * slots * N + n
            total, rest = num.zero, num.zero
            for first in range(tid // LANES, slots, SLICES * BATCH):
                batch = num.zero
                for i in range(BATCH):
                    slot = first + i * SLICES
                    if (slot < slots) & (n < N):
                        batch += partials[column + slot * N]
                total, rest = num.add_compensated(total, rest, batch)
            cuda.syncthreads()
            parts[tid] = total
            cuda.syncthreads()
            if (tid < LANES) & (n < N):
                for part in range(lane + LANES, THREADS, LANES):
                    total += parts[part]
                if DW and which == 0:
                    dw_mem.store(dw, i64(n), total)
                elif DB:
                    db_mem.store(db, i64(n), total)

    return norm_sums
