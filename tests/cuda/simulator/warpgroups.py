"""What test_instructions.py runs for warpgroups: products out of shared memory, their fences, groups and waits.

Operands are laid out as the examples of the PTX ISA 9.0, 9.7.15.5.1.2.1.3, have them, number by number: shape and
strides of each, in elements, then the swizzle as a permutation of bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import cuda, f32, u8, u32, u64
from dualops.cuda.ptx.async_copy import fence_proxy_async
from dualops.cuda.ptx.memory import shared_address
from dualops.cuda.ptx.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_rs, wgmma_tf32, wgmma_wait_group
from dualops.cuda.simulator import Deadlock, Pointer

from .asynchronous import tests_of
from .tensor_cores import a_16bit, bf16_bits, f16_bits

TESTS: dict[str, Callable[[], None]] = {}
of = tests_of(TESTS)
RNG = np.random.default_rng(2)
THREADS = range(128)
BITS = {"bf16": (2, bf16_bits), "f16": (2, f16_bits), "tf32": (4, lambda x: int(np.float32(x).view(np.uint32)))}
MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
FLIPPED = {"none": 0, "32B": 1, "64B": 2, "128B": 3}  # bits of Swizzle<., 4, 3>


def integers(dtype: str, *shape: int) -> np.ndarray:
    return RNG.integers(-50, 50, shape)


def offset(coordinate: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """A coordinate of a nested mode, the first part running fastest."""
    at = 0
    for size, stride in zip(shape, strides, strict=True):
        coordinate, part = divmod(coordinate, size)
        at += part * stride
    assert coordinate == 0
    return at


def laid_out(matrix: np.ndarray, dtype: str, mode: str, layout: Any) -> bytes:
    """Bytes of a matrix [M or N, K] in the layout ((shape, strides) of either axis)."""
    itemsize, bits = BITS[dtype]
    (rows, row_strides), (columns, column_strides) = layout
    image = bytearray(16384)
    for r in range(matrix.shape[0]):
        for c in range(matrix.shape[1]):
            at = itemsize * (offset(r, rows, row_strides) + offset(c, columns, column_strides))
            for bit in range(FLIPPED[mode]):
                if at & 1 << 7 + bit:
                    at ^= 1 << 4 + bit
            image[at : at + itemsize] = bits(matrix[r, c]).to_bytes(itemsize, "little")
    return bytes(image)


def bits_of(mode: str, leading: int, stride: int) -> int:
    """A descriptor of a matrix at address 0, its offsets in bytes."""
    return MODES[mode] << 62 | stride >> 4 << 32 | leading >> 4 << 16


# type, swizzle, majorness, columns of B, layout, leading and stride offsets in bytes
EXAMPLES = [
    ("tf32", "none", "k", 16, (((8, 2), (4, 32)), ((4, 2), (1, 64))), 64 * 4, 32 * 4),
    ("tf32", "32B", "k", 16, (((8, 2), (8, 64)), ((4, 2), (1, 4))), 16, 64 * 4),
    ("bf16", "none", "mn", 16, (((8, 1, 2), (1, 8, 64)), ((8, 2), (8, 128))), 128 * 2, 64 * 2),
    ("bf16", "32B", "mn", 32, (((8, 2, 2), (1, 8, 128)), ((8, 2), (16, 256))), 128 * 2, 256 * 2),
    ("f16", "64B", "mn", 64, (((8, 4, 2), (1, 8, 256)), ((8, 2), (32, 512))), 256 * 2, 512 * 2),
    # by the table, for T = 8 and 16: with no example of its own
    ("f16", "128B", "mn", 128, (((8, 8, 2), (1, 8, 1024)), ((8, 2), (64, 512))), 1024 * 2, 512 * 2),
    ("bf16", "128B", "k", 24, (((8, 3), (64, 512)), ((8, 2), (1, 8))), 16, 512 * 2),
    ("f16", "64B", "k", 8, (((8, 1), (32, 256)), ((8, 2), (1, 8))), 16, 256 * 2),
]
# A [64, K], K-major, 128-byte swizzle, behind B
A_AT, A_BITS = 32768, bits_of("128B", 16, 1024)


def a_layout(itemsize: int) -> Any:
    row = 128 // itemsize
    chunk = 16 // itemsize
    return ((8, 8), (row, 8 * row)), ((chunk, 2), (1, chunk))


def product(issue: Any, n: int, image: bytes, words: np.ndarray, scale_d: int) -> tuple[np.ndarray, np.ndarray]:
    """y [64, n] as 128 threads hold it, which begin with row + column / 256; and what they held before the wait."""
    wait, size = wgmma_wait_group(n), n // 2

    def kernel(y, early, x, a_words):
        tid = cuda.threadIdx.x
        smem = cuda.shared.array(0, u8, alignment=1024)
        for i in range(tid, len(image), 128):
            smem[i] = x[i]
        fence_proxy_async()
        cuda.syncthreads()
        acc, a = cuda.local.array(size, f32), cuda.local.array(6, u32)
        for i in range(4):
            a[2 + i] = a_words[4 * tid + i]
        for e in range(size):
            row, column = held(tid, e)
            acc[e] = row + column / 256
        wgmma_fence()
        issue(acc, a, shared_address(smem, 0), scale_d)
        wgmma_commit()
        early[tid] = acc[0]
        wait(acc, 0)
        for e in range(size):
            y[size * tid + e] = acc[e]

    y, early = np.zeros(64 * n), np.zeros(128)
    args = (y, early, np.frombuffer(image, np.uint8), words)
    pointers = [Pointer(array, f"a{i}") for i, array in enumerate(args)]
    simulator.launch(kernel, (1,), (128,), pointers, shared_bytes=len(image))
    matrix = np.zeros((64, n))
    for tid in THREADS:
        for e in range(size):
            matrix[held(tid, e)] = y[size * tid + e]
    return matrix, early


def held(tid: int, e: int) -> tuple[int, int]:
    """Figure of D: row and column of d_e."""
    row = 16 * (tid // 32) + tid % 32 // 4 + (8 if e & 2 else 0)
    return row, e // 4 * 8 + tid % 4 * 2 + e % 2


def fragments(a: np.ndarray, dtype: str) -> np.ndarray:
    """The words of A that 128 threads hold."""
    _, bits = BITS[dtype]
    words = np.zeros((128, 4), np.uint32)
    for tid in THREADS:
        mine = a[16 * (tid // 32) : 16 * (tid // 32) + 16]
        for i in range(4):
            low, high = (bits(mine[a_16bit(tid % 32, 2 * i + half)]) for half in range(2))
            words[tid, i] = high << 16 | low
    return words.reshape(-1)


def of_products(name: str, dtypes: tuple[str, ...], member: Callable[..., Any], *, from_registers: bool) -> None:
    """Test a family of products by the examples of some types: `member` of (type, major, n)."""

    def products() -> None:
        for dtype, mode, major, n, layout, leading, stride in (each for each in EXAMPLES if each[0] in dtypes):
            itemsize, _ = BITS[dtype]
            a, b = integers(dtype, 64, 32 // itemsize), integers(dtype, n, 32 // itemsize)
            image = laid_out(b, dtype, mode, layout)
            if not from_registers:
                image = image.ljust(A_AT, b"\0") + laid_out(a, dtype, "128B", a_layout(itemsize))
            words = fragments(a, dtype) if from_registers else np.zeros(512, np.uint32)

            mma, b_bits = member(dtype, major, n), bits_of(mode, leading, stride)

            def issue(acc, frag, address, scale_d, mma=mma, b_bits=b_bits):
                b_desc = u64(b_bits) | u64(address >> 4)
                if from_registers:
                    mma(acc, frag, 2, b_desc, scale_d)
                else:
                    mma(acc, u64(A_BITS) | u64(address + A_AT >> 4), b_desc, scale_d)

            before = np.array([[row + column / 256 for column in range(n)] for row in range(64)])
            for scale_d in (0, 1):
                found, early = product(issue, n, image, words, scale_d)
                expected = (a @ b.T + scale_d * before).astype(np.float32)
                assert found.tolist() == expected.tolist(), (dtype, mode, major)
                assert np.isnan(early).all()

    of(name)(products)


HALVES = ("bf16", "f16")
of_products("wgmma", HALVES, lambda dtype, major, n: wgmma(n, dtype, "k", major), from_registers=False)
of_products("wgmma_rs", HALVES, lambda dtype, major, n: wgmma_rs(n, dtype, major), from_registers=True)
of_products("wgmma_tf32", ("tf32",), lambda dtype, major, n: wgmma_tf32(n), from_registers=False)


@of("wgmma_fence", "wgmma_commit", "wgmma_wait_group")
def _what_is_not_in_order() -> None:
    mma, wait = wgmma_rs(8, "bf16"), wgmma_wait_group(8)

    def steps(order, threads=128, warps=4, at=0, bits=A_BITS):
        def kernel(y):
            smem = cuda.shared.array(1024, u8, alignment=1024)
            acc, a = cuda.local.array(4, f32), cuda.local.array(4, u32)
            if cuda.threadIdx.x % 128 >= 32 * warps:
                return
            for step in order:
                if step == "fence":
                    wgmma_fence()
                elif step == "mma":
                    mma(acc, a, 0, u64(bits) | u64(shared_address(smem, 0) + at >> 4), 1)
                elif step == "commit":
                    wgmma_commit()
                elif step == "read acc":
                    y[0] = acc[0]
                elif step == "wait for others":
                    wait(cuda.local.array(4, f32), 0)
                elif step == "write acc":
                    acc[0] = 1
                elif step == "write a":
                    a[3] = 1
                else:
                    wait(acc, step)

        y = np.zeros(1)
        simulator.launch(kernel, (1,), (threads,), [Pointer(y, "y")])
        return y[0]

    whole = ["fence", "mma", "commit", 0]
    steps(whole * 2)
    steps([*whole, "read acc", "write acc", "write a", *whole])
    steps(["fence", "mma", "mma", "commit", "mma", "commit", 1, 0])
    unseen = ["fence", "mma", "commit", "wait for others"]  # over, and the compiler may still have read them before
    assert np.isnan(steps([*unseen, "read acc"]))
    assert steps([*unseen, "write acc", "read acc"]) == steps([*unseen, "write acc", 0, "read acc"]) == 1
    for order, message in (
        (["mma"], "no wgmma.fence before the first product"),
        ([*whole, "mma"], "no wgmma.fence before the first product, or since the latest wait"),
        ([*whole, "fence", "read acc", "mma"], "registers are touched after wgmma.fence"),
        ([*whole, "fence", "write a", "mma"], "registers are touched after wgmma.fence"),
        (["fence", "mma", "write acc"], "registers of a wgmma are written before the wait"),
        (["fence", "mma", "commit", "write a"], "registers of a wgmma are written before the wait"),
        (["fence", "mma", "commit", "fence", "mma", "commit", 1, "write a"], "written before the wait"),
        (["fence", "mma", "commit"], "1 products of thread 0 are not waited for"),
        (["fence", "mma", 0], "1 products of thread 0 are not waited for"),
        (["fence", "mma", "commit", 1], "1 products of thread 0 are not waited for"),
    ):
        with pytest.raises(RuntimeError, match=message):
            steps(order)
    with pytest.raises(Deadlock, match=r"96 threads wait forever: .* at m64n8k16.*, which not all threads"):
        steps(whole, warps=3)
    with pytest.raises(RuntimeError, match="warp 4 is in no warpgroup of four, of 160 threads"):
        steps(whole, threads=160)
    with pytest.raises(IndexError, match="shared memory from 0x800 to 0xbff, which ends at 0x800"):
        steps(whole, at=1024)
    with pytest.raises(RuntimeError, match="begins at shared address 0x480: a swizzle of 128 bytes repeats every 1024"):
        steps(whole, at=128)
    with pytest.raises(NotImplementedError, match="with a base offset"):
        steps(whole, bits=A_BITS | 1 << 49)
