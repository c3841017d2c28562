"""What test_instructions.py runs for the tensor cores: matrices to and from shared memory, products, setmaxnreg.

Who holds what is written here as the ISA has it, element by element: groupID is lane // 4, threadID_in_group lane % 4.
"""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dualops.cuda.compiler.backend import cuda, f32, u16, u32
from dualops.cuda.ptx.matrices import ldmatrix, stmatrix
from dualops.cuda.ptx.mma import mma_m16n8k8_tf32, mma_m16n8k16
from dualops.cuda.ptx.registers import setmaxnreg_dec, setmaxnreg_inc
from dualops.cuda.ptx.warp import bar_warp_sync
from dualops.cuda.simulator import Deadlock

from .asynchronous import run, tests_of

TESTS: dict[str, Callable[[], None]] = {}
of = tests_of(TESTS)
RNG = np.random.default_rng(1)
ALL = range(32)


# --- products ----------------------------------------------------------------------------------------


def a_16bit(lane: int, i: int) -> tuple[int, int]:
    """Figure of m16n8k16's A: row and column of a_i."""
    row = lane // 4 if 0 <= i < 2 or 4 <= i < 6 else lane // 4 + 8
    column = lane % 4 * 2 + (i & 1) if i < 4 else lane % 4 * 2 + (i & 1) + 8
    return row, column


def b_16bit(lane: int, i: int) -> tuple[int, int]:
    row = lane % 4 * 2 + (i & 1) if i < 2 else lane % 4 * 2 + (i & 1) + 8
    return row, lane // 4


def c_f32(lane: int, i: int) -> tuple[int, int]:
    row = lane // 4 if i < 2 else lane // 4 + 8
    return row, lane % 4 * 2 + (i & 1)


def a_tf32(lane: int, i: int) -> tuple[int, int]:
    row = lane // 4 if i in (0, 2) else lane // 4 + 8
    return row, lane % 4 if i in (0, 1) else lane % 4 + 4


def b_tf32(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 if i == 0 else lane % 4 + 4, lane // 4


def held(matrix: np.ndarray, place: Callable[[int, int], tuple[int, int]], count: int) -> list[list[Any]]:
    """What each lane holds of a matrix."""
    return [[matrix[place(lane, i)] for i in range(count)] for lane in ALL]


def words(numbers: list[list[Any]], bits: Callable[[float], int]) -> np.ndarray:
    """Pairs of 16-bit numbers, the first in the lower half."""
    pairs = [[bits(lane[i]) | bits(lane[i + 1]) << 16 for i in range(0, len(lane), 2)] for lane in numbers]
    return np.array(pairs, np.uint32).reshape(-1)


def bf16_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0] >> 16


def f16_bits(x: float) -> int:
    return struct.unpack("<H", struct.pack("<e", x))[0]


def f32_words(numbers: list[list[Any]]) -> np.ndarray:
    return np.array(numbers, np.float32).view(np.uint32).reshape(-1)


def warp_product(mma: Any, a_words: np.ndarray, b_words: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The product of these registers, as a matrix; fragments begin behind other registers, which stay."""

    def kernel(d_gmem, a_gmem, b_gmem):
        lane = cuda.threadIdx.x
        d, a, b = cuda.local.array(6, f32), cuda.local.array(8, u32), cuda.local.array(3, u32)
        for i in range(4):
            d[1 + i] = d_gmem[4 * lane + i]
            a[4 + i] = a_gmem[4 * lane + i]
        for i in range(2):
            b[1 + i] = b_gmem[2 * lane + i]
        d[0], d[5] = lane, -lane
        mma(d, 1, a, 4, b, 1)
        assert d[0] == lane and d[5] == -lane
        for i in range(4):
            d_gmem[4 * lane + i] = d[1 + i]

    registers = np.array(held(c, c_f32, 4), np.float32).reshape(-1)
    run(kernel, registers, a_words, b_words)
    d = np.zeros((16, 8), np.float32)
    for lane in ALL:
        for i in range(4):
            d[c_f32(lane, i)] = registers[4 * lane + i]
    return d


def integers(*shape: int) -> np.ndarray:
    return RNG.integers(-50, 50, shape)


@of("mma_m16n8k16")
def _products_16bit() -> None:
    a, b, c = integers(16, 16), integers(16, 8), integers(16, 8)
    for dtype, bits in (("bf16", bf16_bits), ("f16", f16_bits)):
        a_words, b_words = words(held(a, a_16bit, 8), bits), words(held(b, b_16bit, 4), bits)
        found = warp_product(mma_m16n8k16(dtype), a_words, b_words, c)
        assert found.tolist() == (c + a @ b).tolist()  # integers: exact
    # sums are float32's, not the factors'
    a, b = np.full((16, 16), 255), np.full((16, 8), 255)
    found = warp_product(
        mma_m16n8k16("bf16"), words(held(a, a_16bit, 8), bf16_bits), words(held(b, b_16bit, 4), bf16_bits), c
    )
    assert found.tolist() == (c + 16 * 255 * 255).tolist()
    _lost_lane(mma_m16n8k16("f16"))


@of("mma_m16n8k8_tf32")
def _products_tf32() -> None:
    a, b, c = integers(16, 8), integers(8, 8), integers(16, 8)
    found = warp_product(mma_m16n8k8_tf32, f32_words(held(a, a_tf32, 4)), f32_words(held(b, b_tf32, 2)), c)
    assert found.tolist() == (c + a @ b).tolist()
    # ten bits of the fraction are used: what is not 2**-10 of it is cut off, not rounded
    fine = a + np.where(a == 0, 0, np.sign(a) * (2.0**-10 - 2.0**-20))
    kept = np.array([[_cut(x) for x in row] for row in fine.tolist()])
    found = warp_product(mma_m16n8k8_tf32, f32_words(held(fine, a_tf32, 4)), f32_words(held(b, b_tf32, 2)), 0 * c)
    assert found.tolist() == (kept @ b).astype(np.float32).tolist() and (kept != fine).any()
    _lost_lane(mma_m16n8k8_tf32)


def _cut(x: float) -> float:
    """A float without the last 13 bits of its 32."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.unpack("<f", struct.pack("<I", bits >> 13 << 13))[0]


def _lost_lane(mma: Any) -> None:
    def kernel(y):
        d, a, b = cuda.local.array(4, f32), cuda.local.array(4, u32), cuda.local.array(2, u32)
        if cuda.threadIdx.x != 7:
            mma(d, 0, a, 0, b, 0)

    with pytest.raises(Deadlock, match=r"31 threads wait forever: .* at mma\.m16n8k"):
        run(kernel, np.zeros(1))

    def refused(d_size, d_type, d_index):
        def kernel(y):
            d, a, b = cuda.local.array(d_size, d_type), cuda.local.array(4, u32), cuda.local.array(2, u32)
            mma(d, d_index, a, 0, b, 0)

        return kernel

    with pytest.raises(IndexError, match="d is elements 4 from 3 on, of 6"):
        run(refused(6, f32, 3), np.zeros(1))
    with pytest.raises(TypeError, match="d is a local array of uint32, expected a local array of float32"):
        run(refused(4, u32, 0), np.zeros(1))

    def into_shared(y):
        a, b = cuda.local.array(4, u32), cuda.local.array(2, u32)
        mma(cuda.shared.array(4, f32), 0, a, 0, b, 0)

    with pytest.raises(TypeError, match=r"d is .*, expected a local array of float32"):
        run(into_shared, np.zeros(1))


# --- matrices of shared memory ------------------------------------------------------------------------


@of("ldmatrix")
def _matrices() -> None:
    for count, trans in ldmatrix.every():
        load = ldmatrix(count, trans)

        def loads(y, load=load, count=count):
            lane = cuda.threadIdx.x
            tile, to = cuda.shared.array(4 * 8 * 16, u16, alignment=16), cuda.local.array(5, u32)
            for k in range(16):
                tile[16 * lane + k] = 100 * lane + k  # row of 16 numbers, of which the first 8 are loaded
            cuda.syncthreads()
            # rows from the last to the first; lanes that are not used bring an index of no array
            load(to, 5 - count, tile, 16 * (8 * count - 1 - lane) if lane < 8 * count else -1)
            for m in range(count):
                y[4 * lane + m] = to[5 - count + m]

        y = np.zeros(128, np.int64)
        run(loads, y)
        for lane in ALL:
            for m in range(count):
                # row and column of the two elements, as in the figure of one matrix
                places = [(lane // 4, 2 * (lane % 4)), (lane // 4, 2 * (lane % 4) + 1)]
                rows = [(column, row) if trans else (row, column) for row, column in places]
                low, high = (100 * (8 * count - 1 - (8 * m + row)) + column for row, column in rows)
                assert y[4 * lane + m] == low + (high << 16), (count, trans, lane, m)

    def off_by_eight_bytes(y):
        tile, to = cuda.shared.array(512, u16, alignment=16), cuda.local.array(4, u32)
        ldmatrix(4)(to, 0, tile, 4)

    with pytest.raises(IndexError, match=r"shared memory\[4\] is not aligned to 16 bytes"):
        run(off_by_eight_bytes, np.zeros(1))

    def one_lane_short(y):
        tile, to = cuda.shared.array(512, u16, alignment=16), cuda.local.array(4, u32)
        if cuda.threadIdx.x:
            ldmatrix(1)(to, 0, tile, 0)

    with pytest.raises(Deadlock, match=r"31 threads wait forever: .* at ldmatrix_x1 with lanes 0xffffffff"):
        run(one_lane_short, np.zeros(1))


@of("stmatrix")
def _stored_matrices() -> None:
    for count, trans in stmatrix.every():
        store = stmatrix(count, trans)

        def stores(y, store=store, count=count):
            lane = cuda.threadIdx.x
            tile, values = cuda.shared.array(4 * 8 * 16, u16, alignment=16), cuda.local.array(5, u32)
            for m in range(count):  # both halves say whose they are
                values[5 - count + m] = (1000 * m + 2 * lane) | (1000 * m + 2 * lane + 1) << 16
            # rows from the last to the first; lanes that are not used bring an index of no array
            store(tile, 16 * (8 * count - 1 - lane) if lane < 8 * count else -1, values, 5 - count)
            bar_warp_sync(0xFFFFFFFF)
            for k in range(16):
                y[16 * lane + k] = tile[16 * lane + k]

        y = np.zeros(512, np.int64)
        run(stores, y)
        for row in range(32):
            m, line = divmod(8 * count - 1 - row, 8)
            for k in range(16):
                found = y[16 * row + k]
                if row >= 8 * count or k >= 8:
                    assert found == 0xFFFF  # nobody wrote it
                else:
                    first, second = (k, line) if trans else (line, k)  # row and column of the figure
                    assert found == 1000 * m + 2 * (4 * first + second // 2) + second % 2, (count, trans, row, k)

    def off_by_eight_bytes(y):
        tile, values = cuda.shared.array(512, u16, alignment=16), cuda.local.array(4, u32)
        stmatrix(4)(tile, 4, values, 0)

    with pytest.raises(IndexError, match=r"shared memory\[4\] is not aligned to 16 bytes"):
        run(off_by_eight_bytes, np.zeros(1))

    def one_lane_short(y):
        tile, values = cuda.shared.array(512, u16, alignment=16), cuda.local.array(4, u32)
        if cuda.threadIdx.x:
            stmatrix(1)(tile, 0, values, 0)

    with pytest.raises(Deadlock, match=r"31 threads wait forever: .* at stmatrix_x1 with lanes 0xffffffff"):
        run(one_lane_short, np.zeros(1))


# --- registers ----------------------------------------------------------------------------------------


@of("setmaxnreg_dec", "setmaxnreg_inc")
def _registers() -> None:
    def handed_on(kept, taken, givers=128):
        def kernel(y):
            tid = cuda.threadIdx.x
            if tid < givers:
                y[tid] = 1
                setmaxnreg_dec(kept)
            elif tid >= 128:
                setmaxnreg_inc(taken)
                y[tid] = sum(y[i] for i in range(128))

        return kernel

    y = np.zeros(384)
    run(handed_on(24, 240), y, threads=384)  # 168 each: 144 from one warpgroup are 72 for each of two
    assert set(y[128:].tolist()) == {128.0}  # nobody goes on before they were given
    for kept, taken in ((24, 248), (32, 240)):
        with pytest.raises(Deadlock, match=r"setmaxnreg\.inc, for registers that nobody gives: threads"):
            run(handed_on(kept, taken), np.zeros(384), threads=384)
    with pytest.raises(Deadlock, match=r"at setmaxnreg\.dec 24: threads 0\.\.95"):
        run(handed_on(24, 168, givers=96), np.zeros(384), threads=384)
    message = r"setmaxnreg\.dec: warp 0 has 168 registers per thread, expected 176 or more"
    with pytest.raises(RuntimeError, match=message):
        run(handed_on(176, 240), np.zeros(384), threads=384)
    for count in (16, 25, 264, 24.0):
        pattern = f"setmaxnreg_dec: count is {count}, expected a constant from 24 to 256 in steps of 8"
        with pytest.raises(ValueError, match=pattern):
            run(handed_on(count, 240), np.zeros(384), threads=384)
