"""The simulator's runner: who waits for whom, what is out of bounds, in which order threads run."""

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import builds, cuda, f32, f64, i32, kernel, pointer, u64
from dualops.cuda.launch.step import flat
from dualops.cuda.ptx import mbarrier
from dualops.cuda.ptx.async_copy import cp_async_bulk
from dualops.cuda.ptx.memory import ld_global_v4_b32
from dualops.cuda.ptx.warp import bar_sync, barrier_cluster_arrive, barrier_cluster_wait, shfl_bfly_f32
from dualops.cuda.simulator import Deadlock, Pointer

FULL = 0xFFFFFFFF


def run(function, *arrays, threads=32, blocks=1, **options):
    simulator.launch(function, (blocks,), (threads,), [flat(a, f"a{i}") for i, a in enumerate(arrays)], **options)


# --- threads that wait -------------------------------------------------------------------------------


def test_a_cluster_barrier_that_one_block_leaves_out(order):
    def leaves(y):
        if cuda.blockIdx.x != 1:
            barrier_cluster_arrive()
            barrier_cluster_wait()

    with pytest.raises(Deadlock, match=r"block \(0, 0, 0\) at barrier.cluster: threads 0\.\.31"):
        run(leaves, np.zeros(1), blocks=2, cluster=2)


def test_two_masks_that_overlap():
    def torn(y):
        shfl_bfly_f32(1.0, 1, FULL if cuda.threadIdx.x == 0 else FULL - 1)

    with pytest.raises(RuntimeError, match="lane 1 brings mask 0xfffffffe, others wait with 0xffffffff"):
        run(torn, np.zeros(1))


def test_lanes_at_different_instructions():
    def other(name):
        return simulator.exchange(name, 0, FULL)

    def torn(y):
        other("shfl" if cuda.threadIdx.x else "vote")

    with pytest.raises(RuntimeError, match="lane 1 is at shfl, other lanes of its warp wait at vote"):
        run(torn, np.zeros(1))


def test_a_barrier_holds_all_threads_back(order):
    """Each thread reads what its opposite wrote before the barrier, over and over."""

    def swap(y):
        tid, shared = cuda.threadIdx.x, cuda.shared.array(64, f32)
        for step in range(5):
            shared[tid] = tid + step
            cuda.syncthreads()
            y[tid] = shared[63 - tid]
            cuda.syncthreads()

    y = np.zeros(64)
    run(swap, y, threads=64)
    assert y.tolist() == [63 - t + 4 for t in range(64)]


# --- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, 8, 1 << 40])
def test_outside_an_argument(index):
    def reads(y, x):
        if cuda.threadIdx.x == 5:
            y[0] = x[index]

    def writes(y, x):
        if cuda.threadIdx.x == 5:
            x[index] = 1

    for function, what in ((reads, "read"), (writes, "written")):
        with pytest.raises(IndexError, match=rf"a1\[{index}\] {what}, of 8 elements, by thread 5 of block "):
            run(function, np.zeros(1), np.zeros(8))


def test_outside_a_shared_and_a_local_array():
    def shared(y):
        cuda.shared.array(4, f32)[4] = 0

    def local(y):
        y[0] = cuda.local.array(4, f32)[4]

    def before_local(y):
        y[0] = cuda.local.array(4, f32)[-1]

    def into_local(y):
        cuda.local.array(4, f32)[-1 if cuda.threadIdx.x else 4] = 0

    for function, message in (
        (shared, r"shared memory\[4\] written"),
        (local, r"local array\[4\] read"),
        (before_local, r"local array\[-1\] read"),
        (into_local, r"local array\[4\] written, of 4 elements, by thread 0 of"),
    ):
        with pytest.raises(IndexError, match=message):
            run(function, np.zeros(1))
    with simulator.order("reversed"), pytest.raises(IndexError, match=r"local array\[-1\] written"):
        run(into_local, np.zeros(1))


def test_local_arrays_keep_numbers_of_their_type():
    def keeps(y):
        kept, whole = cuda.local.array(2, f32), cuda.local.array(1, i32)
        kept[0], kept[np.int64(1)], whole[0] = 1 / 3, np.float64(0.1), 7.9
        y[0], y[1], y[2] = kept[0], kept[1], whole[0]
        assert [type(x) for x in (kept[0], kept[1], whole[0])] == [np.float32, np.float32, np.int32]

    y = np.zeros(3)
    run(keeps, y, threads=1)
    assert y.tolist() == [np.float32(1 / 3), np.float32(0.1), 7]


def test_vectors_must_be_aligned_and_inside():
    memory = np.zeros(64, np.uint8)
    x = memory[-memory.ctypes.data % 16 :][:32].view(np.float32)

    def loads(y, x, index):
        y[0] = ld_global_v4_b32(x, index, 1, 0)[0]

    for index, message in ((1, r"x\[1\] is not aligned to 16 bytes"), (8, r"x\[8\] accessed as 4 elements, of 8")):
        with pytest.raises(IndexError, match=message):
            simulator.launch(loads, (1,), (1,), [Pointer(np.zeros(1), "y"), Pointer(x, "x"), index])


@pytest.mark.parametrize("number", [f32, f64])
def test_local_and_shared_memory_begin_as_nan(number):
    def peeks(y):
        y[0] = cuda.local.array(3, number)[2]
        y[1] = cuda.shared.array(3, number)[2]
        y[2] = cuda.shared.array(0, number, alignment=16)[2]  # dynamic

    y = np.zeros(3)
    run(peeks, y, threads=1, shared_bytes=64)
    assert np.isnan(y).all()


def test_shared_memory_is_the_blocks_own_and_local_memory_the_threads():
    def adds(y):
        tid = cuda.threadIdx.x
        shared, local = cuda.shared.array(1, f32), cuda.local.array(1, f32)
        local[0] = tid
        if tid == 0:
            shared[0] = 100 * cuda.blockIdx.x
        cuda.syncthreads()
        y[32 * cuda.blockIdx.x + tid] = shared[0] + local[0]

    y = np.zeros(96)
    run(adds, y, blocks=3)
    assert y.tolist() == [100 * b + t for b in range(3) for t in range(32)]


def test_a_verb_that_asks_for_shared_memory_makes_an_array_wherever_it_is_called():
    """As compiled, where it is inlined into each of its callers."""

    def mine():
        return cuda.shared.array(1, f32)

    def two(y):
        a, b = mine(), mine()
        for _ in range(2):
            c = mine()
            c[0] = 0 if c[0] != c[0] else c[0] + 1
            y[2] = c[0]
        a[0], b[0] = 1, 2
        y[0], y[1] = a[0], b[0]

    y = np.zeros(3)
    run(two, y, threads=1)
    assert y.tolist() == [1, 2, 1]


def test_dynamic_shared_arrays_begin_at_one_place():
    def aliases(y):
        cuda.shared.array(0, f32, alignment=16)[0] = 1.0
        y[0] = cuda.shared.array(0, i32, alignment=16)[0]

    y = np.zeros(1)
    run(aliases, y, threads=1, shared_bytes=16)
    assert y[0] == 0x3F800000


# --- order, grids ------------------------------------------------------------------------------------


def test_orders_of_threads_and_blocks():
    seen = []

    def notes(y):
        seen.append((cuda.blockIdx.x, cuda.threadIdx.x))
        cuda.syncthreads()
        seen.append((cuda.blockIdx.x, cuda.threadIdx.x))

    def collected(name, seed=0):
        seen.clear()
        with simulator.order(name, seed):
            run(notes, np.zeros(1), threads=3, blocks=2)
        return [*seen]

    forward = collected("forward")
    assert forward[:3] == [(0, 0), (0, 1), (0, 2)]
    assert sorted(collected("reversed")) == sorted(forward)
    assert collected("reversed")[:3] == [(1, 2), (1, 1), (1, 0)]
    assert collected("forward") == forward
    shuffled = [collected("shuffled", seed) for seed in range(9)]
    assert all(sorted(each) == sorted(forward) for each in shuffled) and len({*map(tuple, shuffled)}) > 3
    assert collected("shuffled", 1) == shuffled[1]
    message = "order is 'random', expected one of forward, reversed, shuffled, scattered, lagging, straggling, awaited"
    with pytest.raises(ValueError, match=message), simulator.order("random"):
        pass


def test_scattered_lanes_stay_behind_after_a_wait():
    """A lane says of all others that they have written, and asks none."""

    def hasty(y):
        written, bars, tid = cuda.shared.array(32, f32), cuda.shared.array(2, u64), cuda.threadIdx.x
        if tid == 0:
            for n in range(2):
                mbarrier.mbarrier_init(bars, n, 1)
            mbarrier.fence_mbarrier_init()
            mbarrier.mbarrier_arrive(bars, 0)
        cuda.syncthreads()
        mbarrier.mbarrier_wait_cta(bars, int(tid >= 32), 0)
        if tid >= 32:
            y[tid - 32] = written[tid - 32]
        else:
            written[tid] = tid
            if tid == 31:
                mbarrier.mbarrier_arrive(bars, 1)

    def found(order, seed=0):
        y = np.zeros(32, np.float32)
        with simulator.order(order, seed):
            run(hasty, y, threads=64)
        return y

    assert np.array_equal(found("forward"), np.arange(32))
    assert any(np.isnan(found("scattered", seed)).any() for seed in range(3))


def test_a_warpgroup_lags_until_copies_have_landed():
    """Both write and wait for a copy; who has it takes for granted that the other has written."""

    def hasty(y):
        written, bars, tid = cuda.shared.array(256, f32), cuda.shared.array(1, u64), cuda.threadIdx.x
        stage = cuda.shared.array(4, f32, alignment=16)
        if tid == 0:
            mbarrier.mbarrier_init(bars, 0, 1)
            mbarrier.fence_mbarrier_init()
            mbarrier.mbarrier_arrive_expect_tx(bars, 0, 16)
            cp_async_bulk(stage, 0, y, 256, 16, bars, 0)
        cuda.syncthreads()
        written[tid] = tid
        mbarrier.mbarrier_wait_cta(bars, 0, 0)
        y[tid] = written[tid ^ 128]

    def found(order, seed=0):
        y = np.zeros(260, np.float32)
        with simulator.order(order, seed):
            run(hasty, y, threads=256)
        return y[:256]

    assert np.array_equal(found("forward"), np.arange(256) ^ 128)
    for laggard in range(2):  # whose last thread goes on behind the barrier, as it lets the others through
        assert np.isnan(found("lagging", laggard)[np.arange(256) // 128 != laggard]).sum() >= 127


def test_a_copy_lands_only_when_a_thread_waits_for_it():
    """One thread starts three copies and waits for one of them: only that one has landed, whichever it is."""

    def hasty(y):
        bars, stages = cuda.shared.array(3, u64), cuda.shared.array(12, f32, alignment=16)
        for n in range(3):
            mbarrier.mbarrier_init(bars, n, 1)
        mbarrier.fence_mbarrier_init()
        for n in range(3):
            mbarrier.mbarrier_arrive_expect_tx(bars, n, 16)
            cp_async_bulk(stages, 4 * n, y, 4, 16, bars, n)
        mbarrier.mbarrier_wait_cta(bars, int(y[7]), 0)
        for n in range(3):
            y[n] = stages[4 * n]
        for n in range(3):
            mbarrier.mbarrier_wait_cta(bars, n, 0)

    def landed(order, chosen):
        y = np.zeros(8, np.float32)
        y[7] = chosen
        with simulator.order(order):
            run(hasty, y, threads=1)
        return (~np.isnan(y[:3])).tolist()

    for chosen in range(3):
        assert landed("awaited", chosen) == [n == chosen for n in range(3)]
    assert landed("forward", 2) == landed("reversed", 0) == [True] * 3


def test_a_warp_straggles_while_others_meet():
    """Warps of two halves meet at one barrier for four: it opens for any four, and each half takes itself for whole."""

    def mixed(y):
        written, half, tid = cuda.shared.array(256, f32), cuda.threadIdx.x // 128, cuda.threadIdx.x
        written[tid] = tid
        bar_sync(1, 128)
        y[tid] = written[128 * half + (tid + 32) % 128]

    def found(order, seed=0):
        y = np.zeros(256, np.float32)
        with simulator.order(order, seed):
            run(mixed, y, threads=256)
        return y

    assert np.array_equal(found("forward"), np.arange(256) // 128 * 128 + (np.arange(256) + 32) % 128)
    for straggler in range(4):  # warp 4 comes in its place, before warp 5, whose numbers it reads
        too_early = np.isin(np.arange(256) // 32, [(straggler - 1) % 4, 4])
        assert np.array_equal(np.isnan(found("straggling", straggler)), too_early)


def test_blocks_and_threads_of_three_axes():
    def marks(y):
        t, b, g, d = cuda.threadIdx, cuda.blockIdx, cuda.gridDim, cuda.blockDim
        block = (b.z * g.y + b.y) * g.x + b.x
        y[block * d.x * d.y * d.z + (t.z * d.y + t.y) * d.x + t.x] += 1

    y = np.zeros(2 * 3 * 2 * 4 * 2 * 3)
    simulator.launch(marks, (2, 3, 2), (4, 2, 3), [Pointer(y, "y")])
    assert (y == 1).all()


def test_a_grid_that_is_no_multiple_of_the_cluster():
    with pytest.raises(ValueError, match="grid of 3 blocks along x, expected a multiple of the cluster's 2"):
        run(lambda y: None, np.zeros(1), blocks=3, cluster=2)


def test_an_error_leaves_the_next_launch_alone():
    def fails(y):
        cuda.syncthreads()
        if cuda.threadIdx.x == 9:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(fails, np.zeros(1), blocks=2)
    test_a_barrier_holds_all_threads_back("forward")


def test_instructions_and_indices_outside_a_kernel():
    with pytest.raises(RuntimeError, match="only by a thread of a simulated kernel"):
        shfl_bfly_f32(1.0, 1, FULL)
    with pytest.raises(RuntimeError, match="only by a thread of a simulated kernel"):
        cuda.threadIdx  # noqa: B018


def test_the_ordinary_launch_of_numba(order):
    @builds
    def build(factor):
        FACTOR = factor

        @kernel(pointer(f32), pointer(f32), i32, threads=32)
        def scaled(y, x, N):
            i = cuda.grid(1)
            if i < N:
                y[i] = x[i] * FACTOR

        return scaled

    x, y = np.arange(50, dtype=np.float32), np.zeros(50, np.float32)
    build(3)[2, 32](flat(y, "y"), flat(x, "x"), 50)
    assert (y == 3 * x).all()
    assert build(3) is build(3) and build(3) is not build(4)
