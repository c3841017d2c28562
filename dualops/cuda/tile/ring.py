"""A ring of stages in shared memory: one thread fills them with bulk copies, warps read and release them.

    full[stage]    the stage's bytes have arrived        1 arrival, by the thread that starts the copy, and the bytes
    empty[stage]   all warps have read the stage         1 arrival per warp

Copy number `i` uses stage i % stages in round i // stages. Rounds end in order, so a wait needs only a round's parity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from ..compiler.backend import Members, Namespace, Noun, cuda, i32, kept_noun, members, u32, u64, verb
from ..ptx.async_copy import cp_async_bulk
from ..ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    mbarrier_wait_cta,
)
from ..ptx.warp import (
    bar_sync,
    bar_warp_sync,
    barrier_cluster_arrive,
    barrier_cluster_arrive_relaxed,
    barrier_cluster_wait,
    cluster_ctarank as cluster_ctarank,
)
from .pipeline import arrivals, arrives
from .rows import FULL_WARP
from .storage import storage

WARP = u32(32)  # threads; unsigned: no sign handling below


@dataclass(frozen=True)
class Stages:
    """The shared memory of a ring: each stage has `rows` rows of `columns` elements of every array."""

    dtype: str
    count: int
    arrays: int
    rows: int
    columns: int

    @cached_property
    def tile(self) -> int:
        """Return the elements of one array in a stage."""
        return self.rows * self.columns

    @cached_property
    def size(self) -> int:
        """Return the elements of a stage: the tiles of all arrays, one after the other."""
        return self.arrays * self.tile

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of all stages, which are at the beginning of dynamic shared memory."""
        return self.count * self.size * storage(self.dtype).itemsize


class RingSmem(NamedTuple):
    """A ring's shared arrays."""

    tiles: Any  # the stages, one after another
    full: Any  # their mbarriers
    empty: Any


class Filling(NamedTuple):
    """A stage that is being filled with `rows` rows of `width` columns of every array."""

    smem: RingSmem
    stage: int
    rows: int
    width: int


Ring = Noun  # what `ring` makes


@kept_noun
def ring(stages: Stages, warps: int) -> Members:
    """The verbs of a ring that `warps` warps read.

    `i` is the number of a copy, `array` the number of an array in a stage.
    """
    element, itemsize = storage(stages.dtype).element, storage(stages.dtype).itemsize
    COUNT = u32(stages.count)  # unsigned: no sign handling below

    @verb
    def smem():
        """Return the shared arrays; once in a kernel, by all threads."""
        tiles = cuda.shared.array(0, element, alignment=16)
        full = cuda.shared.array(stages.count, u64)
        empty = cuda.shared.array(stages.count, u64)
        return RingSmem(tiles, full, empty)

    @verb
    def init(smem):
        """Initialize the barriers; by one thread, before `start_cluster`."""
        for stage in range(stages.count):
            mbarrier_init(smem.full, stage, 1)
            mbarrier_init(smem.empty, stage, arrivals(warps))

    @verb
    def acquire(smem, i, rows, width):
        """Wait until a stage is free, then expect the bytes of `rows` rows of this width."""
        stage = i32(u32(i) % COUNT)
        mbarrier_wait_cta(smem.empty, stage, u32(i) // COUNT & 1 ^ 1)  # the previous round; a new barrier's has ended
        mbarrier_arrive_expect_tx(smem.full, stage, rows * width * (stages.arrays * itemsize))
        return Filling(smem, stage, rows, width)

    @verb
    def copy(filling, array, row, x, index):
        """Start to copy a row."""
        smem, stage = filling.smem, filling.stage
        at = stage * stages.size + array * stages.tile + row * stages.columns
        cp_async_bulk(smem.tiles, at, x, index, filling.width * itemsize, smem.full, stage)

    @verb
    def copy_rows(filling, array, x, index):
        """Start to copy all rows, which must be as far apart as in a stage."""
        smem, stage = filling.smem, filling.stage
        at = stage * stages.size + array * stages.tile
        cp_async_bulk(smem.tiles, at, x, index, filling.rows * (stages.columns * itemsize), smem.full, stage)

    @verb
    def wait(smem, i):
        """Wait until the stage's bytes have arrived. Return the stage."""
        stage = i32(u32(i) % COUNT)
        mbarrier_wait_cta(smem.full, stage, u32(i) // COUNT & 1)
        return stage

    @verb
    def begin(stage):
        """Return the index in smem.tiles at which the stage's first array begins."""
        return stage * stages.size

    @verb
    def release(smem, stage):
        """Release the stage, which my warp has read."""
        bar_warp_sync(FULL_WARP)
        if arrives():
            mbarrier_arrive(smem.empty, stage)

    return members(
        locals(),
        columns=stages.columns,  # most columns of a row in a stage
        tile=stages.tile,  # elements from one array of a stage to the next
    )


@verb
def init_fetch(bell):
    """Initialize an mbarrier for copies that are not repeated; by one thread, before `start_cluster`."""
    mbarrier_init(bell, 0, 1)


@verb
def start_fetch(bell, nbytes):
    """Expect `nbytes` bytes at this barrier; by one thread."""
    mbarrier_arrive_expect_tx(bell, 0, nbytes)


@verb
def fetch(smem, at, x, index, nbytes, bell):
    """Start one of these copies."""
    cp_async_bulk(smem, at, x, index, nbytes, bell, 0)


@verb
def wait_fetch(bell):
    """Wait until all bytes of these copies have arrived."""
    mbarrier_wait_cta(bell, 0, 0)


@verb
def start_cluster():
    """Make initialized mbarriers visible, and wait until every block of the cluster runs."""
    fence_mbarrier_init()
    barrier_cluster_arrive()
    barrier_cluster_wait()


@verb
def start_mbarriers():
    """Like `start_cluster`, but make only mbarriers visible, no other shared memory: loads in flight continue."""
    fence_mbarrier_init()
    barrier_cluster_arrive_relaxed()
    barrier_cluster_wait()


class PartsSmem(NamedTuple):
    """The parts of a few rows, so that no warp overwrites what a slower warp still reads, and an mbarrier for each
    row."""

    pairs: Any
    bells: Any


class Parts(Namespace):
    """Exchange pairs of numbers among the reading warps of a cluster, row after row, while copies continue.

    `row_round` is the number of the row. A block may have several rows at once, each with its own warps and barrier.
    """

    size: int  # pairs of a row, or of all rows of a block
    smem: Callable[..., PartsSmem]  # (): the shared arrays; once in a kernel, by all threads
    init: Callable[..., None]  # (smem): by one thread, before `start_cluster`
    send: Callable[..., None]  # (smem, row_round, a, b): my warp's pair, to every block
    wait: Callable[..., Any]  # (smem, row_round) -> the index in smem.pairs at which this row's parts begin


@cache
def parts(number: Any, send_pair: Callable[..., None], warps: int, cluster: int, rows: int = 1, kept: int = 2) -> Parts:
    """The verbs for `warps` warps per row in each of `cluster` blocks; in one block, for up to 14 rows at once.

    kept: the number of rows whose parts are in shared memory, a power of two: 2, or 4 if the next row's parts are sent
    before the wait for the current row's.
    """
    if cluster == 1:
        return _parts_in_block(number, warps, rows, kept)
    return _parts_in_cluster(number, send_pair, warps, cluster, kept)


def _parts_smem(number: Any, size: int, kept: int) -> Callable[[], PartsSmem]:
    @verb
    def smem():
        pairs = cuda.shared.array(kept * 2 * size, number, alignment=16)
        bells = cuda.shared.array(kept, u64)
        return PartsSmem(pairs, bells)

    return smem


def _parts_in_block(number: Any, warps: int, rows: int, kept: int) -> Parts:
    SIZE, THREADS, LAST = warps * rows, 32 * warps, kept - 1

    @verb
    def init(smem):
        pass

    @verb
    def send(smem, row_round, a, b):
        tid = cuda.threadIdx.x
        if tid % 32 == 0:
            smem.pairs[((row_round & LAST) * SIZE + tid // 32) * 2] = a
            smem.pairs[((row_round & LAST) * SIZE + tid // 32) * 2 + 1] = b

    @verb
    def wait(smem, row_round):
        row = cuda.threadIdx.x // THREADS if rows > 1 else 0
        bar_sync(1 + row, THREADS)  # without the copying warp, which continues
        return ((row_round & LAST) * SIZE + row * warps) * 2

    return Parts.from_locals(locals(), size=SIZE, smem=_parts_smem(number, SIZE, kept))


def _parts_in_cluster(number: Any, send_pair: Callable[..., None], warps: int, cluster: int, kept: int) -> Parts:
    SIZE, LAST, ROUND = warps * cluster, kept - 1, u32(kept)
    NBYTES = SIZE * number.bitwidth // 4  # of its pairs

    @verb
    def init(smem):
        for place in range(kept):
            mbarrier_init(smem.bells, place, 1)

    @verb
    def send(smem, row_round, a, b):
        place, tid = i32(row_round & LAST), u32(cuda.threadIdx.x)
        lane, warp = i32(tid % WARP), i32(tid // WARP)
        if tid == 0:
            mbarrier_arrive_expect_tx(smem.bells, place, NBYTES)
        if lane < cluster:
            at = i32((place * SIZE + cluster_ctarank() * warps + warp) * 2)
            send_pair(smem.pairs, at, lane, a, b, smem.bells, place)

    @verb
    def wait(smem, row_round):
        place = i32(row_round & LAST)
        mbarrier_wait(smem.bells, place, u32(row_round) // ROUND & 1)
        return i32(place * SIZE * 2)

    return Parts.from_locals(locals(), size=SIZE, smem=_parts_smem(number, SIZE, kept))
