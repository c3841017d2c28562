"""Asynchronous products of the four warps of a warpgroup, from shared memory (sm_90a).

acc [64, n] += A [64, K] @ B [K, n], where K is 32 bytes. A thread writes its registers, fences, issues products,
commits them as a group and waits for the group:

    mma, wait = wgmma(BLOCK_N, "bf16"), wgmma_wait_group(BLOCK_N)
    wgmma_fence()
    mma(acc, a_desc, b_desc, 0)
    wgmma_commit()
    wait(acc, 0)

A wait has the accumulators as an operand, because otherwise the compiler may read them before it. Several products with
different accumulators need one wait each. Shared memory that threads wrote needs `fence_proxy_async` and a barrier
before a product reads it. Layouts of operands and their descriptors: `tile.swizzle`. Layouts in registers:
`tile.fragment`. `simulator.warpgroup` describes how the twins delay products.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from ..simulator import Late, added_at_once, current, products, rounded_sums, swizzled
from .asm import family, instruction

WIDTHS = range(8, 257, 8)
MAJORS = ("k", "mn")
NUMBERS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32}
SPANS = {0: 16, 1: 128, 2: 64, 3: 32}  # a descriptor's uppermost bits -> bytes of the swizzle
ROW = 32  # bytes of a row of A


@instruction("() -> void", "wgmma.fence.sync.aligned;", section="9.7.15.7.1", convergent=True)
def wgmma_fence():
    """Order accesses to registers before the products that use them; needed before the first product and after each
    wait."""
    products().fence()


@instruction("() -> void", "wgmma.commit_group.sync.aligned;", section="9.7.15.7.2", convergent=True)
def wgmma_commit():
    """Put the products that are in no group yet into a new group, which may be empty."""
    products().commit()


@family(n=WIDTHS)
def wgmma_wait_group(n):
    """Wait for all groups except the latest `pending`. `acc`: accumulators of n columns, valid if their group has
    ended."""

    @instruction(
        f"(+f32[{n // 2}], imm[0..7]) -> void",
        "wgmma.wait_group.sync.aligned {pending};",
        section="9.7.15.7.3",
        convergent=True,
        name=f"wgmma_wait_group_n{n}",
    )
    def wait(acc, pending):
        """Wait for the products of a warpgroup."""
        products().wait(acc, n // 2, pending)

    return wait


@family(n=WIDTHS, dtype=("bf16", "f16"), a_major=MAJORS, b_major=MAJORS)
def wgmma(n, dtype, a_major="k", b_major="k"):
    """acc [64, n] (+)= A [64, 16] @ B [16, n], both in shared memory; major: the factor's contiguous axis."""
    return _from_shared(n, dtype, a_major, b_major)


@family(n=WIDTHS, dtype=("bf16", "f16"), b_major=MAJORS)
def wgmma_rs(n, dtype, b_major="k"):
    """acc [64, n] (+)= A [64, 16] @ B [16, n], A in registers, two numbers per word."""
    shape, text = _shape(n, dtype)

    @instruction(
        f"(+f32[{n // 2}], u32[4][i32], u64, i32) -> void",
        text % ("{a}", f", {b_major == 'mn':d}"),
        section="9.7.15.5.2",
        convergent=True,
        name=f"wgmma_rs_{shape.replace('.', '_')}_{b_major}",
    )
    def product(acc, a, a_index, b_desc, scale_d):
        """Start the product. scale_d: 0 for a product that ignores the old acc."""
        b_desc = int(b_desc)

        def begin():
            b = _operand(b_desc, dtype, b_major, n)
            return lambda warp, words, old: _multiply(_left(words, dtype), b(slice(None)), old)

        products().issue(shape, (b_desc, int(scale_d)), begin, acc, n // 2, bool(scale_d), (a, int(a_index)))

    return product


@family(n=WIDTHS)
def wgmma_tf32(n):
    """acc [64, n] (+)= A [64, 8] @ B [8, n], float32 whose lowest 13 bits are ignored, contiguous along K."""
    return _from_shared(n, "tf32")


def _shape(n, dtype):
    """Return the beginning of the text, up to the accumulators."""
    depth = ROW // np.dtype(NUMBERS[dtype]).itemsize
    shape = f"m64n{n}k{depth}.f32.{dtype}.{dtype}"
    return shape, (
        f"{{ .reg .pred p; setp.ne.b32 p, {{scale_d}}, 0; wgmma.mma_async.sync.aligned.{shape} {{acc}}, "
        f"%s, {{b_desc}}, p, 1, 1%s; }}"
    )


def _from_shared(n, dtype, a_major="k", b_major="k"):
    shape, text = _shape(n, dtype)
    majors = "" if dtype == "tf32" else f", {a_major == 'mn':d}, {b_major == 'mn':d}"

    @instruction(
        f"(+f32[{n // 2}], u64, u64, i32) -> void",
        text % ("{a_desc}", majors),
        section="9.7.15.5.2",
        convergent=True,
        name=f"wgmma_{shape.replace('.', '_')}" + (f"_{a_major}_{b_major}" if majors else ""),
    )
    def product(acc, a_desc, b_desc, scale_d):
        """Start the product. scale_d: 0 for a product that ignores the old acc."""
        a_desc, b_desc = int(a_desc), int(b_desc)

        def begin():
            a = _operand(a_desc, dtype, a_major, 64)
            b = _operand(b_desc, dtype, b_major, n)
            return lambda warp, words, old: _multiply(a(slice(16 * warp, 16 * warp + 16)), b(slice(None)), old)

        products().issue(shape, (a_desc, b_desc, int(scale_d)), begin, acc, n // 2, bool(scale_d), None)

    return product


# --- what the tensor cores do ----------------------------------------------------------------------------


def _multiply(left, right, old):
    """Return the registers [32, n / 2] of left [16, K] @ right [n, K].T + old."""
    n = len(right)
    for some in added_at_once(left.shape[1]):
        total = left[:, some] @ right[:, some].T
        # rows are half, line; columns are block of eight, quad, pair
        parts = total.reshape(2, 8, n // 8, 4, 2).transpose(1, 3, 2, 0, 4).reshape(32, n // 2)
        old = rounded_sums(parts if old is None else parts + old)
    return old


def _left(words, dtype):
    """Return A [16, K] from the words of a warp's threads."""
    parts = _numbers(np.array(words, np.uint32), dtype).reshape(8, 4, 2, 2, 2)  # line, quad, half of K, half of M
    return parts.transpose(3, 0, 2, 1, 4).reshape(16, 16)


def _numbers(data, dtype):
    if dtype == "tf32":
        data = data.view(np.uint32) & 0xFFFFE000
    return data.view(NUMBERS[dtype]).astype(np.float64)


def _operand(descriptor, dtype, major, count):
    """Begin to read `count` rows of A, or columns of B. Return the function that ends the read of some: [some, K]."""
    span = SPANS[descriptor >> 62]
    start = (descriptor & 0x3FFF) << 4
    if descriptor >> 49 & 7:
        raise NotImplementedError(
            f"wgmma: descriptor {descriptor:#x} with a base offset, expected patterns that begin at 0"
        )
    if span > 16 and start % (8 * span) >= span:
        reason = f"a swizzle of {span} bytes repeats every {8 * span}, and a matrix begins in the first row"
        raise RuntimeError(f"wgmma: a matrix begins at shared address {start:#x}: {reason}")
    offsets = _offsets(span, descriptor >> 16 & 0x3FFF, descriptor >> 32 & 0x3FFF, dtype, major, count)
    late = Late(current().block.memory, swizzled(start + offsets, span))
    return lambda part: _numbers(late.read(part), dtype)


@cache
def _offsets(span, leading, stride, dtype, major, count):
    """Return byte offsets [count, 32] from a matrix's start, before the swizzle: canonical layouts, 9.7.15.5.1.2.1.3.

    leading, stride: distances of the descriptor, in units of 16 bytes.
    """
    leading, stride = 16 * leading, 16 * stride
    line, byte = np.arange(count)[:, None], np.arange(ROW)
    if major == "k":
        next_16 = leading if span == 16 else 16
        return line % 8 * span + line // 8 * stride + byte // 16 * next_16 + byte % 16
    itemsize = np.dtype(NUMBERS[dtype]).itemsize
    k, along = byte // itemsize, line * itemsize
    next_8, next_span = (leading, stride) if span == 16 else (stride, leading)
    return along // span * next_span + along % span + k % 8 * span + k // 8 * next_8 + byte % itemsize
