"""Mutants of the cooperation of blocks and warps: the start of a cluster, and the exchange of a row's parts."""

from collections.abc import Callable
from typing import Any

from dualops.cuda.compiler.backend import cuda
from dualops.cuda.ptx.async_copy import st_async_v2_f64
from dualops.cuda.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_wait
from dualops.cuda.ptx.warp import bar_warp_sync, cluster_ctarank
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


def _mine() -> tuple[int, int, int]:
    """Return this thread's block in its cluster, its warp and its lane."""
    return cluster_ctarank(), cuda.threadIdx.x // 32, cuda.threadIdx.x % 32


@mutant("parts", WRONG)
def parts_not_double_buffered(right, sizes):
    if sizes.cluster == 1:
        return {
            "send": lambda smem, row_round, a, b: right.send(smem, 0, a, b),
            "wait": lambda smem, row_round: right.wait(smem, 0),
        }

    def send(smem, row_round, a, b):
        rank, warp, lane = _mine()
        half = row_round & 1
        if (warp == 0) & (lane == 0):
            mbarrier_arrive_expect_tx(smem.bells, half, sizes.parts * 16)
        if lane < sizes.cluster:
            st_async_v2_f64(smem.pairs, (rank * sizes.warps + warp) * 2, lane, a, b, smem.bells, half)

    def wait(smem, row_round):
        right.wait(smem, row_round)
        return 0

    return {"send": send, "wait": wait}


@mutant("parts", NAN, (2,))
def one_bell_for_both_halves(right, sizes):
    def send(smem, row_round, a, b):
        rank, warp, lane = _mine()
        if (warp == 0) & (lane == 0):
            mbarrier_arrive_expect_tx(smem.bells, 0, sizes.parts * 16)
        if lane < sizes.cluster:
            at = ((row_round & 1) * sizes.parts + rank * sizes.warps + warp) * 2
            st_async_v2_f64(smem.pairs, at, lane, a, b, smem.bells, 0)

    def wait(smem, row_round):
        mbarrier_wait(smem.bells, 0, row_round & 1)
        return (row_round & 1) * sizes.parts * 2

    return {"send": send, "wait": wait}


@mutant("parts", NAN)
def reads_the_other_half(right, sizes):
    def wait(smem, row_round):
        right.wait(smem, row_round)
        return (row_round + 1 & 1) * sizes.parts * 2

    return {"wait": wait}


def _wait_for_parts(parity: Callable[[int], int]) -> Callable[[Any, Sizes], dict[str, Any]]:
    def change(right: Parts, sizes: Sizes) -> dict[str, Any]:
        def wait(smem, row_round):
            mbarrier_wait(smem.bells, row_round & 1, parity(row_round))
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
    """Return a changed `send`. rank_of(lane, own rank): the block that a lane sends to. offset: whether its place
    depends on the rank. lanes: how many lanes too many send.
    """

    def change(right: Parts, sizes: Sizes) -> dict[str, Any]:
        def send(smem, row_round, a, b):
            rank, warp, lane = _mine()
            half = row_round & 1
            if (warp == 0) & (lane == 0):
                mbarrier_arrive_expect_tx(smem.bells, half, right.size * 16)
            if lane < sizes.cluster + lanes:
                at = (half * sizes.parts + (rank * sizes.warps if offset else 0) + warp) * 2
                st_async_v2_f64(smem.pairs, at, rank_of(lane, rank), a, b, smem.bells, half)

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
    def send(smem, row_round, a, b):
        right.send(smem, row_round, a, b)
        if cuda.threadIdx.x == 32:
            mbarrier_arrive_expect_tx(smem.bells, row_round & 1, sizes.parts * 16)

    return {"send": send}


@mutant("parts", r"copies are still in flight when", (2,))
def sends_parts_that_nobody_waits_for(right, sizes):
    def send(smem, row_round, a, b):
        right.send(smem, row_round, a, b)
        if row_round == ROWS - 1:
            right.send(smem, row_round + 1, a, b)

    return {"send": send}


@mutant("parts", rf"{NAN}|{STUCK}")
def one_warp_sends_no_parts(right, sizes):
    def send(smem, row_round, a, b):
        if cuda.threadIdx.x < 32:
            right.send(smem, row_round, a, b)

    return {"send": send}


@mutant("parts", r"Deadlock: .* at syncthreads", (1,))
def meeting_of_the_whole_block(right, sizes):
    def wait(smem, row_round):
        cuda.syncthreads()
        return (row_round & 1) * sizes.parts * 2

    return {"wait": wait}


@mutant("parts", NAN, (1,))
def meeting_of_each_warp_alone(right, sizes):
    def wait(smem, row_round):
        bar_warp_sync(FULL_WARP)
        return (row_round & 1) * sizes.parts * 2

    return {"wait": wait}
