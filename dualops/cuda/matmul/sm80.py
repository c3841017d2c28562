"""matmul on tensor cores, by mma.sync: any layout and strides, on Ampere and later.

The arithmetic of CUDA cores limits simt. Here one instruction of a warp makes a tensor core multiply [16, 16] by
[16, 8], so the loads of factors become the limit. So several slices are in flight to shared memory at any time, by
cp.async, which bypasses the registers, into a ring of stages.

    1  start copies of slices 0 .. STAGES - 2 of a [BLOCK_M, BLOCK_K] and of b [BLOCK_K, BLOCK_N]
    2  for each slice t:
    3      for each 16 steps of the slice:
    4          a_frag [WARP_M, 16], b_frag [16, WARP_N] of the next 16 steps to registers
    5          in the first ones: start to copy a part of slice t + STAGES - 1, to the stage of slice t - 1
    6          before the last: wait until slice t + 1 has arrived for all threads
    7          acc [WARP_M, WARP_N] += a_frag @ b_frag
    8  y = act(acc + bias), 16 rows of a warp at a time through shared memory

There is one barrier per slice. After it, slice t + 1 has arrived, and all threads have read slice t. A stage has the
same layout as the factor in memory, by rows of a or by steps of the sum; ldmatrix transposes one of the two. Stages are
swizzled to avoid bank conflicts. If 16-byte copies can't read a layout, copies have 8 or 4 bytes, or threads copy
through registers. Products are exact, sums float32.

Factors have 16 bits, or are float32 with a `precision`; then a step has 8 elements. float32 fragments are rounded to
tf32, or split into two parts, in registers before step 7, without additional memory. With two parts, three products are
added. Every PIECE slices, acc is added to another float32 sum, because tensor cores round toward zero, and the error of
a long sum would grow.

The limit is mma.sync, which reaches about 60 % of the speed of wgmma on Hopper's tensor cores.

Shared memory: ITEMSIZE * STAGES * BLOCK_K * (BLOCK_M + BLOCK_N) bytes. Registers: WARP_M * WARP_N / 32 numbers of acc,
(WARP_M + WARP_N) / 2 words of fragments, and about 50 more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, builds, cuda, f32, i32, kernel, u32
from ..launch.device import Device
from ..launch.step import Step
from ..tile.async_copies import cp_async_commit, cp_async_wait_group
from ..tile.storage import storage
from ..tile.warp_mma import STEP_BYTES, fragments, warp_products
from ..tile.warp_rows import COLUMNS, WarpRowsLayout, warp_output
from .loading import Reading
from .product import Product, Variant, argument_types, needs_tensor_cores, product_axes, variant
from .sm80_copies import Terms, slice_copies
from .tiled import Results, Rung, best_first, block_count, block_order, finishing, launch_of, reading, writing

DTYPES = ("bfloat16", "float16")
VECTORS = (8, 4, 2)  # 16-bit elements per copy: 16, 8 or 4 bytes


@dataclass(frozen=True)
class Sm80Config:
    """A block of warps_m x warps_n warps. Each warp computes warp_m x warp_n elements of the result."""

    warps_m: int
    warps_n: int
    warp_m: int
    warp_n: int
    block_k: int  # steps of the sum in a slice
    num_stages: int
    min_blocks: int = 1
    itemsize: int = 2
    piece: int = 0  # slices that tensor cores add up before their sum is added in float32 (`pieces`); 0: all

    @cached_property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @cached_property
    def threads(self) -> int:
        return 32 * self.warps

    @cached_property
    def block_m(self) -> int:
        return self.warps_m * self.warp_m

    @cached_property
    def block_n(self) -> int:
        return self.warps_n * self.warp_n

    @cached_property
    def sums(self) -> int:
        """Return the number of sums of a thread; twice as many with pieces."""
        return self.warp_m * self.warp_n // 32 * (2 if self.piece else 1)

    @cached_property
    def steps(self) -> int:
        """Return the number of products along a slice."""
        return self.block_k * self.itemsize // STEP_BYTES

    @cached_property
    def shares(self) -> int:
        """Return the number of parts in which a slice is copied: one with each product of a slice, except the last
        two."""
        return max(1, self.steps - 2)

    @cached_property
    def b_at(self) -> int:
        """Return the index at which b's slice begins in a stage, in elements."""
        return self.block_m * self.block_k

    @cached_property
    def stage(self) -> int:
        """Return the elements of a stage: a slice of a and one of b."""
        return (self.block_m + self.block_n) * self.block_k

    @cached_property
    def ahead(self) -> int:
        """Return the number of slices in flight."""
        return self.num_stages - 1

    @cached_property
    def last(self) -> int:
        """Return the index at which the last stage begins."""
        return self.ahead * self.stage

    def shared_bytes(self, dtype: str) -> int:
        """Return the bytes of the ring, or of all warps' sums, which use its memory at the end, whichever is larger."""
        return max(self.itemsize * self.num_stages * self.stage, 4 * self.warps * WarpRowsLayout(self.warp_n).size)

    def columns(self, dtype: str) -> int:
        """Return the number of neighbouring columns that a thread writes."""
        return COLUMNS


@builds
def build_product(config: Sm80Config, variant: Variant, a_reading: Reading, b_reading: Reading, out: int) -> Kernel:
    """Build matmul_sm80, whose arguments are `product.arguments`. out: elements of a result's row per store."""
    mem, axes = storage(variant.dtype), product_axes(variant)
    of_block = block_order(config.block_m, config.block_n)
    a_copies = slice_copies(variant, config, config.block_m, a_reading)
    b_copies = slice_copies(variant, config, config.block_n, b_reading)
    a_side = fragments(a_copies.slices, config.warp_m, left=True)
    b_side = fragments(b_copies.slices, config.warp_n, left=False)
    sums = warp_products(variant.dtype, config.warp_m, config.warp_n, config.piece > 0)
    output = warp_output(config.warp_m, config.warp_n, finishing(variant, COLUMNS, out).finish)

    @kernel(*argument_types(variant), threads=config.threads, min_blocks=config.min_blocks)
    def matmul_sm80(y, z, a, b, bias, sizes):
        M, N, K = sizes.M, sizes.N, sizes.K
        smem = cuda.shared.array(0, mem.element, alignment=128)
        batch, m0, n0 = of_block(M, N)
        warp = cuda.threadIdx.x // 32
        my_m, my_n = warp // config.warps_n * config.warp_m, warp % config.warps_n * config.warp_n
        terms = Terms(K, (K + config.block_k - 1) // config.block_k, sizes.outers)
        slices = i32(sizes.rounds * terms.slices)
        a_part = a_copies.part(a, axes.batch.at_32(batch, sizes.batches, a.batch), m0, M)
        b_part = b_copies.part(b, axes.batch.at_32(batch, sizes.batches, b.batch), n0, N)
        a_words = cuda.local.array(a_copies.words, u32)
        b_words = cuda.local.array(b_copies.words, u32)

        for t in range(config.ahead):
            if t < slices:
                a_slice, b_slice = a_copies.coming(a_part, terms, t), b_copies.coming(b_part, terms, t)
                for share in range(config.shares):
                    a_copies.start(a_words, smem, t * config.stage, a_part, a_slice, share)
                    b_copies.start(b_words, smem, t * config.stage + config.b_at, b_part, b_slice, share)
                a_copies.end(a_words, smem, t * config.stage, a_part)
                b_copies.end(b_words, smem, t * config.stage + config.b_at, b_part)
            cp_async_commit()

        acc, totals = sums.make(), sums.make()  # totals: sums of pieces, if there are pieces
        a_frag, b_frag = a_side.make(), b_side.make()
        a_at, b_at = a_side.start(my_m), i32(b_side.start(my_n) + config.b_at)  # places in a stage
        here, free = i32(0), i32(config.last)  # the stage to read, and the one to fill
        cp_async_wait_group(config.ahead - 1)
        cuda.syncthreads()
        if slices > 0:
            a_side.read(a_frag, 0, smem, a_at, 0)
            b_side.read(b_frag, 0, smem, b_at, 0)
        for t in range(slices):
            coming = i32(t + config.ahead)
            a_slice, b_slice = a_copies.coming(a_part, terms, coming), b_copies.coming(b_part, terms, coming)
            for step in range(config.steps - 1):
                a_side.read(a_frag, (step + 1) % 2, smem, i32(here + a_at), step + 1)
                b_side.read(b_frag, (step + 1) % 2, smem, i32(here + b_at), step + 1)
                if (step < config.shares) & (coming < slices):
                    a_copies.start(a_words, smem, free, a_part, a_slice, step)
                    b_copies.start(b_words, smem, i32(free + config.b_at), b_part, b_slice, step)
                sums.multiply(acc, a_frag, b_frag, step % 2)
            cp_async_commit()
            if coming < slices:
                a_copies.end(a_words, smem, free, a_part)
                b_copies.end(b_words, smem, i32(free + config.b_at), b_part)
            free = here
            here = i32(here + config.stage) if here < config.last else i32(0)
            cp_async_wait_group(config.ahead - 1)
            cuda.syncthreads()
            if t + 1 < slices:
                a_side.read(a_frag, 0, smem, i32(here + a_at), 0)
                b_side.read(b_frag, 0, smem, i32(here + b_at), 0)
            sums.multiply(acc, a_frag, b_frag, 1)
            if config.piece and ((t + 1) % config.piece == 0) | (t + 1 == slices):
                sums.add_to(totals, acc)
        if config.piece:
            sums.add_to(acc, totals)

        row_smem = cuda.shared.array(0, f32, alignment=128)
        y_begin, z_begin = (
            axes.batch.at_32(batch, sizes.batches, y.batch),
            axes.batch.at_32(batch, sizes.batches, z.batch),
        )
        results = Results(y, z, y_begin, z_begin, bias, N)
        output.store(row_smem, acc, m0 + my_m, n0 + my_n, M, results)

    return matmul_sm80


# Tiles, and their speed relative to the first; the first four were measured at 4096^3, H200, 2026-11-22. The first has
# 0.55 of cuBLAS's speed (Triton by mma.sync: 0.54)
TILES = (
    (Sm80Config(2, 4, 64, 64, 64, 3), 1.0),
    (Sm80Config(2, 2, 64, 64, 64, 3, min_blocks=2), 0.99),
    (Sm80Config(2, 2, 64, 64, 32, 4, min_blocks=2), 0.96),
    (Sm80Config(2, 4, 64, 64, 32, 4), 0.8),
    (Sm80Config(2, 4, 64, 32, 32, 4), 0.75),
    (Sm80Config(2, 2, 64, 32, 32, 4, min_blocks=2), 0.7),
    (Sm80Config(2, 2, 32, 64, 32, 4, min_blocks=2), 0.7),
    (Sm80Config(2, 2, 32, 32, 32, 4, min_blocks=2), 0.5),
)


def _floats(*sizes: int, **options: int) -> Sm80Config:
    return Sm80Config(*sizes, itemsize=4, **options)


# tiles for "tf32", and for "3xtf32", whose Configs have pieces
TF32_TILES = (
    (_floats(2, 4, 64, 64, 16, 4), 1.0),
    (_floats(2, 4, 64, 32, 16, 4), 0.9),
    (_floats(2, 2, 64, 32, 16, 4), 0.7),
    (_floats(2, 2, 32, 32, 16, 5, min_blocks=2), 0.5),
)
PARTS_TILES = (
    (_floats(2, 4, 64, 32, 16, 4, piece=2), 1.0),
    (_floats(2, 4, 32, 32, 16, 5, piece=2), 0.8),
    (_floats(2, 2, 32, 32, 16, 5, piece=2), 0.7),
)


def vectors_of(dtype: str) -> tuple[int, ...]:
    """Return the numbers of elements that a copy may have, largest first."""
    return tuple(2 * vector // storage(dtype).itemsize for vector in VECTORS)


def configs(
    product: Product, problem: Problem, metas: Mapping[str, ArrayMeta], device: Device
) -> Iterator[tuple[Sm80Config, str]]:
    """Return the tiles that fit a product, best first."""
    build = _build_of(product, problem, metas)
    table = {"tf32": TF32_TILES, "3xtf32": PARTS_TILES}[problem.precision] if problem.dtype == "float32" else TILES
    tiles = [(config, speed) for config, speed in table if fits(config, build, device)]
    return best_first(tiles, product, problem.dtype, device)


class Build(NamedTuple):
    """The compile-time values of a kernel, in addition to its Config."""

    variant: Variant
    a_reading: Reading
    b_reading: Reading
    out: int


def fits(config: Sm80Config, build: Build, device: Device) -> bool:
    """Return whether min_blocks blocks fit on an SM, and a thread's sums fit in its registers.

    A thread has fewer registers for sums if it copies or stores single elements, makes many small copies, or adds up
    several products; with more sums it would spill.
    """
    narrowest = min(build.a_reading.vector, build.b_reading.vector)
    if narrowest == 1 and config.stage // config.threads > 32:
        return False
    roomy = narrowest == vectors_of(build.variant.dtype)[0] and build.out > 1 and not build.variant.has_rounds
    shared_bytes = config.min_blocks * config.shared_bytes(build.variant.dtype)
    return config.sums <= (128 if roomy else 64) and shared_bytes <= device.shared_memory_per_block


def _build_of(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> Build:
    """Return the compile-time values of a product's kernel."""
    found = variant(product, p)
    a, b = (reading(product, which, metas, p.dtype, vectors_of(p.dtype), whole=False) for which in "ab")
    return Build(found, a, b, writing(product, found, metas, COLUMNS))


def product_steps(product: Product, p: Problem, metas: Mapping[str, ArrayMeta], config: Sm80Config) -> list[Step]:
    """Return the launch that computes a product, none for an empty one."""
    if not block_count(product, config):
        return []
    return [launch_of(product, build_product(config, *_build_of(product, p, metas)), config, p.dtype)]


def _serves(problem: Problem, device: Device) -> bool:
    return (problem.dtype in DTYPES or needs_tensor_cores(problem)) and device.has_mma_bf16


RUNG = Rung("sm80", configs, product_steps, serves=_serves)
