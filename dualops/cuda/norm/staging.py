"""How rows, and w and b, come to the shared memory of a block: for ring.py and ring_backward.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...spec.meta import compute_dtype, itemsize
from ..backend import Namespace, cuda, i32, i64, verb
from ..tile.ring import fetch, init_fetch, ring, start_fetch, wait_fetch
from ..tile.storage import storage
from .variant import Variant
from .verbs import row_axes


@dataclass(frozen=True)
class RingConfig:
    """How rows are dealt to blocks of `row_threads * rows` threads and a warp that copies."""

    row_threads: int  # threads of a block that share a row: a power of two below 32, or a multiple of 32
    vectors: int  # 16-byte vectors of a row that each of them has
    rows: int  # of a block at once; 1 in a cluster
    stages: int
    cluster: int = 1  # blocks that share a row
    min_blocks: int = 1  # blocks that the registers must leave room for on an SM
    w_shared: bool = False  # w and b wait in shared memory, not in registers

    @property
    def readers(self) -> int:
        """Threads that do not copy."""
        return self.row_threads * self.rows

    @property
    def threads(self) -> int:
        return self.readers + 32

    def columns(self, dtype: str) -> int:
        """Most columns of a block."""
        return self.row_threads * self.vectors * storage(dtype).vector

    def stages_bytes(self, variant: Variant) -> int:
        """Shared memory of the stages."""
        return self.stages * variant.staged * self.rows * self.columns(variant.dtype) * itemsize(variant.dtype)

    def shared_bytes(self, variant: Variant) -> int:
        """Of the stages, and of w and b behind them: as they are, or backward as each thread's numbers."""
        sizes = [itemsize(dtype) for dtype in (variant.w, variant.b) if dtype]
        if variant.backward:
            sizes = [self.rows * itemsize(compute_dtype(variant.dtype))]
        return self.stages_bytes(variant) + self.w_shared * self.columns(variant.dtype) * sum(sizes)


class Copies(Namespace):
    """How rows come into the stages. A stage has `rows` rows of each array; in it, a row has room for all columns."""

    clear: Callable[..., None]  # (tiles, width, tid): zeros behind the width columns of every row, by all threads
    rounds: Callable[..., int]  # (first, step, M): sets of rows, from row `first` on, `step` rows apart
    # (tiles, full, empty, x, second, third, first, step, M, sizes, begin, width): all of them, by one thread
    feed: Callable[..., None]


def copies(config: RingConfig, variant: Variant, arrays: int) -> Copies:
    """The verbs for this many arrays: x, second and third, as far as they are wanted, width columns from begin on."""
    pipe, axes = ring(config.stages, config.readers // 32), row_axes(variant.rank)
    ARRAYS, ITEMSIZE, ROWS, RANK = arrays, itemsize(variant.dtype), config.rows, variant.rank
    COLUMNS, THREADS = config.columns(variant.dtype), config.threads
    TILE, ALL_ROWS = ROWS * COLUMNS, config.stages * arrays * config.rows
    MAY_BE_ONE = (variant.rank == 1) & (config.cluster == 1)

    @verb
    def clear(tiles, width, tid):
        for row in range(ALL_ROWS):
            for n in range(width + tid, COLUMNS, THREADS):
                tiles[row * COLUMNS + n] = 0

    @verb
    def rounds(first, step, M):
        return i32((M - first + step - 1) // step)

    @verb
    def copy_rows(tiles, at, x, place, first, count, sizes, begin, width, full, stage):
        if MAY_BE_ONE & (x.strides[0] == COLUMNS):
            pipe.copy(tiles, at, x.data, first * COLUMNS, count * (COLUMNS * ITEMSIZE), full, stage)
        else:
            for r in range(count):
                axes.locate(place, first + r, sizes)
                index = axes.start(place, x.strides) + begin
                pipe.copy(tiles, at + r * COLUMNS, x.data, index, width * ITEMSIZE, full, stage)

    @verb
    def feed(tiles, full, empty, x, second, third, first, step, M, sizes, begin, width):
        place = cuda.local.array(RANK, i64)
        i, end = i32(0), rounds(first, step, M)
        while i < end:
            count = i32(min(M - first, i64(ROWS)))
            stage = pipe.acquire(full, empty, i, count * width * (ARRAYS * ITEMSIZE))
            at = stage * (ARRAYS * TILE)
            copy_rows(tiles, at, x, place, first, count, sizes, begin, width, full, stage)
            if ARRAYS > 1:
                copy_rows(tiles, at + TILE, second, place, first, count, sizes, begin, width, full, stage)
            if ARRAYS > 2:
                copy_rows(tiles, at + 2 * TILE, third, place, first, count, sizes, begin, width, full, stage)
            first += step
            i = i32(i + 1)

    return Copies(clear=clear, rounds=rounds, feed=feed)


class SharedWeights(Namespace):
    """How w and b of a block's columns come to shared memory, once, as they are, and from there to registers.

    Where they are not wanted there, the verbs do nothing; behind the row there is anything. For forward alone: backward
    reads w twice a row, and would be 15 % slower at 1024 and 4096 columns if it had to convert it each time.
    """

    w_element: Any  # Numba type of the shared array w_smem's element
    b_element: Any
    init: Callable[..., None]  # (bell): by one thread, before any other
    copy: Callable[..., None]  # (w_smem, b_smem, w, b, begin, width, bell): the columns from begin on, by one thread
    wait: Callable[..., None]  # (bell): until they are there
    # (frag, at, smem, column, offset): as many as a vector of x has, w + offset
    recall_w: Callable[..., None]
    recall_b: Callable[..., None]  # (frag, at, smem, column)


def shared_weights(config: RingConfig, variant: Variant) -> SharedWeights:
    """The verbs, for w and b as far as there are any. Only rms_norm has an offset."""
    w_mem, b_mem = storage(variant.w or variant.dtype), storage(variant.b or variant.dtype)
    WITH_W, WITH_B = config.w_shared and variant.w is not None, config.w_shared and variant.b is not None
    W_SIZE, B_SIZE = w_mem.element.bitwidth // 8, b_mem.element.bitwidth // 8
    WANTED, HAS_OFFSET = WITH_W or WITH_B, not variant.centred
    COLUMNS, VECTOR = config.columns(variant.dtype), storage(variant.dtype).vector
    W_FIRST = config.stages_bytes(variant) // W_SIZE
    B_FIRST = (config.stages_bytes(variant) + WITH_W * COLUMNS * W_SIZE) // B_SIZE

    @verb
    def init(bell):
        if WANTED:
            init_fetch(bell)

    @verb
    def copy(w_smem, b_smem, w, b, begin, width, bell):
        if WANTED:
            start_fetch(bell, width * (WITH_W * W_SIZE + WITH_B * B_SIZE))
        if WITH_W:
            fetch(w_smem, W_FIRST, w, i64(begin), width * W_SIZE, bell)
        if WITH_B:
            fetch(b_smem, B_FIRST, b, i64(begin), width * B_SIZE, bell)

    @verb
    def wait(bell):
        if WANTED:
            wait_fetch(bell)

    @verb
    def recall_w(frag, at, smem, column, offset):
        if WITH_W:
            for c in range(0, VECTOR, w_mem.vector):
                w_mem.load_shared(frag, at + c, smem, W_FIRST + column + c)
            if HAS_OFFSET:
                for c in range(at, at + VECTOR):
                    frag[c] += offset

    @verb
    def recall_b(frag, at, smem, column):
        if WITH_B:
            for c in range(0, VECTOR, b_mem.vector):
                b_mem.load_shared(frag, at + c, smem, B_FIRST + column + c)

    return SharedWeights(
        w_element=w_mem.element,
        b_element=b_mem.element,
        init=init,
        copy=copy,
        wait=wait,
        recall_w=recall_w,
        recall_b=recall_b,
    )
