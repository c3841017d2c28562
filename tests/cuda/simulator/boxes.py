"""What test_instructions.py runs for boxes of arrays, copies out of shared memory, and the fences that both need."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import cuda, f32, u8, u64
from dualops.cuda.ptx import async_copy
from dualops.cuda.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from dualops.cuda.ptx.memory import shared_address
from dualops.cuda.ptx.tma import cp_async_bulk_tensor, cp_async_bulk_tensor_store, prefetch_tensormap
from dualops.cuda.ptx.warp import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from dualops.cuda.simulator import Deadlock, TensorMap

from .asynchronous import numbered, run, tests_of

TESTS: dict[str, Callable[[], None]] = {}
of = tests_of(TESTS)


def array_of(*shape: int) -> np.ndarray:
    """Numbered from 1 on, at a multiple of 16 bytes."""
    return numbered(int(np.prod(shape))).reshape(shape)


def swizzled_byte(at: int, span: int) -> int:
    """Swizzle<log2(span / 16), 4, 3>: bit by bit."""
    for bit in range({16: 0, 32: 1, 64: 2, 128: 3}[span]):
        if at & 1 << 7 + bit:
            at ^= 1 << 4 + bit
    return at


def expected_bytes(array: np.ndarray, box: tuple[int, ...], first: tuple[int, ...], span: int) -> bytes:
    """A box as it lies in shared memory, element by element; axes and coordinates have the last axis last."""
    image = bytearray(int(np.prod(box)) * array.itemsize)
    for number, within in enumerate(itertools.product(*map(range, box))):
        place = tuple(a + b for a, b in zip(first, within, strict=True))
        there = all(0 <= p < size for p, size in zip(place, array.shape, strict=True))
        data = (array[place] if there else array.dtype.type(0)).tobytes()
        for k, byte in enumerate(data):
            image[swizzled_byte(number * array.itemsize + k, span)] = byte
    return bytes(image)


@of("cp_async_bulk_tensor", "prefetch_tensormap")
def _loads() -> None:
    cases = [
        ((5, 40), (8, 32), (0, 0), 128),
        ((5, 40), (8, 32), (-3, 24), 128),
        ((9, 40), (8, 16), (2, -4), 64),
        ((9, 40), (8, 8), (100, 0), 32),
        ((9, 40), (4, 12), (1, 39), 16),
        ((3, 5, 36), (2, 4, 32), (2, -1, 8), 128),
        ((2, 3, 5, 12), (2, 2, 2, 8), (1, 1, 4, 4), 32),
        ((2, 2, 3, 5, 8), (1, 2, 2, 4, 4), (1, -1, 1, 2, 2), 16),
    ]
    for shape, box, first, span in cases:
        rank, array, nbytes = len(shape), array_of(*shape), 4 * int(np.prod(box))
        load, record = cp_async_bulk_tensor(rank), TensorMap(array, box[::-1], span)

        def loads(y, early, load=load, record=record, first=first, nbytes=nbytes):
            tid, bars = cuda.threadIdx.x, cuda.shared.array(1, u64)
            smem = cuda.shared.array(nbytes, u8, alignment=1024)
            if tid == 0:
                mbarrier_init(bars, 0, 1)
                fence_mbarrier_init()
                prefetch_tensormap(record.address)
                mbarrier_arrive_expect_tx(bars, 0, nbytes)
                load(smem, 0, record.address, *first[::-1], bars, 0)
            cuda.syncthreads()
            early[tid] = smem[tid]
            mbarrier_wait(bars, 0, 0)
            for i in range(tid, nbytes, 32):
                y[i] = smem[i]

        y, early = np.zeros(nbytes, np.uint8), np.zeros(32, np.uint8)
        run(loads, y, early)
        assert y.tobytes() == expected_bytes(array, box, first, span), (shape, box, first, span)
        assert (early == 0xFF).all()
    _refused_loads()
    _multicast()


def _refused_loads() -> None:
    array = array_of(8, 32)
    record = TensorMap(array, (32, 8), 128)

    def load(y, nbytes=1024, at=0, rank=2, written=False, init_fenced=True):
        bars, smem = cuda.shared.array(1, u64), cuda.shared.array(2048, u8, alignment=1024)
        mbarrier_init(bars, 0, 1)
        if init_fenced:
            fence_mbarrier_init()
        if written:
            smem[1000] = 7
        mbarrier_arrive_expect_tx(bars, 0, nbytes)
        cp_async_bulk_tensor(rank)(smem, at, record.address, *[0] * rank, bars, 0)
        mbarrier_wait(bars, 0, 0)

    run(load, np.zeros(1), threads=1)
    refusals: tuple[tuple[dict[str, Any], str], ...] = (
        ({"at": 128}, "a box at shared address 0x480, expected a multiple of 1024"),
        ({"at": 2048}, "shared memory from 0xc00 to 0xfff"),
        ({"rank": 3}, "3 coordinates for a tensor map of 2 axes"),
        ({"init_fenced": False}, "named to a copy before fence.mbarrier_init"),
        ({"written": True}, "loaded over what threads wrote, without fence.proxy.async"),
        ({"nbytes": 1008}, "at mbarrier 0, phase 0"),
        ({"nbytes": 1040}, "at mbarrier 0, phase 0"),
    )
    for options, message in refusals:
        with pytest.raises((RuntimeError, IndexError), match=message):
            run(lambda y, options=options: load(y, **options), np.zeros(1), threads=1)

    def no_map(y):
        prefetch_tensormap(array.ctypes.data)

    with pytest.raises(IndexError, match="is the address of no tensor map"):
        run(no_map, np.zeros(1), threads=1)


def _multicast() -> None:
    array = array_of(2, 4)
    record, load = TensorMap(array, (4, 1), 16), cp_async_bulk_tensor(2, True)

    def sends(y, wait_for_cluster=True, mask=0b11):
        rank = cluster_ctarank()
        bars, smem = cuda.shared.array(1, u64), cuda.shared.array(64, f32, alignment=128)
        mbarrier_init(bars, 0, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(bars, 0, 32)
        if wait_for_cluster:
            barrier_cluster_arrive()
            barrier_cluster_wait()
        load(smem, 32 * rank, record.address, 0, rank, bars, 0, mask)  # each block sends a row to both
        mbarrier_wait(bars, 0, 0)
        for i in range(4):
            y[8 * rank + i], y[8 * rank + 4 + i] = smem[i], smem[32 + i]

    y = np.zeros(16)
    run(sends, y, threads=1, blocks=2, cluster=2)
    assert y.tolist() == [*array.reshape(-1).tolist()] * 2
    with pytest.raises(RuntimeError, match=r"sent to the cluster before barrier\.cluster\.wait"):
        run(lambda y: sends(y, False), y, threads=1, blocks=2, cluster=2)
    with pytest.raises(RuntimeError, match="blocks of 0x0004, in a cluster of 2"):
        run(lambda y: sends(y, True, 4), y, threads=1, blocks=2, cluster=2)
    with pytest.raises(Deadlock, match="2 threads wait forever"):
        run(lambda y: sends(y, True, 1 << cluster_ctarank()), y, threads=1, blocks=2, cluster=2)


@of("cp_async_bulk_tensor_store")
def _stores() -> None:
    for shape, box, first, span in (
        ((5, 40), (8, 32), (1, 16), 128),
        ((3, 4, 36), (2, 4, 16), (2, 2, 24), 64),
        ((2, 3, 5, 12), (2, 2, 2, 8), (1, 1, 4, 4), 32),
        ((2, 2, 3, 5, 8), (1, 2, 2, 4, 4), (1, 1, 1, 2, 2), 16),
    ):
        nbytes, rank = 4 * int(np.prod(box)), len(shape)
        array, before = array_of(*shape), array_of(*shape)
        record = TensorMap(array, box[::-1], span)
        out = cp_async_bulk_tensor_store(rank)
        source = np.arange(1000, 1000 + nbytes // 4, dtype=np.float32)
        there = expected_bytes(source.reshape(box), box, (0,) * rank, span)

        def store(x, out=out, record=record, first=first, nbytes=nbytes, array=array):
            tid, smem = cuda.threadIdx.x, cuda.shared.array(nbytes, u8, alignment=1024)
            for i in range(tid, nbytes, 32):
                smem[i] = x[i]
            async_copy.fence_proxy_async()
            cuda.syncthreads()
            if tid == 0:
                out(record.address, *first[::-1], smem, 0)
                async_copy.cp_async_bulk_commit_group()
                async_copy.cp_async_bulk_wait_group_read(0)
                smem[0], smem[nbytes - 1] = 1, 1  # it has been read
                async_copy.fence_proxy_async()

        run(store, np.frombuffer(there, np.uint8))
        for place in itertools.product(*map(range, shape)):
            within = tuple(p - f for p, f in zip(place, first, strict=True))
            inside = all(0 <= w < b for w, b in zip(within, box, strict=True))
            assert array[place] == (source.reshape(box)[within] if inside else before[place]), (shape, place)
    _refused_store()


def _refused_store() -> None:
    """Rows of 24 bytes, with a gap of 8 behind them, into which a GPU would write zeros; what begins before an array,
    which an H200 calls an illegal instruction.
    """
    gapped, whole = TensorMap(array_of(4, 8)[:, :6], (4, 4), 16), TensorMap(array_of(4, 8), (4, 4), 16)

    def store(y, record, row):
        smem = cuda.shared.array(64, u8, alignment=128)
        for i in range(64):
            smem[i] = 0
        async_copy.fence_proxy_async()
        cp_async_bulk_tensor_store(2)(record.address, 4, row, smem, 0)
        async_copy.cp_async_bulk_commit_group()
        async_copy.cp_async_bulk_wait_group(0)

    with pytest.raises(IndexError, match="a box stored to rows of 24 bytes, expected a multiple of 16"):
        run(lambda y: store(y, gapped, 0), np.zeros(1), threads=1)
    with pytest.raises(RuntimeError, match=r"a box is stored from \(4, -1\) on, before its array begins"):
        run(lambda y: store(y, whole, -1), np.zeros(1), threads=1)


@of(
    "cp_async_bulk_store",
    "cp_reduce_async_bulk_add_f32",
    "cp_async_bulk_commit_group",
    "cp_async_bulk_wait_group",
    "cp_async_bulk_wait_group_read",
    "fence_proxy_async",
)
def _out_of_shared_memory() -> None:
    def steps(order):
        """What y [8] is before each step, and at the end; it was 1 to 8, shared memory is 10 to 17 from the start."""
        seen: list[list[float]] = []

        def kernel(y):
            smem = cuda.shared.array(8, f32, alignment=128)
            for i in range(8):
                smem[i] = 10 + i
            for step in order:
                seen.append(y.data.tolist())
                if step == "fence":
                    async_copy.fence_proxy_async()
                elif step == "store":
                    async_copy.cp_async_bulk_store(y, 4, smem, 0, 16)
                elif step == "add":
                    async_copy.cp_reduce_async_bulk_add_f32(y, 0, smem, 4, 16)
                elif step == "commit":
                    async_copy.cp_async_bulk_commit_group()
                elif step == "write":
                    smem[1] = smem[5] = 0
                elif step == "write and fence":
                    smem[1] = smem[5] = 0
                    async_copy.fence_proxy_async()
                elif step == "read":
                    async_copy.cp_async_bulk_wait_group_read(0)
                elif step == "read all but one":
                    async_copy.cp_async_bulk_wait_group_read(1)
                else:
                    async_copy.cp_async_bulk_wait_group(step)

        y = numbered(8)
        run(kernel, y, threads=1)
        return [*seen, y.tolist()]

    before, stored, added = [1, 2, 3, 4, 5, 6, 7, 8], [10, 11, 12, 13], [15, 17, 19, 21]
    found = steps(["fence", "store", "commit", 0])
    assert found[1] == before and found[-1] == before[:4] + stored
    assert np.isnan(found[2][4:]).all() and np.isnan(found[3][4:]).all()  # until it is waited for
    assert steps(["fence", "add", "commit", 0])[-2:] == [before, added + before[4:]]
    assert steps(["fence", "add", "store", "commit", "read", "write"])[-1] == added + stored  # written at the end
    assert steps(["fence", "add", "commit", "store", "commit", 1, 0])[-2][:4] == added
    assert steps(["fence", "add", "commit", "store", "commit", "read all but one", 0])[-2][:4] == before[:4]

    def odd(numbers):
        return [i for i, number in enumerate(numbers) if number != number]

    for write in ("write", "write and fence"):
        assert odd(steps(["fence", "store", "commit", write, 0])[-1]) == [5]  # overwritten while it was read
    assert odd(steps(["fence", "add", "commit", "store", "commit", "read all but one", "write", 0])[-1]) == [5]
    assert odd(steps(["store", "commit", 0])[-1]) == [4, 5, 6, 7]  # what threads wrote is not seen
    for order in (["fence", "store"], ["fence", "store", "commit"], ["fence", "store", "read"], ["fence", "add", 0]):
        with pytest.raises(RuntimeError, match="1 copies out of shared memory still read it"):
            steps(order)

    def refused(*operands):
        def kernel(y):
            smem = cuda.shared.array(8, f32, alignment=128)
            async_copy.cp_async_bulk_store(y, operands[0], smem, *operands[1:])

        return kernel

    for operands, message in (
        ((0, 0, 20), "not in multiples of 16"),
        ((2, 0, 16), "not in multiples of 16"),
        ((0, 2, 16), "not in multiples of 16"),
        ((8, 0, 16), r"a0\[8\] copied as 4 elements, of 8"),
        ((0, 4, 32), r"shared memory\[4\] copied as 8 elements, of 8"),
    ):
        with pytest.raises(IndexError, match=message):
            run(refused(*operands), numbered(8), threads=1)


@of("shared_address")
def _addresses() -> None:
    found: dict[str, Any] = {}

    def kernel(y):
        one = cuda.shared.array(3, u8)
        two = cuda.shared.array(5, f32, alignment=1024)
        bytes_, floats = cuda.shared.array(0, u8, alignment=512), cuda.shared.array(0, f32, alignment=512)
        found.update(
            one=[shared_address(one, i) for i in range(3)],
            two=[shared_address(two, i) for i in range(5)],
            dynamic=[shared_address(bytes_, 4), shared_address(floats, 1)],
        )

    simulator.launch(kernel, (1,), (1,), [0], shared_bytes=64)
    first, second = found["one"][0], found["two"][0]
    assert found["one"] == [first, first + 1, first + 2] and all(type(x) is int for x in found["one"])
    assert found["two"] == [second + 4 * i for i in range(5)] and second % 2048 == 1024
    assert found["dynamic"][0] == found["dynamic"][1] and found["dynamic"][0] % 1024 == 516

    def smaller_first(y):
        cuda.shared.array(0, u8, alignment=128)
        cuda.shared.array(0, f32, alignment=1024)

    with pytest.raises(RuntimeError, match="alignment=1024 after it was asked for with less"):
        simulator.launch(smaller_first, (1,), (1,), [0], shared_bytes=64)

    def too_much(y):
        cuda.shared.array(2**18, u8)

    with pytest.raises(RuntimeError, match="bytes of shared memory, of 262144"):
        simulator.launch(too_much, (1,), (1,), [0])
