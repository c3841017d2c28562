"""What test_instructions.py runs for asynchronous copies, mbarriers and the barriers of a warp and of a block.

The twins are late on purpose: nothing has landed before a wait says so, whatever order the threads run in.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import cuda, f32, f64, u64
from dualops.cuda.ptx import mbarrier, warp
from dualops.cuda.ptx.async_copy import cp_async_bulk, st_async_v2_f32, st_async_v2_f64
from dualops.cuda.ptx.memory import ld_shared_cluster_v4_f32
from dualops.cuda.simulator import Deadlock, Pointer

TESTS: dict[str, Callable[[], None]] = {}


def tests_of(tests: dict[str, Callable[[], None]]) -> Callable[..., Callable[[Callable[[], None]], Callable[[], None]]]:
    """What makes the decorator of(*names): this function tests the instructions with these names, with the threads in
    either order.
    """

    def of(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def add(function: Callable[[], None]) -> Callable[[], None]:
            def either_order() -> None:
                for name in ("forward", "reversed"):
                    with simulator.order(name):
                        function()

            tests.update(dict.fromkeys(names, either_order))
            return function

        return add

    return of


of = tests_of(TESTS)


def run(function: Any, *arrays: np.ndarray, threads: int = 32, blocks: int = 1, cluster: int = 1) -> None:
    pointers = [Pointer(array, f"a{i}") for i, array in enumerate(arrays)]
    simulator.launch(function, (blocks,), (threads,), pointers, cluster=cluster)


def numbered(count: int, dtype: Any = np.float32) -> np.ndarray:
    """1, 2, 3 ... from a multiple of 16 bytes on."""
    memory = np.zeros(count + 16, dtype)
    start = -memory.ctypes.data % 16 // memory.itemsize
    memory[start : start + count] = np.arange(1, count + 1)
    return memory[start : start + count]


@of("mbarrier_init", "fence_mbarrier_init", "mbarrier_arrive", "mbarrier_wait", "mbarrier_wait_cta")
def _arrivals() -> None:
    def phases(seen):
        tid, bars = cuda.threadIdx.x, cuda.shared.array(2, u64)
        board = cuda.shared.array(1, f32)
        if tid == 0:
            mbarrier.mbarrier_init(bars, 1, 31)
            mbarrier.fence_mbarrier_init()
            board[0] = 0
        cuda.syncthreads()
        mbarrier.mbarrier_wait(bars, 1, 1)  # the phase before the first counts as over
        for phase in range(4):
            if tid:
                board[0] += 1
                mbarrier.mbarrier_arrive(bars, 1)
            wait = mbarrier.mbarrier_wait_cta if tid % 2 else mbarrier.mbarrier_wait
            wait(bars, 1, phase & 1)
            seen[32 * phase + tid] = board[0]
            cuda.syncthreads()

    seen = np.zeros(128)
    run(phases, seen)
    assert seen.reshape(4, 32).tolist() == [[31.0 * (phase + 1)] * 32 for phase in range(4)]

    def one_too_few(y):
        bars = cuda.shared.array(1, u64)
        if cuda.threadIdx.x == 0:
            mbarrier.mbarrier_init(bars, 0, 33)
        cuda.syncthreads()
        mbarrier.mbarrier_arrive(bars, 0)
        mbarrier.mbarrier_wait(bars, 0, 0)

    with pytest.raises(Deadlock, match=r"32 threads wait forever: .* at mbarrier 0, phase 0: threads 0\.\.31"):
        run(one_too_few, np.zeros(1))

    def one_too_many(y):
        bars = cuda.shared.array(1, u64)
        if cuda.threadIdx.x == 0:
            mbarrier.mbarrier_init(bars, 0, 2)
            mbarrier.mbarrier_arrive_expect_tx(bars, 0, 64)  # which do not come: the phase stays open
        cuda.syncthreads()
        mbarrier.mbarrier_arrive(bars, 0)

    with pytest.raises(RuntimeError, match="mbarrier 0: more than 2 arrivals in phase 0"):
        run(one_too_many, np.zeros(1))


@of("cp_async_bulk", "mbarrier_arrive_expect_tx")
def _bulk_copy() -> None:
    def copies(y, early, x):
        tid, bars = cuda.threadIdx.x, cuda.shared.array(1, u64)
        stage = cuda.shared.array(48, f32, alignment=128)
        stage[tid] = -1
        if tid == 0:
            mbarrier.mbarrier_init(bars, 0, 1)
            mbarrier.fence_mbarrier_init()
        cuda.syncthreads()
        if tid == 0:
            mbarrier.mbarrier_arrive_expect_tx(bars, 0, 128)
            cp_async_bulk(stage, 0, x, 8, 64, bars, 0)
            cp_async_bulk(stage, 16, x, 32, 64, bars, 0)
        cuda.syncthreads()
        early[tid] = stage[tid]
        mbarrier.mbarrier_wait(bars, 0, 0)
        y[tid] = stage[tid]

    x, y, early = numbered(48), np.zeros(32), np.zeros(32)
    run(copies, y, early, x)
    assert y.tolist() == [*x[8:24].tolist(), *x[32:48].tolist()]
    assert np.isnan(early).all()

    def announced(nbytes):
        def copy(y, x):
            bars, stage = cuda.shared.array(1, u64), cuda.shared.array(16, f32, alignment=16)
            mbarrier.mbarrier_init(bars, 0, 1)
            mbarrier.fence_mbarrier_init()
            mbarrier.mbarrier_arrive_expect_tx(bars, 0, nbytes)
            cp_async_bulk(stage, 0, x, 0, 64, bars, 0)
            mbarrier.mbarrier_wait(bars, 0, 0)
            y[0] = stage[15]

        return copy

    y = np.zeros(1)
    run(announced(64), y, x, threads=1)
    assert y[0] == 16
    for wrong in (48, 80):
        with pytest.raises(Deadlock, match="mbarrier 0, phase 0"):
            run(announced(wrong), y, x, threads=1)

    def refused(to_index, index, nbytes):
        def copy(x):
            bars, stage = cuda.shared.array(1, u64), cuda.shared.array(16, f32, alignment=16)
            mbarrier.mbarrier_init(bars, 0, 1)
            mbarrier.fence_mbarrier_init()
            cp_async_bulk(stage, to_index, x, index, nbytes, bars, 0)

        return copy

    for to_index, index, nbytes, message in (
        (0, 1, 16, "not in multiples of 16"),
        (2, 0, 16, "not in multiples of 16"),
        (0, 0, 20, "not in multiples of 16"),
        (0, 40, 64, r"a0\[40\] copied as 16 elements, of 48"),
        (8, 0, 64, r"shared memory\[8\] copied as 16 elements, of 16"),
    ):
        with pytest.raises(IndexError, match=message):
            run(refused(to_index, index, nbytes), x, threads=1)


@of("st_async_v2_f32", "st_async_v2_f64")
def _remote_store() -> None:
    for number, store, width in ((f32, st_async_v2_f32, 8), (f64, st_async_v2_f64, 16)):

        def sends(y, early, number=number, store=store, width=width):
            tid, rank = cuda.threadIdx.x, warp.cluster_ctarank()
            bars, box = cuda.shared.array(1, u64), cuda.shared.array(4, number, alignment=16)
            if tid == 0:
                mbarrier.mbarrier_init(bars, 0, 1)
                mbarrier.fence_mbarrier_init()
                mbarrier.mbarrier_arrive_expect_tx(bars, 0, 2 * width)
            warp.barrier_cluster_arrive()
            warp.barrier_cluster_wait()
            if tid < 2:  # a pair to either block, at my rank's place
                store(box, 2 * rank, tid, number(10 * rank + tid), number(100 + 10 * rank + tid), bars, 0)
            if tid == 5:
                early[rank] = box[2 * (1 - rank)]
            mbarrier.mbarrier_wait(bars, 0, 0)
            if tid < 4:
                y[4 * rank + tid] = box[tid]

        y, early = np.zeros(8), np.zeros(2)
        run(sends, y, early, blocks=2, cluster=2)
        assert y.tolist() == [0, 100, 10, 110, 1, 101, 11, 111]
        assert np.isnan(early).all()


@of("ld_shared_cluster_v4_f32")
def _remote_load() -> None:
    def loads(y):
        tid, rank = cuda.threadIdx.x, warp.cluster_ctarank()
        mine = cuda.shared.array(8, f32, alignment=16)
        if tid < 8:
            mine[tid] = f32(10 * rank + tid)
        warp.barrier_cluster_arrive()
        warp.barrier_cluster_wait()
        if tid < 2:  # fours of the neighbouring block
            four = ld_shared_cluster_v4_f32(mine, 4 * tid, 1 - rank)
            for e in range(4):
                y[8 * rank + 4 * tid + e] = four[e]
        warp.barrier_cluster_arrive()
        warp.barrier_cluster_wait()

    y = np.zeros(16)
    run(loads, y, blocks=2, cluster=2)
    assert y.tolist() == [*range(10, 18), *range(8)]

    def too_early(y):
        ld_shared_cluster_v4_f32(cuda.shared.array(4, f32, alignment=16), 0, 1 - warp.cluster_ctarank())

    def too_late(y):
        mine = cuda.shared.array(4, f32, alignment=16)
        warp.barrier_cluster_arrive()
        warp.barrier_cluster_wait()
        if warp.cluster_ctarank() == 0:
            simulator.current().scheduler.pause()  # the other block ends
            ld_shared_cluster_v4_f32(mine, 0, 1)

    with pytest.raises(RuntimeError, match=r"before barrier\.cluster\.wait"):
        run(too_early, y, blocks=2, cluster=2)
    with pytest.raises(RuntimeError, match="block 1 of the cluster has ended"):
        run(too_late, y, blocks=2, cluster=2)


@of("bar_warp_sync")
def _warp_barrier() -> None:
    def swaps(y):
        tid, shared = cuda.threadIdx.x, cuda.shared.array(64, f32)
        for step in range(3):
            shared[tid] = tid + step
            warp.bar_warp_sync(0xFFFFFFFF)
            y[tid] = shared[tid ^ 31]
            warp.bar_warp_sync(0xFFFFFFFF)

    y = np.zeros(64)
    run(swaps, y, threads=64)
    assert y.tolist() == [(t ^ 31) + 2 for t in range(64)]

    def absent(y):
        if cuda.threadIdx.x != 3:
            warp.bar_warp_sync(0xFFFFFFFF)

    with pytest.raises(Deadlock, match=r"31 threads wait forever: .* at bar\.warp\.sync with lanes 0xffffffff"):
        run(absent, np.zeros(1))


@of("bar_arrive")
def _arrival_at_a_barrier() -> None:
    def hands_over(y, passed):
        tid, shared = cuda.threadIdx.x, cuda.shared.array(32, f32)
        if tid < 32:
            warp.bar_sync(3, 64)
            y[tid] = shared[31 - tid]
            warp.bar_arrive(4, 64)
        else:
            shared[tid - 32] = tid
            warp.bar_arrive(3, 64)
            passed[tid - 32] = 1
            warp.bar_sync(4, 64)
            shared[tid - 32] = -1

    y, passed = np.zeros(32), np.zeros(32)
    run(hands_over, y, passed, threads=64)
    assert y.tolist() == [63 - tid for tid in range(32)] and passed.all()

    def never_comes(y):
        if cuda.threadIdx.x < 32:
            warp.bar_sync(3, 64)

    with pytest.raises(Deadlock, match=r"32 threads wait forever: .* at bar\.sync 3"):
        run(never_comes, y, threads=64)

    def nobody_waits(y):
        warp.bar_arrive(3, 64)

    with pytest.raises(RuntimeError, match=r"bar\.sync 3: all 64 threads have arrived, and none of them waited"):
        run(nobody_waits, y, threads=64)


@of("mbarrier_arrive_cluster")
def _remote_arrival() -> None:
    def hands_over(y, in_time=True):
        tid, rank = cuda.threadIdx.x, warp.cluster_ctarank()
        bars = cuda.shared.array(2, u64)
        if tid == 0:
            mbarrier.mbarrier_init(bars, 1, 33)  # a warp of the other block, and one thread of this
            mbarrier.fence_mbarrier_init()
        if in_time:
            warp.barrier_cluster_arrive()
            warp.barrier_cluster_wait()
        came.append(rank)
        mbarrier.mbarrier_arrive_cluster(bars, 1, 1 - rank)
        if tid == 5:
            mbarrier.mbarrier_arrive_cluster(bars, 1, rank)
        mbarrier.mbarrier_wait(bars, 1, 0)
        y[32 * rank + tid] = came.count(1 - rank)

    came: list[int] = []
    y = np.zeros(64)
    run(hands_over, y, blocks=2, cluster=2)
    assert (y == 32).all()
    with pytest.raises(RuntimeError, match=r"mbarrier\.arrive in block . before barrier\.cluster\.wait"):
        run(lambda y: hands_over(y, False), y, blocks=2, cluster=2)


@of("bar_sync", "barrier_sync")
def _block_barrier() -> None:
    def meets(y, passed):
        tid, shared = cuda.threadIdx.x, cuda.shared.array(64, f32)
        if tid >= 64:  # a warp that is not counted goes on, before the others and while they wait
            passed[tid - 64] = 1
        else:
            for step in range(3):
                shared[tid] = tid + step
                if tid // 32 != step % 2:  # one warp is late, each in its turn
                    warp.bar_sync(2, 32)
                warp.bar_sync(1, 64)
                y[64 * step + tid] = shared[tid ^ 63]  # the other warp wrote it
                if tid < 32:
                    warp.barrier_sync(1, 64)
                else:
                    warp.barrier_sync(1, 64)

    y, passed = np.zeros(192), np.zeros(32)
    run(meets, y, passed, threads=96)
    assert y.tolist() == [(t ^ 63) + step for step in range(3) for t in range(64)]
    assert passed.all()

    came: list[tuple[str, int]] = []

    def waits(y):
        tid = cuda.threadIdx.x
        if tid < 64:
            came.append(("came", tid))
            warp.bar_sync(15, 64)
            came.append(("left", tid))

    run(waits, np.zeros(1), threads=96)
    assert [what for what, _ in came] == ["came"] * 64 + ["left"] * 64

    def apart(y):  # numbers are barriers of their own, and so are blocks
        tid = cuda.threadIdx.x
        warp.bar_sync(1 + tid // 32, 32)
        y[64 * cuda.blockIdx.x + tid] = 1

    y = np.zeros(128)
    run(apart, y, threads=64, blocks=2, cluster=2)
    assert y.all()

    def of_two_sizes(y):
        warp.bar_sync(1, 64 if cuda.threadIdx.x < 32 else 96)

    with pytest.raises(RuntimeError, match=r"bar\.sync 1: for (64 threads here, for 96|96 threads here, for 64) else"):
        run(of_two_sizes, np.zeros(1), threads=96)

    def absent(y):
        if cuda.threadIdx.x < 64:
            warp.bar_sync(1, 96)

    with pytest.raises(Deadlock, match=r"64 threads wait forever: .* at bar\.sync 1: threads 0\.\.63"):
        run(absent, np.zeros(1), threads=96)


@of("griddepcontrol_launch_dependents", "griddepcontrol_wait")
def _grids_that_overlap():
    """The last block knows that the grid before has ended; else nobody does."""

    def kernel(last):
        warp.griddepcontrol_launch_dependents()
        if cuda.blockIdx.x == last:
            warp.griddepcontrol_wait()

    simulator.launch(kernel, (3,), (32,), (2,), overlaps=True)
    simulator.launch(kernel, (3,), (32,), (3,))
    with pytest.raises(RuntimeError, match="overlaps the previous one has ended without waiting"):
        simulator.launch(kernel, (3,), (32,), (3,), overlaps=True)
