"""matmul in tiles, on CUDA cores: any GPU, dtype, layout and strides.

naive waits for memory: two loads a multiplication. Here a block makes a tile [BLOCK_M, BLOCK_N] of the result, so that
what it loads is used BLOCK_N or BLOCK_M times, and a thread a tile of that in registers, so that what it reads from
shared memory is used TILE_N or TILE_M times (Volkov & Demmel 2008, doi:10.1109/SC.2008.5214359).

    1  slice 0 of a [BLOCK_K, BLOCK_M] and of b [BLOCK_K, BLOCK_N] to shared memory
    2  for each slice:
    3      acc [TILE_M, TILE_N] += outer product of fragments            for each step of the slice
    4      meanwhile a's next slice is on its way to registers, and from the middle on b's; each is then put into
           the other half of shared memory; one barrier a slice
    5      every PIECE steps:  totals += acc, acc = 0                    totals lie in shared memory
    6  y = act(totals + bias)

Fragments are read one step ahead. A thread's rows are groups of 4, 32 rows apart, and its columns lie side by side, so
that the 16-byte reads of a warp meet no bank twice, and that rows of the result are written 16 bytes at a time. One
float32 sum of all of K would lose more than the accuracy rule allows: 4 to 17 times what BLAS loses where K is 4096 to
16384, against 1.0 to 1.2 times in pieces of 256. Blocks that share rows of a or columns of b run one after another, so
that these are still in L2.

What holds it up: a multiplication and an addition a lane and clock, which tensor cores do by the hundred.

Shared memory: itemsize * (2 * BLOCK_K * (BLOCK_M + BLOCK_N + 8) + BLOCK_M * BLOCK_N). Registers: TILE_M * TILE_N
numbers of acc, 2 * (TILE_M + TILE_N) of fragments, BLOCK_K * max(BLOCK_M, BLOCK_N) / threads on their way, and about
40 more. Numbers are float32, float64 for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ..arrays import cdiv
from ..backend import Kernel, Namespace, builds, cuda, i32, i64, kernel, u32, verb
from ..device import Device
from ..plans import Choice
from ..step import Step
from ..tile.numbers import numbers
from ..tile.storage import storage
from .activations import activation
from .gradient import column_sums_steps, dz_steps, gradient_metas, gradient_products, gradient_workspace, partial_sums
from .loading import PAD, Reading, loader
from .product import (
    Axis,
    Product,
    Variant,
    argument_types,
    arguments,
    axes_of,
    forward_product,
    needs_tensor_cores,
    variant,
)

LANES_M, LANES_N = 8, 4  # of a warp, along rows and columns of the result
PIECE = 256  # terms that are summed before they are added to the total
GROUP_M = 8  # tiles of rows whose blocks run one after another


@dataclass(frozen=True)
class SimtConfig:
    """A block of warps_m x warps_n warps, whose threads hold tile_m x tile_n of the result each."""

    warps_m: int
    warps_n: int
    tile_m: int
    tile_n: int
    block_k: int  # steps of the sum in a slice
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def block_m(self) -> int:
        return self.warps_m * LANES_M * self.tile_m

    @property
    def block_n(self) -> int:
        return self.warps_n * LANES_N * self.tile_n

    def shared_bytes(self, dtype: str) -> int:
        slices = 2 * self.block_k * (self.block_m + self.block_n + 2 * PAD)
        return (slices + self.block_m * self.block_n) * (8 if dtype == "float64" else 4)

    def columns(self, dtype: str) -> int:
        """Columns that a thread has side by side."""
        return min(self.tile_n, 4 if dtype == "float64" else 8)


class Tile(Namespace):
    """The block's tile of the result, and a thread's part of it.

    a_frag, b_frag: local arrays that have fragments of two steps, `half` says of which. mine: where the thread's totals
    begin in shared memory, four numbers together. four: a local array.
    """

    columns: int  # of the thread, side by side
    groups: int  # of such columns
    group_stride: int
    of_block: Callable[..., Any]  # (M, N) -> batch, first row, first column
    read: Callable[..., None]  # (a_frag, b_frag, half, smem, a_at, b_at): fragments of a step, a line of each slice
    multiply: Callable[..., None]  # (acc, a_frag, b_frag, half): acc += the outer product of a step
    add_to_totals: Callable[..., None]  # (smem, mine, acc, four): acc, which is 0 then
    store: Callable[..., None]  # (to, at, n, N, values): a group of columns, from number n on, of the row at `at`


def _tile(config: SimtConfig, dtype: str, out: int) -> Tile:
    """The verbs of a kernel."""
    mem, num = storage(dtype), numbers(storage(dtype).number)
    BLOCK_M, BLOCK_N, THREADS, OUT = config.block_m, config.block_n, config.threads, out
    TILE_M, TILE_N, COLUMNS = config.tile_m, config.tile_n, config.columns(dtype)
    GROUPS, GROUP_STRIDE, N_ACC = TILE_N // COLUMNS, LANES_N * COLUMNS, TILE_M * TILE_N

    @verb
    def of_block(M, N):
        # 32 bits, in which a division takes a tenth of the time
        m_blocks, n_blocks = u32((M + BLOCK_M - 1) // BLOCK_M), u32((N + BLOCK_N - 1) // BLOCK_N)
        tiles, group_tiles = u32(m_blocks * n_blocks), u32(GROUP_M * n_blocks)
        tile = u32(cuda.blockIdx.x)
        batch, tile = tile // tiles, u32(tile % tiles)
        group, tile = u32(tile // group_tiles), u32(tile % group_tiles)
        height = u32(min(m_blocks - group * GROUP_M, GROUP_M))
        m_block, n_block = group * GROUP_M + tile % height, tile // height
        return i64(batch), i64(m_block) * BLOCK_M, i64(n_block) * BLOCK_N

    @verb
    def read(a_frag, b_frag, half, smem, a_at, b_at):
        for i in range(0, TILE_M, 4):
            num.load_four(a_frag, half * TILE_M + i, smem, a_at + i * LANES_M)
        for g in range(GROUPS):
            for j in range(0, COLUMNS, 4):
                num.load_four(b_frag, half * TILE_N + g * COLUMNS + j, smem, b_at + g * GROUP_STRIDE + j)

    @verb
    def multiply(acc, a_frag, b_frag, half):
        for i in range(TILE_M):
            for j in range(TILE_N):
                acc[i * TILE_N + j] += a_frag[half * TILE_M + i] * b_frag[half * TILE_N + j]

    @verb
    def add_to_totals(smem, mine, acc, four):
        for e in range(0, N_ACC, 4):
            num.load_four(four, 0, smem, mine + e * THREADS)
            for c in range(4):
                four[c] += acc[e + c]
                acc[e + c] = num.zero
            for c in range(0, 4, num.vector):
                num.store_vector(smem, mine + e * THREADS + c, four, c)

    @verb
    def store(to, at, n, N, values):
        for j in range(0, COLUMNS, OUT):
            if OUT > 1:
                mem.store_vector(to.data, at + n + j, n + j < N, values, j)
            elif n + j < N:
                mem.store(to.data, at + (n + j) * to.column, values[j])

    return Tile(
        columns=COLUMNS,
        groups=GROUPS,
        group_stride=GROUP_STRIDE,
        of_block=of_block,
        read=read,
        multiply=multiply,
        add_to_totals=add_to_totals,
        store=store,
    )


@builds
def build_product(config: SimtConfig, variant: Variant, a_reading: Reading, b_reading: Reading, out: int) -> Kernel:
    """matmul_simt(y, z, a, b, bias, bias_stride, batches, outers, B, rounds, M, N, K).

    out: elements of a row of the result that are stored at once.
    """
    mem, bias_mem = storage(variant.dtype), storage(variant.bias_dtype or variant.dtype)
    num, act = numbers(mem.number), activation(variant.activation, mem.number)
    batch_axes, outer_axes = axes_of(variant.batch_axes), axes_of(max(variant.outer_axes, 1))
    WITH_BIAS, WITH_Z, OUTER = variant.bias_dtype is not None, variant.preactivation, variant.outer_axes > 0

    BLOCK_M, BLOCK_N, BLOCK_K, THREADS = config.block_m, config.block_n, config.block_k, config.threads
    TILE_M, TILE_N, WARPS_N = config.tile_m, config.tile_n, config.warps_n
    tile = _tile(config, variant.dtype, out)
    a_loader = loader(variant.dtype, a_reading, BLOCK_M, BLOCK_K, THREADS)
    b_loader = loader(variant.dtype, b_reading, BLOCK_N, BLOCK_K, THREADS)
    A_ROW, B_ROW = BLOCK_M + PAD, BLOCK_N + PAD
    A_SLICE, SLICE = BLOCK_K * A_ROW, BLOCK_K * (A_ROW + B_ROW)  # numbers of a slice of a, and of both
    N_ACC, N_A, N_B, N_COMING = TILE_M * TILE_N, 2 * TILE_M, 2 * TILE_N, max(a_loader.size, b_loader.size)
    COLUMNS, PAIRS, HALF, LAST_SLICE = tile.columns, BLOCK_K // 2, BLOCK_K // 4, PIECE // BLOCK_K - 1

    @kernel(*argument_types(variant), threads=THREADS, min_blocks=config.min_blocks)
    def matmul_simt(y, z, a, b, bias, bias_stride, batches, outers, B, rounds, M, N, K):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        batch, m0, n0 = tile.of_block(M, N)
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        my_m = i32(warp // WARPS_N * (LANES_M * TILE_M) + lane // LANES_N * 4)
        my_n = i32(warp % WARPS_N * (LANES_N * TILE_N) + lane % LANES_N * COLUMNS)
        a_row, a_depth = a_loader.first()
        b_row, b_depth = b_loader.first()
        a_start = batch_axes.at(batch, batches, a.batch) + (m0 + a_row) * a.row + a_depth * a.depth
        b_start = batch_axes.at(batch, batches, b.batch) + (n0 + b_row) * b.row + b_depth * b.depth
        a_index, b_index, left, r = a_start, b_start, K, i64(0)
        a_rows, b_rows = i32(min(M - m0, BLOCK_M)) - a_row, i32(min(N - n0, BLOCK_N)) - b_row  # from my first one on

        mine = i32(2 * SLICE + 4 * cuda.threadIdx.x)  # four of my totals, and so on, THREADS times four numbers apart
        acc = cuda.local.array(N_ACC, mem.number)
        a_frag = cuda.local.array(N_A, mem.number)
        b_frag = cuda.local.array(N_B, mem.number)
        coming = cuda.local.array(N_COMING, mem.number)
        four = cuda.local.array(4, mem.number)
        for e in range(N_ACC):
            acc[e] = num.zero
        for c in range(4):
            four[c] = num.zero
        for e in range(0, N_ACC, 4):
            for c in range(0, 4, num.vector):
                num.store_vector(smem, mine + e * THREADS + c, four, c)

        depth = i32(min(left, BLOCK_K))
        a_loader.fetch(coming, a, a_index, a_rows, depth - a_depth)
        a_loader.put(smem, 0, a_row, a_depth, coming)
        b_loader.fetch(coming, b, b_index, b_rows, depth - b_depth)
        b_loader.put(smem, A_SLICE, b_row, b_depth, coming)
        cuda.syncthreads()
        tile.read(a_frag, b_frag, 0, smem, my_m, A_SLICE + my_n)
        slices = rounds * ((K + BLOCK_K - 1) // BLOCK_K)
        for t in range(slices):
            here, there = (t & 1) * SLICE, (t & 1 ^ 1) * SLICE
            left -= BLOCK_K
            a_index += BLOCK_K * a.depth
            b_index += BLOCK_K * b.depth
            if OUTER and (left <= 0) & (r + 1 < rounds):
                r += 1
                left = K
                a_index = a_start + outer_axes.at(r, outers, a.outer)
                b_index = b_start + outer_axes.at(r, outers, b.outer)
            depth = i32(min(left, BLOCK_K))
            a_loader.fetch(coming, a, a_index, a_rows, depth - a_depth)
            a_at, b_at, pair = i32(here + my_m), i32(here + A_SLICE + my_n), i32(0)
            while pair < PAIRS:
                tile.read(a_frag, b_frag, 1, smem, a_at + A_ROW, b_at + B_ROW)
                tile.multiply(acc, a_frag, b_frag, 0)
                a_at, b_at, pair = i32(a_at + 2 * A_ROW), i32(b_at + 2 * B_ROW), i32(pair + 1)
                if pair == HALF:
                    a_loader.put(smem, there, a_row, a_depth, coming)
                    b_loader.fetch(coming, b, b_index, b_rows, depth - b_depth)
                elif pair == PAIRS:
                    b_loader.put(smem, there + A_SLICE, b_row, b_depth, coming)
                    cuda.syncthreads()
                    a_at, b_at = i32(there + my_m), i32(there + A_SLICE + my_n)
                tile.read(a_frag, b_frag, 0, smem, a_at, b_at)
                tile.multiply(acc, a_frag, b_frag, 1)
            if ((t + 1) & LAST_SLICE == 0) | (t + 1 == slices):
                tile.add_to_totals(smem, mine, acc, four)

        values = cuda.local.array(COLUMNS, mem.number)
        for i in range(TILE_M):
            m = m0 + my_m + i // 4 * (4 * LANES_M) + i % 4
            if m < M:
                for g in range(tile.groups):
                    n = n0 + my_n + g * tile.group_stride
                    for j in range(0, COLUMNS, 4):
                        num.load_four(values, j, smem, mine + (i * TILE_N + g * COLUMNS + j) * THREADS)
                    if WITH_BIAS:
                        for j in range(COLUMNS):
                            if n + j < N:
                                values[j] += bias_mem.load(bias, (n + j) * bias_stride)
                    if WITH_Z:
                        tile.store(z, batch_axes.at(batch, batches, z.batch) + m * z.row, n, N, values)
                    for j in range(COLUMNS):
                        values[j] = act.value(values[j])
                    tile.store(y, batch_axes.at(batch, batches, y.batch) + m * y.row, n, N, values)

    return matmul_simt


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for a product, best first."""
    if needs_tensor_cores(problem):
        return
    metas = {**problem.arrays, **results}
    product = forward_product(problem, metas)
    for config, reason in configs(product, problem.dtype, device):
        yield Choice("simt", config, reason, partial(product_steps, product, problem, metas, config))


class GradientConfigs(NamedTuple):
    """A Config for each of the products; None for one that is not wanted."""

    a: SimtConfig | None
    b: SimtConfig | None


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The best tiles for each of the gradient's products."""
    if needs_tensor_cores(problem):
        return
    products = gradient_products(problem, results)
    best = {name: list(configs(each, problem.dtype, device))[:1] for name, each in products.items()}
    if all(best.values()):
        chosen = {name: config for name, [(config, _)] in best.items()}
        reason = "; ".join(f"{name}: {reason}" for name, [(_, reason)] in best.items()) or "sums of columns"
        steps = partial(_backward_steps, problem, results, products, chosen)
        sums = partial_sums(problem) if "dbias" in results else {}
        both = GradientConfigs(chosen.get("da"), chosen.get("db"))
        yield Choice("simt", both, reason, steps, gradient_workspace(problem) | sums)


def _backward_steps(
    problem: Problem,
    results: Mapping[str, ArrayMeta],
    products: Mapping[str, Product],
    chosen: Mapping[str, SimtConfig],
) -> list[Step]:
    steps, metas = dz_steps(problem), gradient_metas(problem, results)
    for name, product in products.items():
        steps += product_steps(product, problem, metas, chosen[name])
    if "dbias" in results and problem.N:
        steps += column_sums_steps(problem, results["dbias"])
    return steps


# Tiles, and how fast they are beside the first. TFLOP/s in float32, H200, 2026-11-21, where cuBLAS has 51 at 4096^3, 38
# at 1024^3 and 15 at 512^3: 4096^3 42, twice the rows a block 43 to 44, but that spills for some layouts
TILES = (
    (SimtConfig(2, 2, 8, 8, 16, min_blocks=3), 1.0),  # 1024^3: 31; 512^3: 7
    (SimtConfig(2, 2, 4, 8, 16), 0.8),  # 30; 10
    (SimtConfig(1, 2, 4, 4, 16), 0.5),  # 24; 12
)
MOST_BLOCKS = 2**31 - 1


def configs(product: Product, dtype: str, device: Device) -> Iterator[tuple[SimtConfig, str]]:
    """Tiles for a product, best first: by the work of the busiest SM, whole tiles counted, and the speed of the tile.

    float64 has half the registers for a tile, so it begins with the second.
    """
    found = []
    for config, speed in TILES[1:] if dtype == "float64" else TILES:
        blocks = block_count(product, config)
        if blocks <= MOST_BLOCKS and config.shared_bytes(dtype) <= device.shared_memory_per_block:
            work = cdiv(blocks, device.sms) * config.block_m * config.block_n / speed
            found.append((work, config, f"{config.block_m} x {config.block_n} a block, {blocks} blocks"))
    for _, config, reason in sorted(found, key=lambda each: each[0]):
        yield config, reason


def block_count(product: Product, config: SimtConfig) -> int:
    return product.batches * cdiv(product.m.size, config.block_m) * cdiv(product.n.size, config.block_n)


def product_steps(product: Product, p: Problem, metas: Mapping[str, ArrayMeta], config: SimtConfig) -> list[Step]:
    """The launch that makes a product, if there is anything to make."""
    blocks, found = block_count(product, config), variant(product, p)
    if not blocks:
        return []
    aligned = {which: _aligned(name, metas) for which, name in zip("yzab", product.names)}
    vector, around = storage(p.dtype).vector, (*product.batch, *product.outer)
    a_reading = _reading([_steps(axis, "a") for axis in (product.m, product.k, *around)], aligned["a"], vector)
    b_reading = _reading([_steps(axis, "b") for axis in (product.n, product.k, *around)], aligned["b"], vector)
    out = vector if config.columns(p.dtype) % vector == 0 else 1
    for which in "yz" if found.preactivation else "y":
        columns, *others = (_steps(axis, which) for axis in (product.n, product.m, *product.batch))
        if not _wide(columns, others, aligned[which], vector):
            out = 1
    build = build_product(config, found, a_reading, b_reading, out)
    return [Step(build, (blocks,), arguments(product), config.shared_bytes(p.dtype))]


def _steps(axis: Axis, which: str) -> tuple[int, int]:
    """Size and stride of an axis in one of the arrays."""
    return axis.size, getattr(axis, which) if axis.size > 1 else 0


def _aligned(name: str, metas: Mapping[str, ArrayMeta]) -> bool:
    return bool(name) and metas[name].pointer % 16 == 0


def _wide(along: tuple[int, int], others: Iterable[tuple[int, int]], aligned: bool, vector: int) -> bool:
    """Whether `vector` elements along an axis are 16 aligned bytes, wherever in the others."""
    size, stride = along
    return aligned and stride == 1 and size % vector == 0 and all(step % vector == 0 for _, step in others)


def _reading(axes: Sequence[tuple[int, int]], aligned: bool, vector: int) -> Reading:
    """How a factor is read: rows, depth, and the other axes."""
    row, depth, *others = axes
    if _wide(depth, [row, *others], aligned, vector):
        return Reading("depth", vector)
    if _wide(row, [depth, *others], aligned, vector):
        return Reading("row", vector)
    return Reading("depth" if depth[1] <= row[1] else "row", 1)
