"""matmul in tiles, on CUDA cores: any GPU, dtype, layout and strides.

naive waits for memory: it has two loads per multiplication. Here a block computes a tile [BLOCK_M, BLOCK_N] of the
result, and uses each element that it loads BLOCK_N or BLOCK_M times. Each thread computes a part of that tile in
registers, and uses each number that it reads from shared memory TILE_N or TILE_M times (Volkov & Demmel 2008,
doi:10.1109/SC.2008.5214359).

    1  slice 0 of a [BLOCK_K, BLOCK_M] and of b [BLOCK_K, BLOCK_N] to shared memory
    2  for each slice:
    3      acc [TILE_M, TILE_N] += outer product of fragments            for each step of the slice
    4      meanwhile load a's next slice to registers, and from the middle on b's; then store each to the other
           half of shared memory; one barrier per slice
    5      every PIECE steps:  totals += acc, acc = 0                    totals are in shared memory
    6  y = act(totals + bias)

Fragments are read one step in advance. A thread has groups of 4 rows, 32 rows apart, and neighbouring columns. So the
16-byte reads of a warp have no bank conflicts, and rows of the result are written 16 bytes at a time. The error of a
single float32 sum over all of K would exceed the accuracy rule: it is 4 to 17 times that of BLAS for K from 4096 to
16384, but 1.0 to 1.2 times with pieces of 256. Blocks that share rows of a or columns of b run one after the other, so
that these are still in L2.

The limit is one multiplication and addition per lane and clock. Tensor cores do hundreds.

Shared memory: itemsize * (2 * BLOCK_K * (BLOCK_M + BLOCK_N + 8) + BLOCK_M * BLOCK_N). Registers: TILE_M * TILE_N
numbers of acc, 2 * (TILE_M + TILE_N) of fragments, BLOCK_K * max(BLOCK_M, BLOCK_N) / threads in flight, and about 40
more. Numbers are float32, float64 for float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, Members, builds, cuda, i32, i64, kernel, members, noun, verb
from ..launch.device import Device
from ..launch.step import Step
from ..tile.numbers import numbers
from ..tile.shared import Shared, Tile
from ..tile.storage import storage
from .loading import Reading, loader
from .product import Product, Variant, argument_types, needs_tensor_cores, product_axes, variant
from .tiled import Results, Rung, best_first, block_count, block_order, finishing, launch_of, reading, writing

PIECE = 256  # terms that are summed before they are added to the total
LANES_M, LANES_N = 8, 4  # lanes of a warp along rows and columns of the result


@dataclass(frozen=True)
class SimtConfig:
    """A block of warps_m x warps_n warps. Each thread computes tile_m x tile_n elements of the result."""

    warps_m: int
    warps_n: int
    tile_m: int
    tile_n: int
    block_k: int  # steps of the sum in a slice
    min_blocks: int = 1

    @cached_property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @cached_property
    def block_m(self) -> int:
        return self.warps_m * LANES_M * self.tile_m

    @cached_property
    def block_n(self) -> int:
        return self.warps_n * LANES_N * self.tile_n

    @cached_property
    def coming(self) -> int:
        """Return the numbers of a slice that a thread has in flight."""
        return self.block_k * max(self.block_m, self.block_n) // self.threads

    def shared_bytes(self, dtype: str) -> int:
        return stages(self, dtype).nbytes

    def columns(self, dtype: str) -> int:
        """Return the neighbouring columns of a thread."""
        return min(self.tile_n, 4 if dtype == "float64" else 8)


class Stages(NamedTuple):
    """The layout of shared memory: two stages, each with a slice of a and one of b, then the totals."""

    a: Tile
    b: Tile
    size: int  # numbers from the first stage to the second
    totals: int
    nbytes: int  # bytes in total


@cache
def stages(config: SimtConfig, dtype: str) -> Stages:
    """Return the layout of a kernel's shared memory."""
    shared = Shared(dtype, config.threads)
    a = shared.tile(config.block_k, config.block_m)
    b = shared.tile(config.block_k, config.block_n)
    size = shared.count
    shared.vector(size)  # the second
    totals = shared.vector(config.block_m * config.block_n)
    return Stages(a, b, size, totals, shared.nbytes)


@noun
def _tile(config: SimtConfig, dtype: str) -> Members:
    """The verbs of a block's tile of the result, and of a thread's part of it.

    a_frag, b_frag: local arrays with the fragments of two steps; `half` is one of them. mine: the index in shared
    memory at which the thread's totals begin, in groups of four numbers. The groups of all threads alternate.
    """
    mem, num = storage(dtype), numbers(storage(dtype).number)
    COLUMNS, TOTALS = config.columns(dtype), stages(config, dtype).totals
    GROUPS, GROUP_STRIDE = config.tile_n // COLUMNS, LANES_N * COLUMNS

    @verb
    def of_thread():
        """Return the thread's first row and column in the block's tile."""
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        my_m = i32(warp // config.warps_n * (LANES_M * config.tile_m) + lane // LANES_N * 4)
        my_n = i32(warp % config.warps_n * (LANES_N * config.tile_n) + lane % LANES_N * COLUMNS)
        return my_m, my_n

    @verb
    def row(i):
        """Return the thread's row number i, relative to its first row."""
        return i // 4 * (4 * LANES_M) + i % 4

    @verb
    def accumulators():
        """Return acc, a local array of zeros."""
        acc = cuda.local.array(config.tile_m * config.tile_n, mem.number)
        for e in range(len(acc)):
            acc[e] = num.zero
        return acc

    @verb
    def fragments():
        """Return a_frag and b_frag."""
        return cuda.local.array(2 * config.tile_m, mem.number), cuda.local.array(2 * config.tile_n, mem.number)

    @verb
    def read(a_frag, b_frag, half, smem, a_at, b_at):
        """Read the fragments of a step: a line of each slice."""
        for i in range(0, config.tile_m, 4):
            num.load_four(a_frag, half * config.tile_m + i, smem, a_at + i * LANES_M)
        for g in range(GROUPS):
            for j in range(0, COLUMNS, 4):
                num.load_four(b_frag, half * config.tile_n + g * COLUMNS + j, smem, b_at + g * GROUP_STRIDE + j)

    @verb
    def multiply(acc, a_frag, b_frag, half):
        """Add the outer product of a step to acc."""
        for i in range(config.tile_m):
            for j in range(config.tile_n):
                acc[i * config.tile_n + j] += a_frag[half * config.tile_m + i] * b_frag[half * config.tile_n + j]

    @verb
    def clear_totals(smem):
        """Write 0 to the thread's totals. Return mine."""
        mine = i32(TOTALS + 4 * cuda.threadIdx.x)
        four = cuda.local.array(4, mem.number)
        for c in range(4):
            four[c] = num.zero
        for e in range(0, config.tile_m * config.tile_n, 4):
            for c in range(0, 4, num.vector):
                num.store_vector(smem, mine + e * config.threads + c, four, c)
        return mine

    @verb
    def add_to_totals(smem, mine, acc):
        """Add acc to the totals, and set it to 0."""
        four = cuda.local.array(4, mem.number)
        for e in range(0, len(acc), 4):
            num.load_four(four, 0, smem, mine + e * config.threads)
            for c in range(4):
                four[c] += acc[e + c]
                acc[e + c] = num.zero
            for c in range(0, 4, num.vector):
                num.store_vector(smem, mine + e * config.threads + c, four, c)

    @verb
    def load_totals(values, smem, mine, i, g):
        """Load group g of columns, of the thread's row number i."""
        for j in range(0, COLUMNS, 4):
            num.load_four(values, j, smem, mine + (i * config.tile_n + g * COLUMNS + j) * config.threads)

    return members(
        locals(),
        columns=COLUMNS,  # neighbouring columns of the thread
        groups=GROUPS,  # groups of such columns
        group_stride=GROUP_STRIDE,
        of_block=block_order(config.block_m, config.block_n),  # (M, N) -> batch, first row, first column
    )


@builds
def build_product(config: SimtConfig, variant: Variant, a_reading: Reading, b_reading: Reading, out: int) -> Kernel:
    """Build matmul_simt, whose arguments are `product.arguments`. out: elements of a result's row per store."""
    mem, axes, stage = storage(variant.dtype), product_axes(variant), stages(config, variant.dtype)
    tile, result = _tile(config, variant.dtype), finishing(variant, config.columns(variant.dtype), out)
    a_loader = loader(variant.dtype, a_reading, stage.a, config.threads)
    b_loader = loader(variant.dtype, b_reading, stage.b, config.threads)

    @kernel(*argument_types(variant), threads=config.threads, min_blocks=config.min_blocks)
    def matmul_simt(y, z, a, b, bias, sizes):
        M, N, K = sizes.M, sizes.N, sizes.K
        smem = cuda.shared.array(0, mem.number, alignment=16)
        batch, m0, n0 = tile.of_block(M, N)
        my_m, my_n = tile.of_thread()
        a_share = a_loader.share()
        b_share = b_loader.share()
        a_start = a_loader.start(a, axes.batch.at(batch, sizes.batches, a.batch), m0, a_share)
        b_start = b_loader.start(b, axes.batch.at(batch, sizes.batches, b.batch), n0, b_share)
        a_index, b_index, left, r = a_start, b_start, K, i64(0)
        a_rows = i32(min(M - m0, config.block_m)) - a_share.row  # rows of a, from the thread's first row on
        b_rows = i32(min(N - n0, config.block_n)) - b_share.row

        acc = tile.accumulators()
        a_frag, b_frag = tile.fragments()
        coming = cuda.local.array(config.coming, mem.number)
        mine = tile.clear_totals(smem)

        depth = i32(min(left, config.block_k))
        a_loader.fetch(coming, a, a_index, a_rows, depth - a_share.depth)
        a_loader.put(smem, 0, a_share, coming)
        b_loader.fetch(coming, b, b_index, b_rows, depth - b_share.depth)
        b_loader.put(smem, 0, b_share, coming)
        cuda.syncthreads()
        tile.read(a_frag, b_frag, 0, smem, my_m, stage.b.at + my_n)
        pairs = config.block_k // 2  # pairs of steps of a slice
        slices = sizes.rounds * ((K + config.block_k - 1) // config.block_k)
        for t in range(slices):
            here, there = (t & 1) * stage.size, (t & 1 ^ 1) * stage.size
            left -= config.block_k
            a_index += config.block_k * a.depth
            b_index += config.block_k * b.depth
            if variant.has_rounds and (left <= 0) & (r + 1 < sizes.rounds):
                r += 1
                left = K
                a_index = a_start + axes.outer.at(r, sizes.outers, a.outer)
                b_index = b_start + axes.outer.at(r, sizes.outers, b.outer)
            depth = i32(min(left, config.block_k))
            a_loader.fetch(coming, a, a_index, a_rows, depth - a_share.depth)
            a_at, b_at, pair = i32(here + my_m), i32(here + stage.b.at + my_n), i32(0)
            while pair < pairs:
                tile.read(a_frag, b_frag, 1, smem, a_at + stage.a.row, b_at + stage.b.row)
                tile.multiply(acc, a_frag, b_frag, 0)
                a_at, b_at = i32(a_at + 2 * stage.a.row), i32(b_at + 2 * stage.b.row)
                pair = i32(pair + 1)
                if pair == pairs // 2:
                    a_loader.put(smem, there, a_share, coming)
                    b_loader.fetch(coming, b, b_index, b_rows, depth - b_share.depth)
                elif pair == pairs:
                    b_loader.put(smem, there, b_share, coming)
                    cuda.syncthreads()
                    a_at, b_at = i32(there + my_m), i32(there + stage.b.at + my_n)
                tile.read(a_frag, b_frag, 0, smem, a_at, b_at)
                tile.multiply(acc, a_frag, b_frag, 1)
            if ((t + 1) & (PIECE // config.block_k - 1) == 0) | (t + 1 == slices):
                tile.add_to_totals(smem, mine, acc)

        y_begin, z_begin = axes.batch.at(batch, sizes.batches, y.batch), axes.batch.at(batch, sizes.batches, z.batch)
        results = Results(y, z, y_begin, z_begin, bias, N)
        values = cuda.local.array(tile.columns, mem.number)
        for i in range(config.tile_m):
            m = m0 + my_m + tile.row(i)
            if m < M:
                for g in range(tile.groups):
                    n = n0 + my_n + g * tile.group_stride
                    tile.load_totals(values, smem, mine, i, g)
                    result.finish(values, results, m, n)

    return matmul_simt


# Tiles, and their speed relative to the second. Share of cuBLAS's speed in float32 at 4096^3, H200, 2026-11-22
TILES = (
    (SimtConfig(2, 2, 8, 16, 16, min_blocks=2), 1.1),  # 0.91
    (SimtConfig(2, 2, 8, 8, 16, min_blocks=3), 1.0),  # 0.83
    (SimtConfig(2, 2, 4, 8, 16), 0.8),
    (SimtConfig(1, 2, 4, 4, 16), 0.5),
)


def configs(
    product: Product, problem: Problem, metas: Mapping[str, ArrayMeta], device: Device
) -> Iterator[tuple[SimtConfig, str]]:
    """Return tiles for a product, best first. float64 has half the registers for a tile: it begins with the third."""
    return best_first(TILES[2:] if problem.dtype == "float64" else TILES, product, problem.dtype, device)


def product_steps(product: Product, p: Problem, metas: Mapping[str, ArrayMeta], config: SimtConfig) -> list[Step]:
    """Return the launch that computes a product, none for an empty one."""
    if not block_count(product, config):
        return []
    found, vectors = variant(product, p), (storage(p.dtype).vector,)
    a_reading, b_reading = (reading(product, which, metas, p.dtype, vectors, whole=True) for which in "ab")
    out = writing(product, found, metas, config.columns(p.dtype))
    return [launch_of(product, build_product(config, found, a_reading, b_reading, out), config, p.dtype)]


RUNG = Rung("simt", configs, product_steps, serves=lambda problem, device: not needs_tensor_cores(problem))
