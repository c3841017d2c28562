"""Instructions with fragments and immediates, each in a small kernel: the code that the assembler generates."""

from typing import Any

import pytest

from dualops.cuda.compiler.backend import Kernel, Namespace, NumbaError, cuda, f32, i32, kernel, pointer, u16, u32
from dualops.cuda.compiler.compile import compile_kernel
from dualops.cuda.ptx.cp_async import cp_async, cp_async_commit, cp_async_wait_group
from dualops.cuda.ptx.matrices import ldmatrix
from dualops.cuda.ptx.mma import mma_m16n8k8_tf32, mma_m16n8k16
from dualops.cuda.ptx.wgmma import wgmma_wait_group
from tests.cuda.compile.ptx import ptx_of, sound
from tests.cuda.warp_product import KINDS, kernel_of


def lines(kernel: Kernel, arch: str, mnemonic: str) -> list[str]:
    return [line.strip() for line in ptx_of(kernel, arch).splitlines() if line.strip().startswith(mnemonic)]


class Product(Namespace):
    mma: Any


def products(mma: Any, count: int) -> Kernel:
    """Build a kernel with the accumulators of several products in one array; indices are sums of loop variables and
    constants; the product is a method of an object.
    """
    product = Product(mma=mma)
    COUNT, SIZE = count, 4 * count

    @kernel(pointer(f32), pointer(u32), i32, threads=32)
    def multiply(y, x, n):
        lane = cuda.threadIdx.x
        acc, a, b = cuda.local.array(SIZE, f32), cuda.local.array(4, u32), cuda.local.array(4, u32)
        for i in range(SIZE):
            acc[i] = f32(0)
        for step in range(n):
            for i in range(4):
                a[i] = x[256 * step + 8 * lane + i]
                b[i] = x[256 * step + 8 * lane + 4 + i]
            for j in range(COUNT):
                product.mma(acc, 4 * j, a, 0, b, 2 * (j % 2))
        for i in range(SIZE):
            y[SIZE * lane + i] = acc[i]

    return multiply


BF16, F16 = (f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 " for dtype in ("bf16", "f16"))
TF32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "


@pytest.mark.parametrize(
    ("mma", "mnemonic", "arch"),
    [
        pytest.param(mma_m16n8k16("bf16"), BF16, "sm_90a", id="bf16"),
        pytest.param(mma_m16n8k16("f16"), F16, "sm_80", id="f16"),
        pytest.param(mma_m16n8k8_tf32, TF32, "sm_120", id="tf32"),
    ],
)
def test_mma(mma, mnemonic, arch):
    multiply = products(mma, 4)
    found = lines(multiply, arch, mnemonic)
    assert len(found) >= 4
    for line in found:  # four results, four and two factors; the accumulators are in the results' registers
        d, a, b, c = (group.split("}")[0].split(",") for group in line.split("{")[1:])
        assert (len(d), len(a), len(b)) == (4, 4, 2) and c == d, line
    sound(multiply, arch)


@pytest.mark.parametrize(("count", "trans"), ldmatrix.every())
def test_ldmatrix(count, trans):
    load, COUNT = ldmatrix(count, trans), count

    @kernel(pointer(u32), pointer(u16), threads=32)
    def loads(y, x):
        lane = cuda.threadIdx.x
        tile, to = cuda.shared.array(512, u16, alignment=16), cuda.local.array(8, u32)
        for i in range(16):
            tile[16 * lane + i] = x[16 * lane + i]
        cuda.syncthreads()
        for k in range(2):
            load(to, 4 * k, tile, 16 * lane + 8 * k)
        for k in range(2):
            for m in range(COUNT):
                y[8 * lane + 4 * k + m] = to[4 * k + m]

    mnemonic = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 "
    found = lines(loads, "sm_80", mnemonic)
    assert len(found) == 2 and all(line.count("%r") == count + 1 for line in found), found
    sound(loads, "sm_80")


@pytest.mark.parametrize(("nbytes", "zfill"), cp_async.every())
def test_cp_async(nbytes, zfill):
    copy, EACH, ZFILL = cp_async(nbytes, zfill), nbytes // 4, zfill

    @kernel(pointer(f32), pointer(f32), u32, threads=32)
    def copies(y, x, size):
        there = cuda.shared.array(128, f32, alignment=16)
        place = EACH * cuda.threadIdx.x
        if ZFILL:
            copy(there, place, x, place, size)
        else:
            copy(there, place, x, place)
        cp_async_commit()
        cp_async_wait_group(0)
        cuda.syncthreads()
        y[cuda.threadIdx.x] = there[EACH * (31 - cuda.threadIdx.x)]

    (found,) = lines(copies, "sm_80", f"cp.async.{'cg' if nbytes == 16 else 'ca'}.shared.global [%r")
    assert f"], {nbytes}" in found and found.count(",") == 2 + zfill
    assert lines(copies, "sm_80", "cp.async.wait_group") == ["cp.async.wait_group 0;"]
    sound(copies, "sm_80")


@pytest.mark.parametrize(("dtype", "transposed"), KINDS)
def test_a_kernel_that_copies_loads_and_multiplies(dtype, transposed):
    sound(kernel_of(dtype, transposed), "sm_90a")


@pytest.mark.parametrize("pending", [-1, 8])
def test_an_immediate_outside_of_its_domain(pending):
    PENDING, wait = pending, wgmma_wait_group(64)

    @kernel(i32, threads=128)
    def waits(x):
        wait(cuda.local.array(32, f32), PENDING)

    message = f"wgmma_wait_group_n64: pending is {pending}, expected a constant from 0 to 7"
    with pytest.raises(NumbaError, match=message):
        compile_kernel(waits, "sm_90a")


def test_an_immediate_that_is_no_constant():
    @kernel(i32, threads=128)
    def waits(pending):
        cp_async_wait_group(pending)

    message = "cp_async_wait_group: pending is int32 and no constant, expected a constant from 0 to 63"
    with pytest.raises(NumbaError, match=message):
        compile_kernel(waits, "sm_80")


@pytest.mark.parametrize(("name", "shown"), [("words", r"array\(uint32, 1d, C\)"), ("y", r"float32\*")])
def test_a_fragment_of_another_type(name, shown):
    mma, OWN = mma_m16n8k16("bf16"), name == "words"

    @kernel(pointer(f32), threads=32)
    def multiply(y):
        words, a, b = cuda.local.array(4, u32), cuda.local.array(4, u32), cuda.local.array(2, u32)
        if OWN:
            mma(words, 0, a, 0, b, 0)
        else:
            mma(y, 0, a, 0, b, 0)

    with pytest.raises(NumbaError, match=f"mma_m16n8k16_f32_bf16: d is {shown}, expected a local array of float32"):
        compile_kernel(multiply, "sm_80")
