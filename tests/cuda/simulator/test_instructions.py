"""Every instruction's twin against a computation that owes it nothing: fractions, `struct`, Python's own floats."""

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import cuda
from dualops.cuda.ptx import arithmetic, memory, warp
from dualops.cuda.ptx.asm import FAMILIES, RECORDS
from dualops.cuda.ptx.convert import (
    bf16_of_f32,
    f16_of_f32,
    f32_of_bf16,
    f32_of_f16,
    pack_bf16x2,
    pack_f16x2,
    tf32_of_f32,
    unpack_bf16x2,
    unpack_f16x2,
)
from dualops.cuda.simulator import Pointer

from . import asynchronous, boxes, grouped, tensor_cores, warpgroups

TESTS: dict[str, Callable[[], None]] = asynchronous.TESTS | boxes.TESTS | grouped.TESTS
TESTS |= tensor_cores.TESTS | warpgroups.TESTS
INF, NAN = math.inf, math.nan
RNG = np.random.default_rng(0)
NUMBERS = [float(x) for x in np.concatenate([RNG.normal(size=200), RNG.normal(size=50) * 1e30]).astype(np.float32)]
EDGES = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, -1e-45, 2.0**-126, 3.4028234663852886e38, -65504.0, 65519.99]


def of(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator: this function tests the instructions with these names."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        TESTS.update(dict.fromkeys(names, function))
        return function

    return add


NAMES = {**dict.fromkeys(record.family for record in RECORDS.values()), **FAMILIES}  # a family is tested as one


@pytest.mark.parametrize("name", NAMES)
def test_twin(name):
    assert name in TESTS, f"{name} has no test: write one that does not use its twin's arithmetic"
    with np.errstate(all="ignore"):
        TESTS[name]()


def test_no_test_without_an_instruction():
    assert TESTS.keys() == NAMES.keys()


def same(one: Any, two: Any) -> bool:
    """The same number, zeros with the same sign, any NaN like any other."""
    one, two = float(one), float(two)
    return (one != one and two != two) or (one == two and math.copysign(1, one) == math.copysign(1, two))


def nearest_f32(exact: Fraction) -> float:
    """The float32 next to a fraction, ties to the even one."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-INF)), guess, np.nextafter(guess, np.float32(INF))]
    distances = [abs(Fraction(float(x)) - exact) for x in around]
    best = [x for x, distance in zip(around, distances, strict=True) if distance == min(distances)]
    even = [x for x in best if struct.unpack("<I", struct.pack("<f", x))[0] % 2 == 0]
    return float(best[0] if len(best) == 1 else even[0])


def run(function: Any, *args: Any, threads: int = 32, blocks: int = 1, cluster: int = 1) -> None:
    simulator.launch(function, (blocks,), (threads,), args, cluster=cluster)


@of("ex2_approx_ftz")
def _ex2():
    for x in [*np.linspace(-130, 130, 500, dtype=np.float32), *(e for e in EDGES if e == e)]:
        exact = 2.0 ** float(x) if x < 1000 else INF
        result = float(arithmetic.ex2_approx_ftz(x))
        if exact < 2.0**-126:
            assert result == 0, x
        elif exact >= 2.0**128:
            assert result == INF, x
        else:
            assert abs(result - exact) <= exact * 2**-22, x
    assert math.isnan(arithmetic.ex2_approx_ftz(NAN))


@of("rcp_approx_ftz")
def _rcp():
    for x in [float(n) for n in NUMBERS if n] + [1.0, 3.0, -7.0, 2.0**125, 2.0**-126]:
        x = struct.unpack("<f", struct.pack("<f", x))[0]
        exact = 1 / x
        if abs(exact) >= 2.0**-126 and abs(x) >= 2.0**-126:
            assert abs(float(arithmetic.rcp_approx_ftz(x)) - exact) <= abs(exact) * 2**-23, x
    assert (
        arithmetic.rcp_approx_ftz(0.0) == INF
        and arithmetic.rcp_approx_ftz(-0.0) == -INF
        and arithmetic.rcp_approx_ftz(1e-45) == INF
    )
    assert (
        arithmetic.rcp_approx_ftz(INF) == 0
        and arithmetic.rcp_approx_ftz(3e38) == 0
        and math.isnan(arithmetic.rcp_approx_ftz(NAN))
    )


@of("lg2_approx")
def _lg2():
    for x in [abs(n) for n in NUMBERS if n] + [1e-45, 2.0**-126, 1.0, 2.0, 3.4e38]:
        exact = math.log2(struct.unpack("<f", struct.pack("<f", x))[0])
        assert abs(float(arithmetic.lg2_approx(x)) - exact) <= max(abs(exact), 1) * 2**-22, x
    assert (
        arithmetic.lg2_approx(0.0) == -INF and arithmetic.lg2_approx(-0.0) == -INF and arithmetic.lg2_approx(INF) == INF
    )
    assert math.isnan(arithmetic.lg2_approx(-1.0)) and math.isnan(arithmetic.lg2_approx(NAN))


@of("max_f32", "max_f64")
def _max():
    for larger in (arithmetic.max_f32, arithmetic.max_f64):
        for a in EDGES[:7]:
            for b in EDGES[:7]:
                # a number goes before a NaN, +0 is larger than -0
                numbers = sorted((x for x in (a, b) if x == x), key=lambda x: (x, math.copysign(1, x)))
                assert same(larger(a, b), numbers[-1] if numbers else NAN), (larger, a, b)
    assert float(arithmetic.max_f64(1.0, 1.0 + 2**-52)) == 1.0 + 2**-52


@of("max_nan_f32")
def _max_or_nan():
    for a in EDGES[:7]:
        for b in EDGES[:7]:
            assert same(arithmetic.max_nan_f32(a, b), NAN if a != a or b != b else arithmetic.max_f32(a, b)), (a, b)


@of("min_nan_f32")
def smaller_or_nan() -> None:
    for a in EDGES:
        for b in EDGES:
            assert same(arithmetic.min_nan_f32(a, b), NAN if a != a or b != b else -arithmetic.max_f32(-a, -b)), (a, b)


@of("largest_word", "smallest_word", "largest_unsigned_word")
def _order_of_words():
    for three in product(EDGES[:7], repeat=3):
        in_order = sorted(three, key=lambda x: struct.unpack("<i", struct.pack("<f", x)))
        assert same(arithmetic.largest_word(*three), in_order[-1]) and same(
            arithmetic.smallest_word(*three), in_order[0]
        ), three
        farthest = max(three, key=lambda x: struct.unpack("<I", struct.pack("<f", x)))
        assert same(arithmetic.largest_unsigned_word(*three), farthest), three


@of("mul_wide_u32")
def _all_bits_of_a_product():
    for a in (0, 1, 3, 2**16, 2**31 + 5, 2**32 - 1):
        for b in (0, 7, 0xD2511F53, 2**32 - 1):
            digits = sum((a >> n & 1) * (b << n) for n in range(32))
            assert arithmetic.mul_wide_u32(a, b) == digits


@of("mul_rn", "add_rn", "sub_rn")
def _rounded_once():
    for a, b in zip(NUMBERS, NUMBERS[7:] + EDGES[:3], strict=False):
        x, y = Fraction(a), Fraction(b)
        if abs(x * y) < 2**127:
            assert same(arithmetic.mul_rn(a, b), nearest_f32(x * y) if x * y else a * b), (a, b)
        assert same(arithmetic.add_rn(a, b), nearest_f32(x + y) if x + y else a + b), (a, b)
        assert same(arithmetic.sub_rn(a, b), nearest_f32(x - y) if x - y else a - b), (a, b)
    assert arithmetic.mul_rn(3e38, 2.0) == INF and arithmetic.add_rn(3e38, 3e38) == INF
    assert math.isnan(arithmetic.mul_rn(INF, 0.0)) and math.isnan(arithmetic.add_rn(INF, -INF))


@of("mul_rn_f64", "add_rn_f64", "sub_rn_f64")
def _doubles_rounded_once():
    """Python's division of fractions rounds once."""
    for a, b in zip(NUMBERS, NUMBERS[7:], strict=False):
        a, b = a / 3, b * 7  # more bits than a float32 has
        x, y = Fraction(a), Fraction(b)
        for result, exact in (
            (arithmetic.mul_rn_f64(a, b), x * y),
            (arithmetic.add_rn_f64(a, b), x + y),
            (arithmetic.sub_rn_f64(a, b), x - y),
        ):
            assert float(result) == exact.numerator / exact.denominator, (a, b)
    assert same(arithmetic.sub_rn_f64(-0.0, 0.0), -0.0) and same(arithmetic.sub_rn_f64(0.0, 0.0), 0.0)
    assert math.isnan(arithmetic.mul_rn_f64(INF, 0.0)) and math.isnan(arithmetic.sub_rn_f64(INF, INF))


@of("fma_rn")
def _fma():
    triples = list(zip(NUMBERS, NUMBERS[3:], NUMBERS[11:], strict=False))
    # 172961 * 97 / 2**24 is halfway between two floats: 2**-60 more decides, and no float64 holds it
    triples += [(172961.0, 97.0 * 2**-24, sign * 2.0**-60) for sign in (1, -1)]
    for a, b, c in triples:
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact and abs(exact) < 2**127:
            assert float(arithmetic.fma_rn(a, b, c)) == nearest_f32(exact), (a, b, c)


@of("bits_of_f32", "f32_of_bits")
def _bits():
    for x in NUMBERS + EDGES:
        bits = struct.unpack("<I", struct.pack("<f", x))[0]
        assert arithmetic.bits_of_f32(x) == bits and type(arithmetic.bits_of_f32(x)) is int
        assert same(arithmetic.f32_of_bits(bits), struct.unpack("<f", struct.pack("<I", bits))[0])


@of("opaque_i32")
def _opaque():
    for x in (0, -1, 7, np.int64(2**31 - 1), -(2**31)):
        assert arithmetic.opaque_i32(x) == x and type(arithmetic.opaque_i32(x)) is int


@of("recomputed_i32")
def _recomputed():
    for x in (0, 7, -1, 2**31 - 1):
        assert arithmetic.recomputed_i32(x) == x and type(arithmetic.recomputed_i32(x)) is int


@of("opaque_f32")
def _opaque_number():
    for x in NUMBERS + EDGES:
        assert same(arithmetic.opaque_f32(np.float32(x)), np.float32(x))


@of("bits_of_f64")
def _bits_of_doubles():
    for x in NUMBERS + EDGES:
        bits = arithmetic.bits_of_f64(x)
        assert bits == struct.unpack("<Q", struct.pack("<d", x))[0] and type(bits) is int


def bf16_bits(x: float) -> int:
    """Round half to even on the 32 bits; a NaN stays one."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return 0x7FC0 if x != x else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def f16_bits(x: float) -> int:
    try:
        return struct.unpack("<H", struct.pack("<e", x))[0]
    except OverflowError:
        return 0x7C00 if x > 0 else 0xFC00


def bf16_value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def f16_value(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


BF16_TIES = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.39e38]
F16_TIES = [1 + 2**-11, 1 + 3 * 2**-11, 65520.0, -65520.0, 2.0**-25, 3 * 2.0**-25, 2.0**-24]


@of("bf16_of_f32", "f32_of_bf16", "pack_bf16x2", "unpack_bf16x2")
def _bfloat16():
    _half(bf16_of_f32, f32_of_bf16, pack_bf16x2, unpack_bf16x2, bf16_bits, bf16_value, BF16_TIES)


@of("f16_of_f32", "f32_of_f16", "pack_f16x2", "unpack_f16x2")
def _float16():
    _half(f16_of_f32, f32_of_f16, pack_f16x2, unpack_f16x2, f16_bits, f16_value, F16_TIES)


@of("tf32_of_f32")
def _tf32():
    step = 2.0**-10
    for x, rounded in (
        (1 + 0.49 * step, 1),
        (1 + 0.5 * step, 1 + step),
        (-1 - 1.5 * step, -1 - 2 * step),
        (3.4025e38, INF),
    ):
        assert tf32_of_f32(np.float32(x)) == struct.unpack("<I", struct.pack("<f", rounded))[0]
    assert [tf32_of_f32(np.float32(x)) for x in (INF, -INF, -0.0)] == [0x7F800000, 0xFF800000, 0x80000000]
    assert tf32_of_f32(np.float32(NAN)) & 0x7FFFE000 > 0x7F800000


def _half(narrow: Any, widen: Any, pack: Any, unpack: Any, bits: Any, value: Any, ties: list[float]) -> None:
    numbers = NUMBERS + EDGES + ties
    for x in numbers:
        found = narrow(x)
        assert type(found) is int and (same(value(found), NAN) if x != x else found == bits(x)), x
    for low, high in pairwise(numbers):
        word = pack(low, high)
        assert type(word) is int
        assert same(value(word & 0xFFFF), value(bits(low))) and same(value(word >> 16), value(bits(high))), (low, high)
    for pattern in range(0, 1 << 16, 7):  # every exponent, every sign, NaNs and denormals
        assert same(widen(pattern), value(pattern)), pattern
        other = pattern * 40503 & 0xFFFF
        low, high = unpack(other << 16 | pattern)
        assert same(low, value(pattern)) and same(high, value(other)), (pattern, other)


def aligned(count: int, dtype: Any, offset: int = 0) -> np.ndarray:
    """`count` numbered elements that begin `offset` elements behind a multiple of 16 bytes."""
    raw = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 16 + offset * np.dtype(dtype).itemsize
    array = raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)
    array[:] = np.arange(1, count + 1)
    return array


@of("ld_global_v4_b32", "ld_global_once_v4_b32", "st_global_v4_b32", "st_global_kept_v4_b32")
def _words():
    for dtype, each in ((np.float32, 4), (np.uint16, 8)):
        x, y = aligned(32, dtype), aligned(32, dtype)
        words = struct.unpack("<4I", x[each : 2 * each].tobytes())
        for load in (memory.ld_global_v4_b32, memory.ld_global_once_v4_b32):
            assert load(Pointer(x, "x"), each, 1, 0) == words
            assert load(Pointer(x, "x"), 10**9, 0, 77) == (77,) * 4  # nothing is read
        for place, store in ((3, memory.st_global_v4_b32), (1, memory.st_global_kept_v4_b32)):
            store(Pointer(y, "y"), place * each, 1, *words)
            assert y[place * each : (place + 1) * each].tobytes() == struct.pack("<4I", *words)
            before = y.tobytes()
            store(Pointer(y, "y"), -(10**9), 0, 1, 2, 3, 4)
            assert y.tobytes() == before


@of("ld_global_b32", "fetch_global_b32")
def _word_of_what_is_read_alone():
    for dtype, each in ((np.float32, 1), (np.uint16, 2)):
        x = aligned(16, dtype)
        for place in range(8):
            for load in (memory.ld_global_b32, memory.fetch_global_b32):
                assert load(Pointer(x, "x"), place * each) == struct.unpack_from("<I", x.tobytes(), 4 * place)[0]


@of("ld_global_once_v2_b32", "st_global_v2_b32")
def _two_words():
    for dtype, each in ((np.float32, 2), (np.uint16, 4)):
        x, y = aligned(32, dtype), aligned(32, dtype)
        words = struct.unpack("<2I", x[each : 2 * each].tobytes())
        assert memory.ld_global_once_v2_b32(Pointer(x, "x"), each, 1, 0) == words
        assert memory.ld_global_once_v2_b32(Pointer(x, "x"), 10**9, 0, 77) == (77, 77)
        memory.st_global_v2_b32(Pointer(y, "y"), 3 * each, 1, *words)
        assert y[3 * each : 4 * each].tobytes() == struct.pack("<2I", *words)
        before = y.tobytes()
        memory.st_global_v2_b32(Pointer(y, "y"), -(10**9), 0, 1, 2)
        assert y.tobytes() == before


@of("ld_global_v2_f64", "ld_global_once_v2_f64", "st_global_v2_f64")
def _doubles():
    x, y = aligned(8, np.float64), aligned(8, np.float64)
    for load in (memory.ld_global_v2_f64, memory.ld_global_once_v2_f64):
        assert load(Pointer(x, "x"), 2, 1, 0.0) == (3.0, 4.0)
        assert load(Pointer(x, "x"), 10**9, 0, -INF) == (-INF, -INF)
    memory.st_global_v2_f64(Pointer(y, "y"), 4, 1, 0.5, -0.5)
    memory.st_global_v2_f64(Pointer(y, "y"), 10**9, 0, 9.0, 9.0)
    assert y.tolist() == [1, 2, 3, 4, 0.5, -0.5, 7, 8]


@of("ld_shared_v4_f32", "ld_shared_v2_f32", "ld_shared_v2_f64", "ld_shared_v4_b32", "ld_shared_b32")
def _shared():
    for dtype, each in ((np.float32, 4), (np.uint16, 8)):
        shared = aligned(16, dtype)
        words = struct.unpack("<4I", shared[each : 2 * each].tobytes())
        assert memory.ld_shared_v4_b32(Pointer(shared, "s"), each) == words
        assert memory.ld_shared_b32(Pointer(shared, "s"), each + each // 4) == words[1]
    assert memory.ld_shared_v4_f32(Pointer(aligned(8, np.float32), "s"), 4) == (5, 6, 7, 8)
    assert memory.ld_shared_v2_f64(Pointer(aligned(8, np.float64), "s"), 6) == (7, 8)
    assert memory.ld_shared_v2_f32(Pointer(aligned(8, np.float32), "s"), 6) == (7, 8)
    assert memory.ld_shared_v2_f32(Pointer(aligned(8, np.float32).view(np.uint8), "s"), 8) == (3, 4)


@of("st_shared_v4_b32")
def _shared_words():
    shared = aligned(32, np.uint8)
    memory.st_shared_v4_b32(Pointer(shared, "s"), 16, 1, 0x12345678, 3, 2**32 - 1)
    assert shared[16:].view(np.uint32).tolist() == [1, 0x12345678, 3, 2**32 - 1]
    assert shared[:16].tolist() == [*range(1, 17)]
    with pytest.raises(IndexError, match="not aligned to 16 bytes"):
        memory.st_shared_v4_b32(Pointer(shared, "s"), 8, 0, 0, 0, 0)


@of("st_shared_f32", "st_shared_f64", "st_shared_v2_f32", "st_shared_v4_f32", "st_shared_v2_f64", "st_shared_b32")
def _shared_stores():
    floats, doubles = aligned(12, np.float32), aligned(8, np.float64)
    memory.st_shared_v4_f32(Pointer(floats, "s"), 4, 0.5, -2.0, INF, 2.0**-149)
    assert floats.tolist() == [1, 2, 3, 4, 0.5, -2, INF, 2.0**-149, 9, 10, 11, 12]
    memory.st_shared_v2_f64(Pointer(doubles, "s"), 2, 0.1, -2.0)
    assert doubles.tolist() == [1, 2, 0.1, -2, 5, 6, 7, 8]
    memory.st_shared_f32(Pointer(floats, "s"), 3, 0.25)
    memory.st_shared_f64(Pointer(doubles, "s"), 7, 0.3)
    assert floats[2:5].tolist() == [3, 0.25, 0.5] and doubles[6:].tolist() == [7, 0.3]
    memory.st_shared_v2_f32(Pointer(floats, "s"), 8, -0.5, NAN)
    assert floats[7:9].tolist() == [2.0**-149, -0.5] and np.isnan(floats[9]) and floats[10] == 11
    in_bytes = aligned(16, np.uint8)
    memory.st_shared_v2_f32(Pointer(in_bytes, "s"), 8, -0.5, 2.5)
    assert in_bytes[8:].view(np.float32).tolist() == [-0.5, 2.5] and in_bytes[:8].tolist() == [*range(1, 9)]
    halves, words = aligned(4, np.uint16), aligned(2, np.uint32)
    memory.st_shared_b32(Pointer(halves, "s"), 2, 0x12345678)
    memory.st_shared_b32(Pointer(words, "s"), 1, 0x12345678)
    assert halves.tolist() == [1, 2, 0x5678, 0x1234] and words.tolist() == [1, 0x12345678]
    with pytest.raises(IndexError, match="not aligned to 4 bytes"):
        memory.st_shared_b32(Pointer(halves, "s"), 1, 0)


@of("cluster_ctarank", "barrier_cluster_arrive", "barrier_cluster_arrive_relaxed", "barrier_cluster_wait")
def _cluster():
    for arrive in (warp.barrier_cluster_arrive, warp.barrier_cluster_arrive_relaxed):
        came = []

        def kernel(ranks, seen, arrive=arrive, came=came):
            ranks[cuda.blockIdx.x] = warp.cluster_ctarank()
            came.append(cuda.blockIdx.x // 3)
            arrive()
            warp.barrier_cluster_wait()
            seen[32 * cuda.blockIdx.x + cuda.threadIdx.x] = came.count(cuda.blockIdx.x // 3)

        ranks, seen = np.zeros(6, int), np.zeros(192, int)
        run(kernel, Pointer(ranks, "ranks"), Pointer(seen, "seen"), blocks=6, cluster=3)
        assert ranks.tolist() == [0, 1, 2, 0, 1, 2]
        assert (seen == 96).all()  # nobody goes on before all threads of the three blocks have come


@of("settle")
def _settle() -> None:
    def kernel(y):
        arithmetic.settle(y[0])

    for value in (0.0, 3.0, -1.0, INF, NAN):
        run(kernel, Pointer(np.full(1, value, np.float32), "y"))
    with pytest.raises(RuntimeError, match=r"settle: -2\.0, expected nothing below 0"):
        run(kernel, Pointer(np.full(1, -2, np.float32), "y"))


@of("settle_bits")
def _settle_bits() -> None:
    for bits in (0, 0xFFFFFFFF):
        arithmetic.settle_bits(bits)
    with pytest.raises(RuntimeError, match="settle_bits: -1, expected 32 bits"):
        arithmetic.settle_bits(-1)


@of("atom_add_i64")
def _counted() -> None:
    def kernel(y):
        y[1 + memory.atom_add_i64(y, 0, 1)] = cuda.threadIdx.x

    y = np.zeros(33, np.int64)
    run(kernel, Pointer(y, "y"))
    assert y[0] == 32 and sorted(y[1:]) == [*range(32)]


@of("wait_for_i64", "st_release_i64")
def _one_block_after_another() -> None:
    def kernel(y):
        if cuda.threadIdx.x == 0:
            memory.wait_for_i64(y, 1, 40 + cuda.blockIdx.x)
            y[0] = 10 * y[0] + cuda.blockIdx.x
            memory.st_release_i64(y, 1, 41 + cuda.blockIdx.x)

    y = np.array([7, 40], np.int64)
    run(kernel, Pointer(y, "y"), blocks=3)
    assert y.tolist() == [7012, 43]
    with pytest.raises(RuntimeError, match=r"wait for 40 in y\[1\], which is 43: no block is left"):
        run(kernel, Pointer(y, "y"))


@of("shfl_idx_i32", "shfl_idx_f32", "shfl_idx_f64")
def _broadcast() -> None:
    for shuffle in (warp.shfl_idx_f32, warp.shfl_idx_f64):

        def kernel(y, shuffle=shuffle):
            tid = cuda.threadIdx.x
            y[tid] = warp.shfl_idx_i32(tid, 3, 0xFFFFFFFF) + shuffle(tid + 0.5, 5, 0xFFFFFFFF)

        y = np.zeros(64)
        run(kernel, Pointer(y, "y"), threads=64)
        assert y.tolist() == [8.5] * 32 + [72.5] * 32

    def whole(y):
        y[cuda.threadIdx.x] = warp.shfl_idx_f64(cuda.threadIdx.x + 2.0**-40, 1, 0xFFFFFFFF)

    y = np.zeros(32)
    run(whole, Pointer(y, "y"))
    assert y.tolist() == [1 + 2.0**-40] * 32  # both words of it

    def absent(y):
        if cuda.threadIdx.x < 16:
            warp.shfl_idx_i32(1, 20, 0x0000FFFF)

    with pytest.raises(RuntimeError, match=r"shfl\.sync\.idx: lane \d+ reads lane 20, which is not in 0x0000ffff"):
        run(absent, Pointer(y, "y"))


@of("vote_any")
def _vote_any() -> None:
    def votes(y):
        tid = cuda.threadIdx.x
        y[tid] = (
            warp.vote_any(tid == 7, 0xFFFFFFFF) + 2 * warp.vote_any(0, 0xFFFFFFFF) + 4 * warp.vote_any(-1, 0xFFFFFFFF)
        )

    y = np.zeros(32)
    run(votes, y, threads=32)
    assert (y == 5).all()


@of("at_least_15_bits")
def _at_least_15_bits() -> None:
    rng = np.random.default_rng(0)
    ends = [0, 1, 0x3FF, 0x7BFF, 0x7C00, 0x7C01, 0x7FFF]  # denormals, the largest number, infinity, NaN
    halves = [*ends, *(0x8000 + end for end in ends), *rng.integers(0, 2**16, 50).tolist()]
    for bound in (0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00):
        for low, high in zip(halves, reversed(halves)):
            expected = 0xFFFF * (low % 0x8000 >= bound) + 0xFFFF0000 * (high % 0x8000 >= 5)
            assert arithmetic.at_least_15_bits(low | high << 16, bound | 5 << 16) == expected
    with pytest.raises(ValueError, match="bound 0x7c01, expected at most 0x7c00"):
        arithmetic.at_least_15_bits(0, 0x7C01)


@of("vote_ballot")
def _vote_ballot() -> None:
    def votes(y):
        tid = cuda.threadIdx.x
        y[tid] = warp.vote_ballot(tid % 3 - 1, 0xFFFFFFFF)

    y = np.zeros(64, np.uint32)
    run(votes, y, threads=64)
    expected = [sum(1 << lane for lane in range(32) if (first + lane) % 3 != 1) for first in (0, 32)]
    assert y.tolist() == [expected[0]] * 32 + [expected[1]] * 32


@of("shfl_bfly_f32", "shfl_bfly_f64")
def _shuffle():
    for shuffle in (warp.shfl_bfly_f32, warp.shfl_bfly_f64):
        for distance in (1, 2, 4, 8, 16, 5, 31):

            def kernel(y, shuffle=shuffle, distance=distance):
                tid = cuda.threadIdx.x
                y[tid] = shuffle(tid + 0.5, distance, 0xFFFFFFFF)

            y = np.zeros(64)
            run(kernel, Pointer(y, "y"), threads=64)
            assert y.tolist() == [32 * (t // 32) + (t % 32 ^ distance) + 0.5 for t in range(64)]

        def half(y, shuffle=shuffle):
            tid = cuda.threadIdx.x
            if tid < 16:
                y[tid] = shuffle(tid, 8, 0x0000FFFF)

        y = np.zeros(16)
        run(half, Pointer(y, "y"))
        assert y.tolist() == [t ^ 8 for t in range(16)]
