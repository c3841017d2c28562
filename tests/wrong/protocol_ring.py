"""Mutants of the ring of stages: who copies, who reads, how it begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dualops.cuda.backend import cuda
from dualops.cuda.ptx.async_copy import cp_async_bulk
from dualops.cuda.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from dualops.cuda.ptx.warp import bar_warp_sync
from dualops.cuda.simulator import current
from dualops.cuda.tile.ring import Filling, Ring, RingSmem
from dualops.cuda.tile.rows import FULL_WARP

from .protocol import NAN, NOT_THERE, ROWS, STUCK, TOO_MANY, VALUE, WRONG, Sizes, add, mutant

# --- the ring: who copies ----------------------------------------------------------------------------


def _expect(right: Ring, sizes: Sizes, smem: RingSmem, i: int, rows: int, width: int) -> Filling:
    """acquire without its wait."""
    arrays = smem.tiles.size // (sizes.stages * right.tile)
    mbarrier_arrive_expect_tx(smem.full, i % sizes.stages, arrays * rows * width * smem.tiles.itemsize)
    return Filling(smem, i % sizes.stages, rows, width)


@mutant("ring", TOO_MANY)
def no_wait_for_empty(right, sizes):
    return {"acquire": partial(_expect, right, sizes)}


def _acquire(right: Ring, sizes: Sizes, parity: Callable[[int], int]) -> dict[str, Any]:
    def acquire(smem, i, rows, width):
        mbarrier_wait(smem.empty, i % sizes.stages, parity(i // sizes.stages))
        return _expect(right, sizes, smem, i, rows, width)

    return {"acquire": acquire}


@mutant("ring", STUCK)
def empty_parity_inverted(right, sizes):
    return _acquire(right, sizes, lambda ring_round: ring_round & 1)


@mutant("ring", TOO_MANY)
def empty_parity_never_changes(right, sizes):
    return _acquire(right, sizes, lambda ring_round: 1)


@mutant("ring", TOO_MANY)
def waits_one_copy_too_early_for_empty(right, sizes):
    def acquire(smem, i, rows, width):
        before = max(i - 1, 0)
        mbarrier_wait(smem.empty, before % sizes.stages, before // sizes.stages & 1 ^ 1)
        return _expect(right, sizes, smem, i, rows, width)

    return {"acquire": acquire}


def _expecting(more: int) -> Callable[[Any, Sizes], dict[str, Any]]:
    """16 bytes more of each array, or fewer."""

    def change(right: Ring, sizes: Sizes) -> dict[str, Any]:
        def acquire(smem, i, rows, width):
            return right.acquire(smem, i, rows, width + more // smem.tiles.itemsize)._replace(width=width)

        return {"acquire": acquire}

    return change


add("expects_too_few_bytes", "ring", _expecting(-16), STUCK)
add("expects_too_many_bytes", "ring", _expecting(16), STUCK)


@mutant("ring", rf"{STUCK}|copies are still under way")
def expects_nothing(right, sizes):
    def acquire(smem, i, rows, width):
        stage = i % sizes.stages
        mbarrier_wait(smem.empty, stage, i // sizes.stages & 1 ^ 1)
        mbarrier_arrive(smem.full, stage)
        return Filling(smem, stage, rows, width)

    return {"acquire": acquire}


@mutant("ring", STUCK)
def does_not_expect(right, sizes):
    def acquire(smem, i, rows, width):
        mbarrier_wait(smem.empty, i % sizes.stages, i // sizes.stages & 1 ^ 1)
        return Filling(smem, i % sizes.stages, rows, width)

    return {"acquire": acquire}


def _copy(right: Ring, sizes: Sizes, behind: int = 0, bell: int = 0) -> dict[str, Any]:
    """behind: tiles between where it should go and where it goes; bell: stages between the mbarriers."""

    def copy(filling, array, row, x, index):
        smem, stage = filling.smem, filling.stage
        at = right.begin(stage) + (array + behind) * right.tile + row * right.columns
        nbytes = filling.width * smem.tiles.itemsize
        cp_async_bulk(smem.tiles, at % smem.tiles.size, x, index, nbytes, smem.full, (stage + bell) % sizes.stages)

    return {"copy": copy}


@mutant("ring", NAN)
def copies_into_the_tile_behind(right, sizes):
    return _copy(right, sizes, behind=1)


@mutant("ring", NAN)
def copies_ring_its_neighbour(right, sizes):
    return _copy(right, sizes, bell=1)


@mutant("ring", VALUE)
def copies_the_same_row_again(right, sizes):
    def copy(filling, array, row, x, index):
        right.copy(filling, array, row, x, index % (x.size // ROWS))

    return {"copy": copy}


@mutant("ring", r"[xy]\[\d+\] copied as 128 elements, of \d+")
def copies_a_vector_too_far(right, sizes):
    def copy(filling, array, row, x, index):
        right.copy(filling, array, row, x, index + 2)

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


# --- the ring: who reads -----------------------------------------------------------------------------


@mutant("ring", rf"{NAN}|{TOO_MANY}|{STUCK}")
def no_wait_for_full(right, sizes):
    return {"wait": lambda smem, i: i % sizes.stages}


def _wait(sizes: Sizes, parity: Callable[[int], int]) -> dict[str, Any]:
    def wait(smem, i):
        mbarrier_wait(smem.full, i % sizes.stages, parity(i // sizes.stages))
        return i % sizes.stages

    return {"wait": wait}


@mutant("ring", rf"{TOO_MANY}|{STUCK}")
def full_parity_inverted(right, sizes):
    return _wait(sizes, lambda ring_round: ring_round & 1 ^ 1)


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
def never_released(right, sizes):
    return {"release": lambda smem, stage: None}


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


@mutant("ring", NAN)
def released_before_the_warp_has_read(right, sizes):
    def release(smem, stage):
        if cuda.threadIdx.x % 32 == 0:
            mbarrier_arrive(smem.empty, stage)

    return {"release": release}


@mutant("ring", rf"{NAN}|{STUCK}")
def released_before_it_is_read(right, sizes):
    """At the wait: in backward at the first of two."""
    released = set()

    def wait(smem, i):
        stage = right.wait(smem, i)
        if (current(), i) not in released:
            released.add((current(), i))
            right.release(smem, stage)
        return stage

    return {"wait": wait, "release": lambda smem, stage: None}


# --- the ring: its beginning -------------------------------------------------------------------------


def _init(full_count: int, empty_count: int) -> Callable[[Any, Sizes], dict[str, Any]]:
    def change(right: Ring, sizes: Sizes) -> dict[str, Any]:
        def init(smem):
            for stage in range(sizes.stages):
                mbarrier_init(smem.full, stage, 1 + full_count)
                mbarrier_init(smem.empty, stage, sizes.warps + empty_count)

        return {"init": init}

    return change


for _name, (_counts, _reason) in {
    "empty_counts_a_warp_too_few": ((0, -1), TOO_MANY),
    "empty_counts_a_warp_too_many": ((0, 1), STUCK),
    "full_counts_one_too_many": ((1, 0), STUCK),
}.items():
    add(_name, "ring", _init(*_counts), _reason)


@mutant("ring", NOT_THERE)
def mbarriers_not_initialised(right, sizes):
    return {"init": lambda smem: None}


@mutant("ring", NOT_THERE)
def last_stage_not_initialised(right, sizes):
    def init(smem):
        for stage in range(sizes.stages - 1):
            mbarrier_init(smem.full, stage, 1)
            mbarrier_init(smem.empty, stage, sizes.warps)

    return {"init": init}
