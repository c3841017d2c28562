"""Hopper's instructions, each in a small kernel: what the assembler turns them into."""

import re
from typing import Any, NamedTuple

import pytest

from dualops.cuda.compiler.backend import (
    Kernel,
    cuda,
    f32,
    i32,
    i64,
    kernel,
    pointer,
    tensor_map,
    types,
    u8,
    u16,
    u32,
    u64,
)
from dualops.cuda.ptx.async_copy import (
    cp_async_bulk_commit_group,
    cp_async_bulk_store,
    cp_async_bulk_wait_group,
    cp_async_bulk_wait_group_read,
    cp_reduce_async_bulk_add_f32,
    fence_proxy_async,
)
from dualops.cuda.ptx.matrices import stmatrix
from dualops.cuda.ptx.mbarrier import mbarrier_arrive_cluster, mbarrier_init, mbarrier_wait
from dualops.cuda.ptx.tma import cp_async_bulk_tensor, cp_async_bulk_tensor_store, prefetch_tensormap
from dualops.cuda.ptx.warp import bar_arrive, bar_sync
from dualops.cuda.ptx.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_rs, wgmma_tf32, wgmma_wait_group
from tests.cuda.compile.ptx import ptx_of, sound
from tests.cuda.warpgroup_product import KINDS, build

ARCH = "sm_90a"


def lines(made: Kernel, mnemonic: str) -> list[str]:
    """What follows a mnemonic wherever it stands."""
    text = ptx_of(made, ARCH)
    return [line.split(mnemonic, 1)[1].strip() for line in text.splitlines() if mnemonic in line]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_warpgroups_product(kind):
    sound(build(kind), ARCH, kind.shared_bytes)


def loop_of(mma: Any, n: int, words: int) -> Kernel:
    """A main loop of four products a step, with A in `words` registers or in shared memory."""
    wait, SIZE, WORDS = wgmma_wait_group(n), n // 2, words

    @kernel(pointer(f32), pointer(u32), u64, u64, i32, threads=128)
    def multiply(y, x, a_desc, b_desc, steps):
        acc, a = cuda.local.array(SIZE, f32), cuda.local.array(16, u32)
        accumulate = i32(0)
        for step in range(steps):
            for i in range(WORDS):
                a[i] = x[128 * (16 * step + i) + cuda.threadIdx.x]
            wgmma_fence()
            for k in range(4):
                if WORDS:
                    mma(acc, a, 4 * k, b_desc + u64(2 * k), accumulate)
                else:
                    mma(acc, a_desc + u64(2 * k), b_desc + u64(2 * k), accumulate)
                accumulate = i32(1)
            wgmma_commit()
            wait(acc, 0)
        for i in range(SIZE):
            y[SIZE * cuda.threadIdx.x + i] = acc[i]

    return multiply


# family, parameters, registers of A, shape and types, what stands behind the scales
PRODUCTS = [
    (wgmma, (8, "bf16", "k", "k"), 0, "m64n8k16.f32.bf16.bf16", "1, 1, 0, 0"),
    (wgmma, (128, "f16", "mn", "k"), 0, "m64n128k16.f32.f16.f16", "1, 1, 1, 0"),
    (wgmma, (256, "bf16", "k", "mn"), 0, "m64n256k16.f32.bf16.bf16", "1, 1, 0, 1"),
    (wgmma_rs, (64, "bf16", "mn"), 16, "m64n64k16.f32.bf16.bf16", "1, 1, 1"),
    (wgmma_rs, (248, "f16", "k"), 16, "m64n248k16.f32.f16.f16", "1, 1, 0"),
    (wgmma_tf32, (192,), 0, "m64n192k8.f32.tf32.tf32", "1, 1"),
]


@pytest.mark.parametrize(("family", "parameters", "words", "shape", "scales"), PRODUCTS)
def test_products(family, parameters, words, shape, scales):
    n = parameters[0]
    multiply = loop_of(family(*parameters), n, words)
    report = sound(multiply, ARCH)
    assert n // 2 < report.registers < n // 2 + 50
    found = lines(multiply, f"wgmma.mma_async.sync.aligned.{shape}")
    assert len(found) in (4, 8)  # the first step may stand by itself
    for line in found:
        assert line.split("}")[0].count("%f") == n // 2
        assert len(re.findall(r"%r\d", line)) == (4 if words else 0) and line.count("%rd") == (1 if words else 2)
        assert re.search(rf"p, {scales}; }}$", line), line


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width_is_known_to_the_assembler(n):
    sound(loop_of(wgmma(n, "bf16"), n, 0), ARCH)


class Pair(NamedTuple):
    number: Any
    x_map: Any


def test_a_tensor_map_comes_with_the_launch():
    """As CUDA C++'s `const __grid_constant__ CUtensorMap`: at its place among the parameters, and never copied."""
    store = cp_async_bulk_tensor_store(2)

    @kernel(i32, tensor_map, types.NamedTuple((i64, tensor_map), Pair), threads=32)
    def copies(c, x_map, rest):
        smem = cuda.shared.array(0, u8, alignment=1024)
        store(x_map, c, 1, smem, 0)
        store(rest.x_map, c, i32(rest.number), smem, 0)

    found = ptx_of(copies, ARCH)
    declared = re.findall(r"\.param (\S+(?: \d+ \.b8)?) \S+_param_\d(\[128\])?[,\n]", found)
    assert declared == [(".u32", ""), (".align 64 .b8", "[128]"), (".u64", ""), (".align 64 .b8", "[128]")]
    assert found.count("cvta.param") == 2 and ".local" not in found
    sound(copies, ARCH)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_boxes(rank):
    load, send = cp_async_bulk_tensor(rank), cp_async_bulk_tensor(rank, True)
    store, RANK = cp_async_bulk_tensor_store(rank), rank

    @kernel(tensor_map, i32, threads=32, cluster=2)
    def boxes(tensor_map, c):
        smem, bars = cuda.shared.array(0, u8, alignment=1024), cuda.shared.array(1, u64)
        prefetch_tensormap(tensor_map)
        if RANK == 2:
            load(smem, 1024, tensor_map, c, 1, bars, 0)
            send(smem, 0, tensor_map, c, 1, bars, 0, u16(3))
            store(tensor_map, c, 1, smem, 0)
        if RANK == 3:
            load(smem, 1024, tensor_map, c, 1, 2, bars, 0)
            send(smem, 0, tensor_map, c, 1, 2, bars, 0, u16(3))
            store(tensor_map, c, 1, 2, smem, 0)
        if RANK == 4:
            load(smem, 1024, tensor_map, c, 1, 2, 3, bars, 0)
            send(smem, 0, tensor_map, c, 1, 2, 3, bars, 0, u16(3))
            store(tensor_map, c, 1, 2, 3, smem, 0)
        if RANK == 5:
            load(smem, 1024, tensor_map, c, 1, 2, 3, 4, bars, 0)
            send(smem, 0, tensor_map, c, 1, 2, 3, 4, bars, 0, u16(3))
            store(tensor_map, c, 1, 2, 3, 4, smem, 0)
        cp_async_bulk_commit_group()
        cp_async_bulk_wait_group_read(1)
        cp_async_bulk_wait_group(0)

    begin = f"cp.async.bulk.tensor.{rank}d."
    (one,) = lines(boxes, f"{begin}shared::cluster.global.mbarrier::complete_tx::bytes [")
    (all_,) = lines(boxes, f"{begin}shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster")
    (out,) = lines(boxes, f"{begin}global.shared::cta.bulk_group")
    for line in (one, all_, out):
        assert line.split("{")[1].split("}")[0].count("%r") == rank, line
    assert re.search(r", %rs\d+;$", all_)
    sound(boxes, ARCH, 4096)


def test_copies_out_of_shared_memory():
    @kernel(pointer(f32), pointer(f32), threads=32)
    def copies(y, x):
        smem = cuda.shared.array(32, f32, alignment=128)
        smem[cuda.threadIdx.x] = x[cuda.threadIdx.x]
        fence_proxy_async()
        bar_sync(1, 32)
        if cuda.threadIdx.x == 0:
            cp_async_bulk_store(y, 32, smem, 0, 128)
            cp_reduce_async_bulk_add_f32(y, 64, smem, 0, 128)
            cp_async_bulk_commit_group()
            cp_async_bulk_wait_group(0)

    assert len(lines(copies, "cp.async.bulk.global.shared::cta.bulk_group [%rd")) == 1
    assert len(lines(copies, "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd")) == 1
    assert len(lines(copies, "fence.proxy.async.shared::cta;")) == 1
    sound(copies, ARCH)


@pytest.mark.parametrize(("count", "trans"), stmatrix.every())
def test_stmatrix(count, trans):
    store, COUNT = stmatrix(count, trans), count

    @kernel(pointer(u16), pointer(u32), threads=32)
    def stores(y, x):
        lane = cuda.threadIdx.x
        tile, values = cuda.shared.array(512, u16, alignment=16), cuda.local.array(4, u32)
        for m in range(COUNT):
            values[m] = x[COUNT * lane + m]
        store(tile, 16 * lane, values, 0)
        cuda.syncthreads()
        for i in range(16):
            y[16 * lane + i] = tile[16 * lane + i]

    (found,) = lines(stores, f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 ")
    assert found.count("%r") == count + 1
    sound(stores, ARCH)


def test_barriers():
    @kernel(threads=64, cluster=2)
    def meets():
        tid, bars = cuda.threadIdx.x, cuda.shared.array(2, u64)
        if tid == 0:
            mbarrier_init(bars, 1, 64)
        if tid < 32:
            bar_sync(3, 64)
        else:
            bar_arrive(3, 64)
        mbarrier_arrive_cluster(bars, 1, 1)
        mbarrier_wait(bars, 1, 0)

    assert len(lines(meets, "bar.arrive ")) == 1
    assert len(lines(meets, "mbarrier.arrive.shared::cluster.b64 _, [there]")) == 1
    sound(meets, ARCH)
