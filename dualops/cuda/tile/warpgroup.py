"""Products by a warpgroup of tiles in the stages of a pipeline (sm_90a).

    mma = warpgroup_mma("bfloat16", a, b)           acc [64, b's rows] += A @ B, out of shared memory
    acc = mma.fragment()
    mma.start(acc, smem, a_at, b_at, part)          acc = A @ B
    mma.add(acc, smem, a_at, b_at, part)            acc += A @ B; runs beside the threads
    mma.wait_but_one(acc)                           all but the latest are over
    mma.wait(acc)

Element e of a thread's accumulators is where `fragment.accumulator` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, f32, i32, u32, u64, verb
from ..ptx.arithmetic import anew_i32
from ..ptx.memory import shared_address
from ..ptx.warp import shfl_idx_i32
from ..ptx.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_rs, wgmma_tf32, wgmma_wait_group
from .rows import FULL_WARP
from .swizzle import Operand, descriptor
from .unrolled import one_after_another

ROWS = 64  # of the result, a warpgroup
STEPS = 8  # of which a loop is left to the compiler: of a longer one it indexes the accumulators
KEPT_STEPS = 12  # whose descriptors uniform registers hold from product to product
INSTRUCTION_TYPES = {"bfloat16": "bf16", "float16": "f16"}


class WarpgroupMma(Namespace):
    """acc [64, n] of A's rows: the 64 from 64 * `part` on."""

    size: int  # accumulators of a thread
    fragment: Callable[..., Any]  # () -> a local array for them
    start: Callable[..., None]  # (acc, smem, a_at, b_at, part): acc = A @ B
    add: Callable[..., None]  # (acc, smem, a_at, b_at, part): acc += A @ B
    wait: Callable[..., None]  # (acc)
    wait_but_one: Callable[..., None]  # (acc)


class RegisterMma(Namespace):
    """acc [64, n] += A @ B, A's 64 rows in the warpgroup's registers: `words` of 16-bit pairs, as accumulators lie."""

    size: int  # accumulators of a thread
    words: int  # of A that a thread has
    fragment: Callable[..., Any]  # () -> a local array for acc
    left: Callable[..., Any]  # () -> a local array for A
    add: Callable[..., None]  # (acc, a, smem, b_at, adds): acc += A @ B, or acc = A @ B where `adds` is 0
    wait: Callable[..., None]  # (acc): until then neither acc nor A may be touched
    wait_but_one: Callable[..., None]  # (acc): the same where one product was started since


@verb
def my_warpgroup():
    """The number of this thread's warpgroup, known to the assembler as the same for all lanes."""
    return shfl_idx_i32(i32(cuda.threadIdx.x // 128), 0, FULL_WARP)


def parts_multiplied(steps: int) -> list[tuple[int, int]]:
    """Of lines of parts, which steps of a meet which of b: of each four steps two are upper parts, two lower ones."""
    upper = [step for step in range(steps) if step % 4 < 2]
    lower = [step + 2 for step in upper]
    return [*zip(lower, upper), *zip(upper, lower), *zip(upper, upper)]


@cache
def warpgroup_mma(dtype: str, a: Operand, b: Operand, parts: bool = False) -> WarpgroupMma:
    """Of tiles of "bfloat16" or "float16", or of "float32", which is multiplied as tf32.

    parts: 128 bytes of a line are the upper parts of 16 numbers and the lower ones of these (`tf32`), and the product
    is that of the numbers without lower times lower. What is small comes first: added to a large sum it would cost it
    as many roundings again, twice.
    """
    n = b.lines if b.major == "k" else b.width
    size = n // 2
    multiply = wgmma_tf32(n) if dtype == "float32" else wgmma(n, INSTRUCTION_TYPES[dtype], a.major, b.major)
    wait_group = wgmma_wait_group(n)
    pairs = parts_multiplied(b.steps) if parts else [(step, step) for step in range(b.steps)]
    a_bits, b_bits, steps = a.bits, b.bits, len(pairs)
    a_advance, b_advance = tuple(a.advance[of_a] for of_a, _ in pairs), tuple(b.advance[of_b] for _, of_b in pairs)
    part_step = a.rows(ROWS) if (a.lines if a.major == "k" else a.width) > ROWS else 0

    @verb
    def fragment():
        return cuda.local.array(size, f32)

    def some_steps(first: int, end: int) -> Callable[..., None]:
        @verb
        def multiply_some(acc, a_first, b_first, adds):
            for step in range(first, end):
                multiply(acc, a_first + u64(a_advance[step]), b_first + u64(b_advance[step]), i32(adds or step > 0))

        return multiply_some

    multiply_all = one_after_another([some_steps(n, min(n + STEPS, steps)) for n in range(0, steps, STEPS)])

    @verb
    def issue(acc, smem, a_at, b_at, part, adds):
        wgmma_fence()
        if steps > KEPT_STEPS:
            part = anew_i32(part)
        a_first = descriptor(shared_address(smem, a_at), a_bits) + u64(u32(part) * u32(part_step))
        b_first = descriptor(shared_address(smem, b_at), b_bits)
        multiply_all(acc, a_first, b_first, adds)
        wgmma_commit()

    @verb
    def start(acc, smem, a_at, b_at, part):
        issue(acc, smem, a_at, b_at, part, False)

    @verb
    def add(acc, smem, a_at, b_at, part):
        issue(acc, smem, a_at, b_at, part, True)

    @verb
    def wait(acc):
        wait_group(acc, 0)

    @verb
    def wait_but_one(acc):
        wait_group(acc, 1)

    return WarpgroupMma(size=size, fragment=fragment, start=start, add=add, wait=wait, wait_but_one=wait_but_one)


@cache
def register_mma(dtype: str, b: Operand) -> RegisterMma:
    """Of "bfloat16" or "float16"."""
    n = b.lines if b.major == "k" else b.width
    size, steps, words = n // 2, b.steps, 4 * b.steps
    multiply, wait_group = wgmma_rs(n, INSTRUCTION_TYPES[dtype], b.major), wgmma_wait_group(n)
    b_bits, b_advance = b.bits, b.advance

    @verb
    def fragment():
        return cuda.local.array(size, f32)

    @verb
    def left():
        return cuda.local.array(words, u32)

    @verb
    def add(acc, a, smem, b_at, adds):
        wgmma_fence()
        b_first = descriptor(shared_address(smem, b_at), b_bits)
        for step in range(steps):
            multiply(acc, a, 4 * step, b_first + u64(b_advance[step]), i32(adds or step > 0))
        wgmma_commit()

    @verb
    def wait(acc):
        wait_group(acc, 0)

    @verb
    def wait_but_one(acc):
        wait_group(acc, 1)

    return RegisterMma(
        size=size, words=words, fragment=fragment, left=left, add=add, wait=wait, wait_but_one=wait_but_one
    )
