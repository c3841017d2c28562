"""softmax of rows that lie side by side, each kept in registers between its one reading and its writing.

    1  a row is shared by `row_threads` threads of a block; a thread loads `vectors` times 16 bytes
    2  every warp, of its part of the row: the maximum, e = exp(x - maximum), the sum of e      (shuffles)
    3  every warp shares (maximum, sum); all read those of all parts of their row               (one barrier)
    4  row maximum, row sum = sum over parts of exp(part maximum - row maximum) * part sum
    5  y = e * exp(warp maximum - row maximum) / row sum

The backward kernel is the same with dot = sum(y * dy) in place of steps 2 to 4, then dx = y * (dy - dot).
Milakov & Gimelshein 2018, arXiv:1805.02867, with the merging of parts of section 3.1.

Registers: vectors * 16 / itemsize numbers a thread and array, and about 30 more. Shared memory: two numbers a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, pointer, u32
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..tile.numbers import numbers
from ..tile.rows import lane_reductions
from ..tile.storage import access, storage
from .arguments import Call, one_step


@dataclass(frozen=True)
class RowsConfig:
    """How a row is dealt to threads. A block has `row_threads * rows` threads."""

    row_threads: int  # threads of one block that share a row: a power of two
    vectors: int  # loads a thread makes
    rows: int  # rows a block works on at once
    aligned: bool = True  # rows begin at multiples of 16 bytes and hold whole 16-byte vectors
    min_blocks: int = 1  # blocks that the registers must leave room for on an SM

    @cached_property
    def threads(self) -> int:
        return self.row_threads * self.rows

    @cached_property
    def warps(self) -> int:
        return self.threads // 32

    @cached_property
    def row_warps(self) -> int:
        """Warps that share a row: one where a warp has several rows."""
        return max(self.row_threads // 32, 1)

    def columns(self, dtype: str) -> int:
        """Longest row."""
        return self.row_threads * self.vectors * (storage(dtype).vector if self.aligned else 1)


@builds
def build_forward(config: RowsConfig, dtype: str) -> Kernel:
    """softmax_rows(y, x, M, N, y_stride, x_stride): M rows of N columns, strides between rows in elements."""
    mem, vec = storage(dtype), access(dtype, config.aligned)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, min(config.row_threads, 32))
    parts = lane_reductions(mem.number, config.row_warps)
    STEP = config.row_threads * vec.vector  # columns between a thread's accesses
    LANES, ROW_WARPS, ROW_THREADS = u32(32), u32(config.row_warps), u32(config.row_threads)

    @kernel(
        pointer(mem.element),
        pointer(mem.element),
        i64,
        i32,
        i64,
        i64,
        threads=config.threads,
        min_blocks=config.min_blocks,
    )
    def softmax_rows(y, x, M, N, y_stride, x_stride):
        tid = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * config.rows + tid // config.row_threads
        column = tid % config.row_threads * vec.vector
        own, left = row < M, i32(N - column)  # columns from my first one on
        x_row, y_row = row * x_stride + column, row * y_stride + column
        frag = cuda.local.array(config.vectors * vec.vector, mem.number)  # my part of x[row], then e
        for j in range(config.vectors):
            vec.load(frag, j * vec.vector, x, x_row + j * STEP, own & (left > j * STEP), num.minus_inf)

        warp_max = num.minus_inf
        for i in range(len(frag)):
            warp_max = num.maximum(warp_max, frag[i])
        warp_max = lanes.max(warp_max)
        base = num.base(warp_max)
        warp_sum = num.zero
        for i in range(len(frag)):
            frag[i] = num.exp(frag[i] - base)
            warp_sum += frag[i]
        warp_sum = lanes.sum(warp_sum)

        if config.row_warps == 1:
            rescale = num.one / warp_sum
        else:
            part_max = cuda.shared.array(config.warps, mem.number)
            part_sum = cuda.shared.array(config.warps, mem.number)
            thread = u32(tid)  # no sign to look after
            if thread % LANES == 0:
                part_max[i32(thread // LANES)] = warp_max
                part_sum[i32(thread // LANES)] = warp_sum
            cuda.syncthreads()
            part = i32(thread // ROW_THREADS * ROW_WARPS + thread % ROW_WARPS)
            row_base = num.base(parts.max(part_max[part]))
            row_sum = parts.sum(part_sum[part] * num.exp(part_max[part] - row_base))
            rescale = num.exp(warp_max - row_base) / row_sum

        for i in range(len(frag)):
            frag[i] *= rescale
        for j in range(config.vectors):
            vec.store(y, y_row + j * STEP, own & (left > j * STEP), frag, j * vec.vector)

    return softmax_rows


@builds
def build_backward(config: RowsConfig, dtype: str) -> Kernel:
    """softmax_rows_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride)."""
    mem, vec = storage(dtype), access(dtype, config.aligned)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, min(config.row_threads, 32))
    parts = lane_reductions(mem.number, config.row_warps)
    STEP = config.row_threads * vec.vector  # columns between a thread's accesses
    LANES, ROW_WARPS, ROW_THREADS = u32(32), u32(config.row_warps), u32(config.row_threads)

    @kernel(
        pointer(mem.element),
        pointer(mem.element),
        pointer(mem.element),
        i64,
        i32,
        i64,
        i64,
        i64,
        threads=config.threads,
        min_blocks=config.min_blocks,
    )
    def softmax_rows_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride):
        tid = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * config.rows + tid // config.row_threads
        column = tid % config.row_threads * vec.vector
        own, left = row < M, i32(N - column)
        dx_row, y_row, dy_row = row * dx_stride + column, row * y_stride + column, row * dy_stride + column
        y_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        dy_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        for j in range(config.vectors):
            keep = own & (left > j * STEP)
            vec.load(y_frag, j * vec.vector, y, y_row + j * STEP, keep, num.zero)
            vec.load(dy_frag, j * vec.vector, dy, dy_row + j * STEP, keep, num.zero)

        # dx = y * (dy - dot)  with  dot = sum(y * dy)
        dot = num.zero
        for i in range(len(y_frag)):
            dot += y_frag[i] * dy_frag[i]
        dot = lanes.sum(dot)
        if config.row_warps > 1:
            part_dot = cuda.shared.array(config.warps, mem.number)
            thread = u32(tid)
            if thread % LANES == 0:
                part_dot[i32(thread // LANES)] = dot
            cuda.syncthreads()
            dot = parts.sum(part_dot[i32(thread // ROW_THREADS * ROW_WARPS + thread % ROW_WARPS)])

        for i in range(len(y_frag)):
            y_frag[i] *= dy_frag[i] - dot
        for j in range(config.vectors):
            vec.store(dx, dx_row + j * STEP, own & (left > j * STEP), y_frag, j * vec.vector)

    return softmax_rows_backward


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """A row in the registers of as few threads as hold it, if any do."""
    return _choices(Call(problem, results), build_forward, FORWARD_ROWS)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the choices for the gradient."""
    return _choices(Call(problem, results), build_backward, BACKWARD_ROWS)


# (row_threads, vectors, rows) by rising length of row: the first that holds the row is taken. Shares of the roof that a
# plain kernel with the same reads and writes reaches: bf16, H200, 32768 rows, 2026-11-21, both still with plain stores.
FORWARD_ROWS = (
    (32, 1, 4),
    (32, 2, 4),
    (64, 2, 2),  # 1024 columns: 0.98; a warp a row with 4 vectors 0.96
    (128, 2, 1),
    (256, 2, 1),  # 4096 columns: 0.97; 128 threads with 4 vectors 0.95
    (256, 4, 1),
    (512, 4, 1),  # 16384 columns: 0.97; 256 threads with 8 vectors 0.96, 1024 with 2 0.66
    (1024, 4, 1),
)
BACKWARD_ROWS = (
    (32, 1, 4),
    (32, 2, 4),
    (64, 2, 2),  # 1024 columns: 1.00; four rows a block 0.97
    (128, 2, 1),
    (128, 4, 2),  # 4096 columns: 0.99; 512 threads with 1 vector 0.98
    (256, 4, 1),
    (512, 4, 1),  # 16384 columns: 0.97; 1024 threads with 2 vectors 0.97
)
# rows that are not aligned: one element a load, so more loads a thread
UNALIGNED_ROWS = ((32, 4, 4), (32, 16, 4), (128, 16, 1), (512, 16, 1))


def _choices(call: Call, build: Callable[..., Kernel], shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Choice]:
    """shapes: FORWARD_ROWS or BACKWARD_ROWS."""
    if not call.contiguous:
        return
    aligned = call.aligned
    config = _rows_config(call.N, call.dtype, shapes if aligned else UNALIGNED_ROWS, aligned)
    if config is not None:
        yield Choice("simt", config, "a row fits in registers", partial(steps_of, call, config, build))


def steps_of(call: Call, config: RowsConfig, build: Callable[..., Kernel]) -> list[Step]:
    """The launch of such rows. build: build_forward or build_backward."""
    args = (*call.metas, call.M, call.N, *call.row_strides)
    return one_step(build, config, call.dtype, cdiv(call.M, config.rows), args)


@cache
def _row_configs(shapes: tuple[tuple[int, int, int], ...], dtype: str, aligned: bool) -> list[tuple[int, RowsConfig]]:
    """The longest row that each config keeps in registers, and the config, by rising length."""
    configs = [RowsConfig(*shape, aligned) for shape in shapes]
    return [(config.columns(dtype), config) for config in configs]


def _rows_config(N: int, dtype: str, shapes: tuple[tuple[int, int, int], ...], aligned: bool) -> RowsConfig | None:
    """The first config that keeps a row of N elements in registers, None if none does."""
    return next((config for columns, config in _row_configs(shapes, dtype, aligned) if columns >= N), None)
