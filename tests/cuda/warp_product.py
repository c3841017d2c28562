"""y [16, 8] = a [16, K] @ b by one warp of tensor cores: the smallest kernels that need copies, loads and products.

The same source is compiled, simulated, and run on a GPU, with integers, so that the result is exact.
"""

from typing import Any

import ml_dtypes
import numpy as np

from dualops.cuda.compiler.backend import Kernel, builds, cuda, f32, i32, kernel, pointer, u16, u32, verb
from dualops.cuda.launch import device
from dualops.cuda.launch.step import Step, prepare
from dualops.cuda.ptx.cp_async import cp_async, cp_async_commit, cp_async_wait_group
from dualops.cuda.ptx.matrices import ldmatrix
from dualops.cuda.ptx.mma import mma_m16n8k8_tf32, mma_m16n8k16
from dualops.cuda.ptx.warp import bar_warp_sync
from dualops.cuda.tile import fragment

KINDS = [("bf16", False), ("bf16", True), ("f16", False), ("f16", True), ("tf32", False)]  # dtype, whether b is [8, K]
K = 48
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32}
ALL = 0xFFFFFFFF

accumulator, left_tf32, right_tf32 = map(verb, (fragment.accumulator, fragment.left_tf32, fragment.right_tf32))


@builds
def build(dtype: str, transposed: bool) -> Kernel:
    """16 of K a step, through shared memory. transposed: b is [8, K], else [K, 8]."""
    mma, copy = mma_m16n8k16(dtype), cp_async(16)
    load_a, load_b = ldmatrix(4), ldmatrix(2, not transposed)
    PITCH, TRANSPOSED = 24, transposed  # 16 numbers in a row, and 8 more apart

    @kernel(pointer(f32), pointer(u16), pointer(u16), i32, threads=32)
    def multiply(y, a_gmem, b_gmem, K):
        lane = cuda.threadIdx.x
        a_smem = cuda.shared.array(16 * 24, u16, alignment=16)
        b_smem = cuda.shared.array(16 * 24, u16, alignment=16)
        acc, a, b = cuda.local.array(4, f32), cuda.local.array(4, u32), cuda.local.array(2, u32)
        for i in range(4):
            acc[i] = f32(0)
        for k0 in range(0, K, 16):
            row, half = lane // 2, 8 * (lane % 2)
            copy(a_smem, PITCH * row + half, a_gmem, K * row + k0 + half)
            if lane < 16:
                if TRANSPOSED:
                    copy(b_smem, PITCH * row + half, b_gmem, K * row + k0 + half)
                else:
                    copy(b_smem, PITCH * lane, b_gmem, 8 * (k0 + lane))
            cp_async_commit()
            cp_async_wait_group(0)
            bar_warp_sync(ALL)
            load_a(a, 0, a_smem, PITCH * (lane % 16) + 8 * (lane // 16))
            if TRANSPOSED:
                load_b(b, 0, b_smem, PITCH * (lane % 8) + 8 * (lane // 8 % 2))
            else:
                load_b(b, 0, b_smem, PITCH * (lane % 16))
            mma(acc, 0, a, 0, b, 0)
            bar_warp_sync(ALL)
        for i in range(4):
            row, column = accumulator(lane, i)
            y[8 * row + column] = acc[i]

    return multiply


@builds
def build_tf32() -> Kernel:
    """8 of K a step, each thread loading what it owns; b is [K, 8]."""
    mma = mma_m16n8k8_tf32

    @kernel(pointer(f32), pointer(u32), pointer(u32), i32, threads=32)
    def multiply(y, a_gmem, b_gmem, K):
        lane = cuda.threadIdx.x
        acc, a, b = cuda.local.array(4, f32), cuda.local.array(4, u32), cuda.local.array(2, u32)
        for i in range(4):
            acc[i] = f32(0)
        for k0 in range(0, K, 8):
            for i in range(4):
                row, column = left_tf32(lane, i)
                a[i] = a_gmem[K * row + k0 + column]
            for i in range(2):
                row, column = right_tf32(lane, i)
                b[i] = b_gmem[8 * (k0 + row) + column]
            mma(acc, 0, a, 0, b, 0)
        for i in range(4):
            row, column = accumulator(lane, i)
            y[8 * row + column] = acc[i]

    return multiply


def kernel_of(dtype: str, transposed: bool) -> Kernel:
    return build_tf32() if dtype == "tf32" else build(dtype, transposed)


def problem(dtype: str, transposed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a and b, as the bits that the kernel reads, and the product."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-50, 50, (16, K)), rng.integers(-50, 50, (K, 8))
    word = np.uint32 if dtype == "tf32" else np.uint16
    a_bits, b_bits = (np.ascontiguousarray(x).astype(DTYPES[dtype]).view(word) for x in (a, b.T if transposed else b))
    return a_bits, b_bits, a @ b


def launch(dtype: str, transposed: bool, arrays: list[Any], *stream: int) -> None:
    """y, a, b: NumPy's in the simulator, else their addresses."""
    step = Step(kernel_of(dtype, transposed), (1,), ("y", "a", "b", K))
    prepare(step, ("y", "a", "b"), device.current())(arrays, *stream)
