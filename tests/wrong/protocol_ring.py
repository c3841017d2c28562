"""Mutants of the ring of stages: of the copying threads, of the reading threads, and of its initialisation."""

from collections.abc import Callable
from typing import Any

from dualops.cuda.compiler.backend import cuda
from dualops.cuda.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from dualops.cuda.ptx.warp import bar_warp_sync
from dualops.cuda.simulator import current
from dualops.cuda.tile.ring import Filling, Ring, RingSmem
from dualops.cuda.tile.rows import FULL_WARP

from .protocol import NAN, NOT_THERE, ROWS, STUCK, TOO_MANY, VALUE, WRONG, Sizes, mutant

# --- the ring: copying ---------------------------------------------------------------------------------


def _expect(right: Ring, sizes: Sizes, smem: RingSmem, i: int, rows: int, width: int) -> Filling:
    """Do what acquire does, without its wait."""
    arrays = smem.tiles.size // (sizes.stages * right.tile)
    mbarrier_arrive_expect_tx(smem.full, i % sizes.stages, arrays * rows * width * smem.tiles.itemsize)
    return Filling(smem, i % sizes.stages, rows, width)


@mutant("ring", TOO_MANY)
def empty_parity_never_changes(right, sizes):
    def acquire(smem, i, rows, width):
        mbarrier_wait(smem.empty, i % sizes.stages, 1)
        return _expect(right, sizes, smem, i, rows, width)

    return {"acquire": acquire}


@mutant("ring", TOO_MANY)
def waits_one_copy_too_early_for_empty(right, sizes):
    def acquire(smem, i, rows, width):
        before = max(i - 1, 0)
        mbarrier_wait(smem.empty, before % sizes.stages, before // sizes.stages & 1 ^ 1)
        return _expect(right, sizes, smem, i, rows, width)

    return {"acquire": acquire}


@mutant("ring", rf"{STUCK}|copies are still in flight")
def expects_nothing(right, sizes):
    def acquire(smem, i, rows, width):
        stage = i % sizes.stages
        mbarrier_wait(smem.empty, stage, i // sizes.stages & 1 ^ 1)
        mbarrier_arrive(smem.full, stage)
        return Filling(smem, stage, rows, width)

    return {"acquire": acquire}


@mutant("ring", VALUE)
def copies_the_same_row_again(right, sizes):
    def copy(filling, array, row, x, index):
        right.copy(filling, array, row, x, index % (x.size // ROWS))

    return {"copy": copy}


@mutant("ring", STUCK)
def copies_half(right, sizes):
    def copy(filling, *operands):
        right.copy(filling._replace(width=filling.width // 2), *operands)

    return {"copy": copy}


@mutant("ring", STUCK)
def copies_one_stage_only(right, sizes):
    def copy(filling, *operands):
        if filling.stage == 0:
            right.copy(filling, *operands)

    return {"copy": copy}


# --- the ring: reading ---------------------------------------------------------------------------------


def _wait(sizes: Sizes, parity: Callable[[int], int]) -> dict[str, Any]:
    def wait(smem, i):
        mbarrier_wait(smem.full, i % sizes.stages, parity(i // sizes.stages))
        return i % sizes.stages

    return {"wait": wait}


@mutant("ring", rf"{TOO_MANY}|{STUCK}")
def full_parity_never_changes(right, sizes):
    return _wait(sizes, lambda ring_round: 0)


@mutant("ring", rf"{TOO_MANY}|{STUCK}")
def waits_for_the_copy_before(right, sizes):
    def wait(smem, i):
        if i:
            right.wait(smem, i - 1)
        return i % sizes.stages

    return {"wait": wait}


@mutant("ring", NAN)
def one_lane_waits_for_full(right, sizes):
    def wait(smem, i):
        if cuda.threadIdx.x % 32 == 0:
            right.wait(smem, i)
        return i % sizes.stages

    return {"wait": wait}


@mutant("ring", WRONG)
def reads_the_stage_before(right, sizes):
    return {"wait": lambda smem, i: (right.wait(smem, i) + sizes.stages - 1) % sizes.stages}


@mutant("ring", STUCK)
def released_by_one_warp(right, sizes):
    def release(smem, stage):
        if cuda.threadIdx.x < 32:
            right.release(smem, stage)

    return {"release": release}


@mutant("ring", TOO_MANY)
def released_by_every_lane(right, sizes):
    def release(smem, stage):
        bar_warp_sync(FULL_WARP)
        mbarrier_arrive(smem.empty, stage)

    return {"release": release}


@mutant("ring", TOO_MANY)
def released_twice(right, sizes):
    def release(smem, stage):
        right.release(smem, stage)
        right.release(smem, stage)

    return {"release": release}


@mutant("ring", rf"{NAN}|{STUCK}")
def released_before_it_is_read(right, sizes):
    """Release a stage at the wait; in backward, at the first of two waits."""
    released = set()

    def wait(smem, i):
        stage = right.wait(smem, i)
        if (current(), i) not in released:
            released.add((current(), i))
            right.release(smem, stage)
        return stage

    return {"wait": wait, "release": lambda smem, stage: None}


# --- the ring: initialisation --------------------------------------------------------------------------


@mutant("ring", NOT_THERE)
def last_stage_not_initialised(right, sizes):
    def init(smem):
        for stage in range(sizes.stages - 1):
            mbarrier_init(smem.full, stage, 1)
            mbarrier_init(smem.empty, stage, sizes.warps)

    return {"init": init}
