"""Mutants of what blocks and warps do together: how a cluster starts, how parts meet, how much is whose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dualops.cuda.backend import cuda
from dualops.cuda.ptx.async_copy import st_async_v2_f64
from dualops.cuda.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_wait
from dualops.cuda.ptx.warp import bar_warp_sync
from dualops.cuda.softmax.ring import RingConfig
from dualops.cuda.tile.ring import Parts
from dualops.cuda.tile.rows import FULL_WARP

from .protocol import NAN, ROWS, STUCK, TOO_MANY, WRONG, Sizes, add, mutant

# --- the start --------------------------------------------------------------------------------------


@mutant("start_cluster", r"before barrier\.cluster\.wait", (2,))
def start_of_the_block_alone(right, sizes):
    def start():
        fence_mbarrier_init()
        cuda.syncthreads()

    return start


# --- parts -------------------------------------------------------------------------------------------


@mutant("parts", WRONG)
def parts_not_double_buffered(right, sizes):
    if sizes.cluster == 1:
        return {
            "send": lambda pairs, bells, row_round, *rest: right.send(pairs, bells, 0, *rest),
            "wait": lambda bells, row_round: right.wait(bells, 0),
        }

    def send(pairs, bells, row_round, rank, warp, lane, a, b):
        half = row_round & 1
        if (warp == 0) & (lane == 0):
            mbarrier_arrive_expect_tx(bells, half, sizes.parts * 16)
        if lane < sizes.cluster:
            st_async_v2_f64(pairs, (rank * sizes.warps + warp) * 2, lane, a, b, bells, half)

    def wait(bells, row_round):
        right.wait(bells, row_round)
        return 0

    return {"send": send, "wait": wait}


@mutant("parts", NAN, (2,))
def one_bell_for_both_halves(right, sizes):
    def send(pairs, bells, row_round, rank, warp, lane, a, b):
        if (warp == 0) & (lane == 0):
            mbarrier_arrive_expect_tx(bells, 0, sizes.parts * 16)
        if lane < sizes.cluster:
            at = ((row_round & 1) * sizes.parts + rank * sizes.warps + warp) * 2
            st_async_v2_f64(pairs, at, lane, a, b, bells, 0)

    def wait(bells, row_round):
        mbarrier_wait(bells, 0, row_round & 1)
        return (row_round & 1) * sizes.parts * 2

    return {"send": send, "wait": wait}


@mutant("parts", NAN)
def reads_the_other_half(right, sizes):
    def wait(bells, row_round):
        right.wait(bells, row_round)
        return (row_round + 1 & 1) * sizes.parts * 2

    return {"wait": wait}


def _wait_for_parts(parity: Callable[[int], int]) -> Callable[[Any, Sizes], dict[str, Any]]:
    def change(right: Parts, sizes: Sizes) -> dict[str, Any]:
        def wait(bells, row_round):
            mbarrier_wait(bells, row_round & 1, parity(row_round))
            return (row_round & 1) * sizes.parts * 2

        return {"wait": wait}

    return change


for _name, _parity in {
    "parts_parity_of_one_bell": lambda row_round: row_round & 1,
    "parts_parity_never_changes": lambda row_round: 0,
}.items():
    add(_name, "parts", _wait_for_parts(_parity), TOO_MANY, (2,))


def _send(
    rank_of: Callable[[int, int], int] = lambda lane, own: lane, offset: bool = True, lanes: int = 0
) -> Callable[[Any, Sizes], dict[str, Any]]:
    """lanes: so many more than there should be. rank_of(lane, my rank): where a lane sends. offset: by rank."""

    def change(right: Parts, sizes: Sizes) -> dict[str, Any]:
        def send(pairs, bells, row_round, rank, warp, lane, a, b):
            half = row_round & 1
            if (warp == 0) & (lane == 0):
                mbarrier_arrive_expect_tx(bells, half, right.size * 16)
            if lane < sizes.cluster + lanes:
                at = (half * sizes.parts + (rank * sizes.warps if offset else 0) + warp) * 2
                st_async_v2_f64(pairs, at, rank_of(lane, rank), a, b, bells, half)

        return {"send": send}

    return change


for _name, (_change, _reason) in {
    "parts_to_my_own_block": (_send(rank_of=lambda lane, own: own), NAN),
    "parts_without_my_rank": (_send(offset=False), NAN),
    "parts_to_one_block_too_few": (_send(lanes=-1), STUCK),
}.items():
    add(_name, "parts", _change, _reason, (2,))


@mutant("parts", TOO_MANY, (2,))
def every_warp_expects_parts(right, sizes):
    def send(pairs, bells, row_round, rank, warp, lane, a, b):
        right.send(pairs, bells, row_round, rank, warp, lane, a, b)
        if (warp == 1) & (lane == 0):
            mbarrier_arrive_expect_tx(bells, row_round & 1, sizes.parts * 16)

    return {"send": send}


@mutant("parts", r"copies are still under way when", (2,))
def sends_parts_that_nobody_waits_for(right, sizes):
    def send(pairs, bells, row_round, *rest):
        right.send(pairs, bells, row_round, *rest)
        if row_round == ROWS - 1:
            right.send(pairs, bells, row_round + 1, *rest)

    return {"send": send}


@mutant("parts", rf"{NAN}|{STUCK}")
def one_warp_sends_no_parts(right, sizes):
    def send(pairs, bells, row_round, rank, warp, lane, a, b):
        if warp == 0:
            right.send(pairs, bells, row_round, rank, warp, lane, a, b)

    return {"send": send}


@mutant("parts", r"Deadlock: .* at syncthreads", (1,))
def meeting_of_the_whole_block(right, sizes):
    def wait(bells, row_round):
        cuda.syncthreads()
        return (row_round & 1) * sizes.parts * 2

    return {"wait": wait}


@mutant("parts", NAN, (1,))
def meeting_of_each_warp_alone(right, sizes):
    def wait(bells, row_round):
        bar_warp_sync(FULL_WARP)
        return (row_round & 1) * sizes.parts * 2

    return {"wait": wait}


# --- the Config --------------------------------------------------------------------------------------


@mutant("config", r"elements were never written, the first at")
def a_chunk_too_few(right, sizes):
    return replace(right, chunks=right.chunks - 1)


class _Uneven(RingConfig):
    def share(self, dtype: str) -> int:
        return (self.chunks + 1) * self.chunk(dtype)


@mutant("config", STUCK, directions=("forward",))
def reads_a_chunk_less_than_is_copied(right, sizes):
    return _Uneven(right.warps, right.vectors, right.stages, right.cluster, right.chunks - 1)
