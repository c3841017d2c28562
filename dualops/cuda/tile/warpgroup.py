"""A warpgroup's products of tiles in the stages of a pipeline (sm_90a).

    mma = warpgroup_mma("bfloat16", a, b)           acc [64, b's rows] += A @ B, from shared memory
    acc = mma.fragment()
    mma.start(acc, smem, a_at, b_at, part)          acc = A @ B
    mma.add(acc, smem, a_at, b_at, part)            acc += A @ B; asynchronous
    mma.wait_but_one(acc)                           until all but the latest have ended; wait_but(acc, N): the latest N
    mma.wait(acc)

A descriptor consists of an address and constants. It is computed from smem for each product. With `from_base`, the
argument of verbs is `base_of(smem)` instead of smem: it is computed once and stays in a register of the warp.

`fragment.accumulator` gives row and column of element e of a thread's accumulators.
"""

from __future__ import annotations

from collections.abc import Callable

from ..compiler.backend import Members, Noun, cuda, f32, i32, kept_noun, members, u32, u64, verb
from ..ptx.arithmetic import recomputed_i32
from ..ptx.memory import shared_address
from ..ptx.warp import shfl_idx_i32
from ..ptx.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_rs, wgmma_tf32, wgmma_wait_group
from .rows import FULL_WARP
from .split_bf16x3 import PART_PAIRS, PARTS
from .swizzle import Operand, descriptor
from .unrolled import local_array, one_after_another

ROWS = 64  # rows of the result per warpgroup
STEPS = 8  # the compiler unrolls a loop of this many steps; in a longer one it would index the accumulators
KEPT_STEPS = 12  # most steps whose descriptors stay in uniform registers from product to product
LOW = (1 << 32) - 1  # bits of a descriptor: the address, and the numbers that are added to it
INSTRUCTION_TYPES = {"bfloat16": "bf16", "float16": "f16"}


WarpgroupMma = Noun  # what `warpgroup_mma` makes


RegisterMma = Noun  # what `register_mma` makes


@verb
def my_warpgroup():
    """Return the number of this thread's warpgroup. The assembler knows that it is the same for all lanes."""
    return shfl_idx_i32(i32(u32(cuda.threadIdx.x) // u32(128)), 0, FULL_WARP)


@verb
def base_of(smem):
    """Return the start of shared memory, in a descriptor's units. The assembler knows that all lanes have the same."""
    return u32(shfl_idx_i32(i32(descriptor(shared_address(smem, 0), 0)), 0, FULL_WARP))


@verb
def _of_base(base, at, bits):
    return u64(bits >> 32) << u64(32) | u64(u32(base + u32(bits & LOW) + (u32(at) >> u32(4))))


@verb
def _of_memory(smem, at, bits):
    return descriptor(shared_address(smem, at), bits)


def parts_multiplied(steps: int) -> list[tuple[int, int]]:
    """Return the pairs of steps of A and B that are multiplied. Of each four steps, two are upper parts, two lower
    parts."""
    upper = [step for step in range(steps) if step % 4 < 2]
    lower = [step + 2 for step in upper]
    return [*zip(lower, upper), *zip(upper, lower), *zip(upper, upper)]


def thirds_multiplied(steps: int) -> list[tuple[int, int]]:
    """Return the pairs of steps of A and B that are multiplied, for lines whose parts are thirds of the line."""
    third = steps // PARTS
    return [(of_a * third + step, of_b * third + step) for of_a, of_b in PART_PAIRS for step in range(third)]


@kept_noun
def warpgroup_mma(dtype: str, a: Operand, b: Operand, parts: bool = False, *, from_base: bool = False) -> Members:
    """The verbs for acc [64, n], the product of A's 64 rows from 64 * `part` on.

    Tiles are "bfloat16" or "float16", or "float32", which is multiplied as tf32.

    parts: 128 bytes of a line are the upper parts of 16 numbers, and then their lower parts (`tf32`). The product is
    that of the numbers, without lower times lower. Small products come first: added to a large sum, each would cost
    another rounding of the large sum. For "bfloat16", a line has all upper parts, then all middle and all lower parts
    (`split_bf16x3`).
    """
    n = b.lines if b.major == "k" else b.width
    size = n // 2
    multiply = wgmma_tf32(n) if dtype == "float32" else wgmma(n, INSTRUCTION_TYPES[dtype], a.major, b.major)
    wait_group = wgmma_wait_group(n)
    multiplied = parts_multiplied if dtype == "float32" else thirds_multiplied
    pairs = multiplied(b.steps) if parts else [(step, step) for step in range(b.steps)]
    a_bits, b_bits, steps = a.bits, b.bits, len(pairs)
    first_of = _of_base if from_base else _of_memory
    part_step = a.rows(ROWS) if (a.lines if a.major == "k" else a.width) > ROWS else 0

    def some_steps(first: int) -> Callable[..., None]:
        some = pairs[first : first + STEPS]
        a_advance, b_advance = tuple(a.advance[of_a] for of_a, _ in some), tuple(b.advance[of_b] for _, of_b in some)
        COUNT = len(some)

        @verb
        def multiply_some(acc, a_first, b_first, adds):
            for step in range(COUNT):
                add = i32(adds or first + step > 0)
                multiply(acc, a_first + u64(a_advance[step]), b_first + u64(b_advance[step]), add)

        return multiply_some

    multiply_all = one_after_another([some_steps(first) for first in range(0, steps, STEPS)])

    @verb
    def _issue(acc, smem, a_at, b_at, part, adds):
        wgmma_fence()
        if steps > KEPT_STEPS:
            part = recomputed_i32(part)
        a_first = first_of(smem, a_at, a_bits) + u64(u32(part) * u32(part_step))
        b_first = first_of(smem, b_at, b_bits)
        multiply_all(acc, a_first, b_first, adds)
        wgmma_commit()

    @verb
    def start(acc, smem, a_at, b_at, part):
        """Start acc = A @ B."""
        _issue(acc, smem, a_at, b_at, part, False)

    @verb
    def add(acc, smem, a_at, b_at, part):
        """Start acc += A @ B."""
        _issue(acc, smem, a_at, b_at, part, True)

    @verb
    def wait(acc):
        wait_group(acc, 0)

    @verb
    def wait_but_one(acc):
        wait_group(acc, 1)

    @verb
    def wait_but(acc, count):
        """Wait for all but the latest `count` products, a constant."""
        wait_group(acc, count)

    return members(
        locals(),
        size=size,  # accumulators of a thread
        fragment=local_array(size, f32),  # () -> acc
    )


@kept_noun
def register_mma(
    dtype: str, b: Operand, parts: bool = False, some: tuple[int, ...] | None = None, *, from_base: bool = False
) -> Members:
    """The verbs for acc [64, n] += A @ B with A in registers: `words` of 16-bit pairs, in the accumulators' layout.

    dtype: "bfloat16" or "float16". parts: B's columns have the upper parts, then the middle, then the lower ones
    (`split_bf16x3`); A's words have the same order. Then `sums` are the sums of one product, and threads add them to
    acc, because tensor cores round toward zero. some: the steps of B that the steps of A multiply, in order; by
    default all steps.
    """
    n = (b.lines if b.major == "k" else b.width) // (PARTS if parts else 1)
    steps = tuple(range(b.steps)) if some is None else some
    size, words = n // 2, 4 * len(steps) * (PARTS if parts else 1)
    multiply, wait_group = wgmma_rs(n, INSTRUCTION_TYPES[dtype], b.major), wgmma_wait_group(n)
    pairs = PART_PAIRS if parts else ((0, 0),)
    places = [
        (4 * (of_a * len(steps) + place), b.rows(of_b * n) + b.advance[step])
        for of_a, of_b in pairs
        for place, step in enumerate(steps)
    ]
    b_bits, ZERO, first_of = b.bits, f32(0), _of_base if from_base else _of_memory

    def some_steps(first: int) -> Callable[..., None]:
        a_places, b_places = zip(*places[first : first + STEPS])
        COUNT = len(a_places)

        @verb
        def multiply_some(sums, a, b_first, adds):
            for step in range(COUNT):
                multiply(sums, a, a_places[step], b_first + u64(b_places[step]), i32(adds or first + step > 0))

        return multiply_some

    multiply_all = one_after_another([some_steps(first) for first in range(0, len(places), STEPS)])

    @verb
    def add(sums, a, smem, b_at, adds):
        """Start sums += A @ B, or sums = A @ B if `adds` is 0 or A is in parts."""
        wgmma_fence()
        multiply_all(sums, a, first_of(smem, b_at, b_bits), i32(0) if parts else adds)
        wgmma_commit()

    @verb
    def wait(sums):
        """Wait for the products. Until then the kernel must not access sums or A."""
        wait_group(sums, 0)

    @verb
    def wait_but_one(sums):
        """Wait for all products but the latest one."""
        wait_group(sums, 1)

    @verb
    def _same(acc):
        return acc

    @verb
    def _nothing(acc, sums):
        pass

    @verb
    def _apart(acc):
        for e in range(size):
            acc[e] = ZERO
        return cuda.local.array(size, f32)

    @verb
    def _collect(acc, sums):
        for e in range(size):
            acc[e] += sums[e]

    @verb
    def _finish(acc, sums):
        wait_group(sums, 0)
        _collect(acc, sums)

    return members(
        locals(),
        size=size,  # accumulators of a thread
        fragment=local_array(size, f32),  # () -> acc
        words=words,  # of A that a thread has
        left=local_array(words, u32),  # () -> A
        # (acc) -> the array in which products are summed: acc; for parts another one, and acc becomes 0
        sums=_apart if parts else _same,
        collect=_collect if parts else _nothing,  # (acc, sums): for parts acc += sums
        finish=_finish if parts else _nothing,  # (acc, sums): for parts wait, then acc += sums
    )
