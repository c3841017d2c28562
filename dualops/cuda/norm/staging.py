"""Copy rows, w and b to the shared memory of a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ...spec.meta import compute_dtype, itemsize
from ..compiler.backend import Members, cuda, i32, i64, members, noun, u64, verb
from ..rows.operator import columns_of_block
from ..tile.numbers import numbers
from ..tile.ring import Ring, Stages, fetch, init_fetch, start_fetch, wait_fetch
from ..tile.storage import storage
from .arguments import Variant, norm_axes, weights


@dataclass(frozen=True)
class RingConfig:
    """How rows are dealt to blocks of `row_threads * rows` threads and a warp that copies."""

    # threads of a block that share a row: a power of two below 32, at least 2 where rows overlap, or a multiple of 32
    row_threads: int
    vectors: int  # 16-byte vectors of a row per thread
    rows: int  # rows of a block at once; 1 in a cluster
    stages: int
    cluster: int = 1  # blocks that share a row
    min_blocks: int = 1  # blocks for which an SM must have registers
    w_shared: bool = False  # whether w and b stay in shared memory instead of registers
    overlap: bool = False  # whether the next row's sums are sent before a row is written

    @cached_property
    def readers(self) -> int:
        """Return the number of threads that do not copy."""
        return self.row_threads * self.rows

    @cached_property
    def row_warps(self) -> int:
        """Return the number of a block's warps that share a row: one if a warp has several rows."""
        return max(self.row_threads // 32, 1)

    @cached_property
    def threads(self) -> int:
        return self.readers + 32

    @cached_property
    def copier(self) -> int:
        """Return the index of the producer warp, which is the number of the other warps."""
        return self.readers // 32

    def columns(self, dtype: str) -> int:
        """Return the most columns of a block."""
        return self.row_threads * self.vectors * storage(dtype).vector

    def layout(self, variant: Variant) -> Layout:
        """Return the layout of shared memory. w and b are unconverted; in backward, w is converted to each thread's
        numbers."""
        columns = self.columns(variant.dtype)
        sizes = [itemsize(dtype) if dtype else 0 for dtype in (variant.w, variant.b)]
        if variant.backward:
            sizes = [self.rows * itemsize(compute_dtype(variant.dtype)), 0]
        stages = Stages(variant.dtype, self.stages, variant.staged, self.rows, columns)
        return layout_of(stages, *(self.w_shared * columns * size for size in sizes))


class Layout(NamedTuple):
    """A block's dynamic shared memory: the stages of its ring, and after them w and b, if they are kept there."""

    stages: Stages
    w_bytes: int
    b_bytes: int
    w_at: int  # the byte at which w begins
    b_at: int
    nbytes: int


def layout_of(stages: Stages, *weights_bytes: int) -> Layout:
    """Return the layout of stages and of as many bytes of w and b."""
    return Layout(stages, *weights_bytes, *accumulate((stages.nbytes, *weights_bytes)))


def weights_layout(columns: int, variant: Variant) -> Layout:
    """Return the layout of unconverted w and b of `columns` columns, without stages."""
    sizes = (columns * itemsize(dtype) if dtype else 0 for dtype in (variant.w, variant.b))
    return layout_of(Stages(variant.dtype, 0, 0, 1, columns), *sizes)


class Turns(NamedTuple):
    """The rows of a block or its cluster: `rows` at once from `first` on, then those `step` later, and so on."""

    first: int
    step: int
    M: int
    sizes: tuple[int, ...]


@noun
def copies(config: RingConfig, variant: Variant, pipe: Ring) -> Members:
    """The verbs that copy rows into the stages. A stage has `rows` rows of each array, with space for all columns."""
    axes, stages = norm_axes(variant), config.layout(variant).stages
    MAY_BE_ONE = (variant.rank == 1) & (config.cluster == 1)

    @verb
    def turns(rows):
        """Return the turns of my cluster."""
        cluster, clusters = cuda.blockIdx.x // config.cluster, cuda.gridDim.x // config.cluster
        return Turns(i64(cluster) * config.rows, clusters * config.rows, rows.M, rows.sizes)

    @verb
    def rounds(turns):
        """Return the number of rounds."""
        return i32((turns.M - turns.first + turns.step - 1) // turns.step)

    @verb
    def clear(smem, columns):
        """Write zeros after the columns of every row; by all threads."""
        for row in range(stages.count * stages.arrays * stages.rows):
            for n in range(columns.width + cuda.threadIdx.x, stages.columns, config.threads):
                smem.tiles[row * stages.columns + n] = 0

    @verb
    def _copy_rows(filling, array, x, first, turns, columns):
        if MAY_BE_ONE & (x.strides[0] == stages.columns):
            pipe.copy_rows(filling, array, x.data, first * stages.columns)
        else:
            place = axes.place()
            for r in range(filling.rows):
                axes.locate(place, first + r, turns.sizes)
                pipe.copy(filling, array, r, x.data, axes.start(place, x) + columns.begin)

    @verb
    def feed(smem, turns, columns, arrays):
        """Copy all rows; by one thread."""
        first, i, end = turns.first, i32(0), rounds(turns)
        while i < end:
            filling = pipe.acquire(smem, i, i32(min(turns.M - first, i64(stages.rows))), columns.width)
            _copy_rows(filling, 0, arrays[0], first, turns, columns)
            if stages.arrays > 1:
                _copy_rows(filling, 1, arrays[1], first, turns, columns)
            if stages.arrays > 2:
                _copy_rows(filling, 2, arrays[2], first, turns, columns)
            first += turns.step
            i = i32(i + 1)

    return members(
        locals(),
        columns=columns_of_block,  # (N, share) -> the columns of my block
    )


class WeightsSmem(NamedTuple):
    """w and b in shared memory, and the mbarrier of their copies."""

    w: Any
    b: Any
    bell: Any


@noun
def shared_weights(layout: Layout, w_shared: bool, variant: Variant) -> Members:
    """The verbs that load w and b of a block's columns to registers: once, or for each row from shared memory.

    Shared memory has them unconverted. After the row's end it may have any values. Verbs that a variant does not need
    do nothing; so do those for a missing w or b. Only rms_norm has an offset. For forward only: backward reads w twice
    per row, and would be 15 % slower at 1024 and 4096 columns if it converted w each time.
    """
    mem, w_mem, b_mem = map(storage, (variant.dtype, variant.w or variant.dtype, variant.b or variant.dtype))
    kept = weights(variant, True)
    WITH_W, WITH_B = layout.w_bytes > 0, layout.b_bytes > 0
    W_FIRST, B_FIRST = layout.w_at // w_mem.itemsize, layout.b_at // b_mem.itemsize

    @verb
    def smem():
        """Return the shared arrays; once in a kernel, by all threads."""
        w = cuda.shared.array(0, w_mem.element, alignment=16)
        b = cuda.shared.array(0, b_mem.element, alignment=16)
        return WeightsSmem(w, b, cuda.shared.array(1, u64))

    @verb
    def init(waiting):
        """Initialize the barrier; by one thread, before any other."""
        if WITH_W or WITH_B:
            init_fetch(waiting.bell)

    @verb
    def copy(waiting, w, b, columns):
        """Copy w and b to shared memory; by one thread."""
        w_bytes, b_bytes = columns.width * (WITH_W * w_mem.itemsize), columns.width * (WITH_B * b_mem.itemsize)
        if WITH_W or WITH_B:
            start_fetch(waiting.bell, w_bytes + b_bytes)
        if WITH_W:
            fetch(waiting.w, W_FIRST, w, i64(columns.begin), w_bytes, waiting.bell)
        if WITH_B:
            fetch(waiting.b, B_FIRST, b, i64(columns.begin), b_bytes, waiting.bell)

    @verb
    def wait(waiting):
        """Wait until w and b are in shared memory."""
        if WITH_W or WITH_B:
            wait_fetch(waiting.bell)

    @verb
    def load_w_plus(frag, at, w, index, keep, offset):
        """Load w + offset to registers."""
        if not w_shared:
            kept.load_w_plus(frag, at, w, index, keep, offset)

    @verb
    def load_b(frag, at, b, index, keep):
        if not w_shared:
            kept.load_b(frag, at, b, index, keep)

    @verb
    def recall_w(frag, at, waiting, column, offset):
        """Read w + offset from shared memory, for a vector of x."""
        if WITH_W:
            for c in range(0, mem.vector, w_mem.vector):
                w_mem.load_shared(frag, at + c, waiting.w, W_FIRST + column + c)
            if not variant.centred:
                for c in range(at, at + mem.vector):
                    frag[c] += offset

    @verb
    def recall_b(frag, at, waiting, column):
        if WITH_B:
            for c in range(0, mem.vector, b_mem.vector):
                b_mem.load_shared(frag, at + c, waiting.b, B_FIRST + column + c)

    @verb
    def load(w_frag, b_frag, waiting, params, column, inside):
        """Read w + offset and b of a vector of x from shared memory."""
        recall_w(w_frag, 0, waiting, column, params.offset)
        recall_b(b_frag, 0, waiting, column)

    return locals()


@noun
def own_weights(config: RingConfig, variant: Variant) -> Members:
    """The verbs with which a thread of backward keeps w + offset of its columns: in registers, or in shared memory.

    In shared memory they are converted numbers. `put` and `recall` do nothing if registers keep w.
    """
    mem, num_mem = storage(variant.dtype), storage(compute_dtype(variant.dtype))
    num, first = numbers(mem.number), config.layout(variant).w_at // num_mem.itemsize
    SHARED = config.w_shared and variant.w is not None

    @verb
    def smem():
        """Return the shared array; once in a kernel, by all threads."""
        return cuda.shared.array(0, mem.number, alignment=16)

    @verb
    def put(frag, w_smem):
        """Write all numbers to shared memory."""
        if SHARED:
            for c in range(0, len(frag), num.vector):
                num.store_vector(w_smem, first + c * config.readers + cuda.threadIdx.x * num.vector, frag, c)

    @verb
    def recall(frag, at, w_smem):
        """Read from shared memory the numbers for one access to x."""
        if SHARED:
            for c in range(at, at + mem.vector, num.vector):
                num_mem.load_shared(frag, c, w_smem, first + c * config.readers + cuda.threadIdx.x * num.vector)

    return members(
        locals(),
        # (frag, at, w, index, keep, offset): the numbers for one access to x
        load=weights(variant, True).load_w_plus,
    )
