"""Hopper's instructions on the GPU: products of boxes are exact, so swizzles and descriptors equal the twins'."""

from typing import Any

import numpy as np
import pytest
import torch

from dualops.cuda.compiler.backend import Kernel, builds, cuda, f32, i32, kernel, pointer, tensor_map, u16, u32, u64
from dualops.cuda.launch import device
from dualops.cuda.launch.step import Step, prepare
from dualops.cuda.launch.tensor_map import Boxes
from dualops.cuda.ptx.async_copy import (
    cp_async_bulk_commit_group,
    cp_async_bulk_store,
    cp_async_bulk_wait_group,
    cp_reduce_async_bulk_add_f32,
    fence_proxy_async,
)
from dualops.cuda.ptx.matrices import stmatrix
from dualops.cuda.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive_cluster,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from dualops.cuda.ptx.tma import cp_async_bulk_tensor, cp_async_bulk_tensor_store
from dualops.cuda.ptx.warp import bar_sync, barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from tests.cuda.warpgroup_product import KINDS, Kind, build, maps_of, problem, step_of

pytestmark = pytest.mark.skipif(not device.current().has_wgmma, reason="products of warpgroups are Hopper's")


def on_gpu(array: np.ndarray) -> torch.Tensor:
    """The bits of an array."""
    return torch.from_numpy(array.view(f"i{array.itemsize}").copy()).cuda()


def launch(step: Step, names: tuple[str, ...], given: list[tuple[Boxes | None, torch.Tensor]]) -> None:
    """Each argument is a tensor's address, or its map where there are boxes of it."""
    maps = [boxes and boxes.encoded(tensor.data_ptr()) for boxes, tensor in given]
    pointers = [found.address if found else tensor.data_ptr() for found, (_, tensor) in zip(maps, given, strict=True)]
    prepare(step, names, device.current())(pointers, torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("rows", [64, 50])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_warpgroups_product(kind: Kind, rows: int):
    if rows != 64 and (kind.a == "mn" or kind.a == "registers"):
        pytest.skip("lines of 50 numbers are not a multiple of 16 bytes; registers load all rows")
    a, b, expected = problem(kind, rows)
    y = torch.empty(rows, kind.n, device="cuda")
    arrays: list[Any] = [y, on_gpu(a), on_gpu(b)]
    mapped = zip(maps_of(kind, arrays), arrays, strict=True)
    launch(step_of(kind, build(kind)), ("y_map", "a_map", "b_map", "words"), [*mapped, (None, arrays[1])])
    assert y.cpu().tolist() == expected.tolist()


@builds
def build_multicast() -> Kernel:
    """Both blocks of a cluster get both rows of x; then all threads arrive at block 0, which stores a row to y."""
    send, store = cp_async_bulk_tensor(2, True), cp_async_bulk_tensor_store(2)

    @kernel(tensor_map, tensor_map, pointer(f32), threads=32, cluster=2)
    def sends(x_map, y_map, z):
        tid, rank = cuda.threadIdx.x, cluster_ctarank()
        bars, smem = cuda.shared.array(2, u64), cuda.shared.array(64, f32, alignment=128)
        if tid == 0:
            mbarrier_init(bars, 0, 1)
            mbarrier_init(bars, 1, 64)
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(bars, 0, 256)
        barrier_cluster_arrive()
        barrier_cluster_wait()
        if tid == 0:
            send(smem, 32 * rank, x_map, i32(0), rank, bars, 0, u16(3))
        mbarrier_wait(bars, 0, 0)
        z[64 * rank + tid] = smem[tid]
        z[64 * rank + 32 + tid] = smem[32 + tid]
        mbarrier_arrive_cluster(bars, 1, 0)
        if rank == 0:
            mbarrier_wait(bars, 1, 0)
            smem[tid] += f32(1)
            fence_proxy_async()
            bar_sync(1, 32)
            if tid == 0:
                store(y_map, i32(0), i32(1), smem, 0)
                cp_async_bulk_commit_group()
                cp_async_bulk_wait_group(0)
        barrier_cluster_arrive()
        barrier_cluster_wait()

    return sends


def test_multicast_remote_arrival_and_stores_of_boxes():
    x = torch.arange(64.0, device="cuda").reshape(2, 32)
    y = torch.full((3, 32), 0.5, device="cuda")
    z = torch.empty(128, device="cuda")
    x_boxes, y_boxes = (Boxes("float32", (rows, 32), (32, 1), (1, 32), 16) for rows in (2, 3))
    names = ("x_map", "y_map", "z")
    launch(Step(build_multicast(), (2,), names), names, [(x_boxes, x), (y_boxes, y), (None, z)])
    assert z.tolist() == [*range(64)] * 2
    assert y.tolist() == [[0.5] * 32, [float(i + 1) for i in range(32)], [0.5] * 32]


@builds
def build_stmatrix(count: int, trans: bool) -> Kernel:
    store, COUNT = stmatrix(count, trans), count

    @kernel(pointer(u16), pointer(f32), threads=32)
    def stores(y, z):
        lane = cuda.threadIdx.x
        tile, values = cuda.shared.array(256, u16, alignment=128), cuda.local.array(4, u32)
        floats = cuda.shared.array(32, f32, alignment=128)
        for m in range(COUNT):
            values[m] = u32(100 * m + 2 * lane) | u32(100 * m + 2 * lane + 1) << u32(16)
        store(tile, 8 * lane, values, 0)
        floats[lane] = f32(lane)
        fence_proxy_async()
        bar_sync(1, 32)
        if lane == 0:
            cp_async_bulk_store(z, 0, floats, 0, 128)
            cp_async_bulk_commit_group()
            cp_async_bulk_wait_group(0)
            cp_reduce_async_bulk_add_f32(z, 0, floats, 0, 128)
            cp_async_bulk_commit_group()
            cp_async_bulk_wait_group(0)
        for k in range(8):
            y[8 * lane + k] = tile[8 * lane + k]

    return stores


@pytest.mark.parametrize(("count", "trans"), stmatrix.every())
def test_stmatrix_and_copies_out_of_shared_memory(count, trans):
    y, z = torch.zeros(256, dtype=torch.int16, device="cuda"), torch.zeros(32, device="cuda")
    launch(Step(build_stmatrix(count, trans), (1,), ("y", "z")), ("y", "z"), [(None, y), (None, z)])
    matrices = y.cpu().numpy().reshape(4, 8, 8)[:count]
    for m, matrix in enumerate(matrices):
        numbers = 100 * m + np.arange(64).reshape(8, 8)
        assert matrix.tolist() == (numbers.T if trans else numbers).tolist()
    assert z.tolist() == [2.0 * i for i in range(32)]
