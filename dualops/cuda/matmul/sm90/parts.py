"""The pass before a product on Hopper: copies of factors that its tensor cores can't read.

Boxes begin at multiples of 16 bytes. In a matrix with rows of 4097 numbers, few rows begin there. So a 16-bit factor
with such rows is copied first, if each of its numbers is multiplied often enough. Tensor cores read float32 only if it
is contiguous along the sum: other factors are transposed first. For "3xtf32" every factor is split first: each number
into its tf32 part and the tf32 part of the remainder (`tile.tf32`). A row of the copy has 16 upper parts, then their 16
lower parts, 128 bytes, and so on, so that a slice is loaded like any other.

    a slice [DEPTH, BLOCK] to shared memory, whatever its layout (`loading`)
    its numbers, 16 bytes per thread, unchanged, rounded or split, to the copy

Limited by memory: each number is read once, and written once, or twice for "3xtf32".
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ....spec import ArrayMeta, Problem
from ....spec.meta import contiguous_strides
from ...compiler.backend import Kernel, builds, cuda, f32, i32, i64, kernel, pointer, types
from ...launch.arrays import cdiv
from ...launch.step import Step
from ...tile.shared import Shared
from ...tile.storage import Storage, storage
from ...tile.tf32 import parts, rounded
from ..loading import Reading, loader
from ..product import Axis, Factor, Product, axes_of
from ..tiled import reading
from .boxed import factor_boxes

DTYPE = "float32"
DEPTH, BLOCK, THREADS = 32, 128, 256
OFTEN = 256  # least number of multiplications of a 16-bit number for which its factor is copied
GROUP = 16  # steps of the sum whose upper parts precede their lower ones


class CopyVariant(NamedTuple):
    """The compile-time values of the kernel."""

    dtype: str
    axes: int  # number of axes of the factor other than rows and steps of the sum
    reading: Reading
    with_parts: bool  # whether numbers are split, else float32 is rounded once


def factor_type(mem: Storage, axes: Any) -> Any:
    """Return the type of a `Factor` with these axes."""
    return types.NamedTuple((pointer(mem.element), axes.type, types.UniTuple(i64, 1), i64, i64), Factor)


@builds
def build_copy(found: CopyVariant) -> Kernel:
    """Build matmul_k_major(copy, x, sizes, rows, K, pitch): x [sizes, rows, K] to copy [sizes, rows, pitch]."""
    mem, axes = storage(found.dtype), axes_of(found.axes)
    shared = Shared("float32", THREADS)
    tile, SIZE = shared.tile(DEPTH, BLOCK), shared.count
    load = loader(found.dtype, found.reading, tile, THREADS)
    LINE = DEPTH // mem.vector  # threads that share a row
    ROWS = THREADS // LINE

    @kernel(pointer(mem.element), factor_type(mem, axes), axes.type, *[i64] * 3, threads=THREADS)
    def matmul_k_major(copy, x, sizes, rows, K, pitch):
        smem = cuda.shared.array(SIZE, f32, alignment=16)
        row_blocks, depth_blocks = (rows + BLOCK - 1) // BLOCK, (K + DEPTH - 1) // DEPTH
        block = i64(cuda.blockIdx.x)
        depth0, block = block % depth_blocks * DEPTH, block // depth_blocks
        row0, matrix = block % row_blocks * BLOCK, block // row_blocks
        share = load.share()
        coming = cuda.local.array(DEPTH * BLOCK // THREADS, mem.number)
        index = load.start(x, axes.at(matrix, sizes, x.batch) + depth0 * x.depth, row0, share)
        rows_left, depth_left = i32(min(rows - row0, BLOCK)), i32(min(K - depth0, DEPTH))
        load.fetch(coming, x, index, rows_left - share.row, depth_left - share.depth)
        load.put(smem, 0, share, coming)
        cuda.syncthreads()

        depth, line = cuda.threadIdx.x % LINE * mem.vector, cuda.threadIdx.x // LINE
        k = depth0 + depth
        first = (matrix * rows + row0 + line) * pitch
        upper, lower = cuda.local.array(mem.vector, mem.number), cuda.local.array(mem.vector, mem.number)
        for i in range(BLOCK // ROWS):
            for c in range(mem.vector):
                number = smem[tile.place(depth + c, line + i * ROWS)]
                if found.with_parts:
                    upper[c], lower[c] = parts(number)
                else:
                    upper[c] = rounded(number) if found.dtype == DTYPE else number
            there = row0 + line + i * ROWS < rows
            at = first + i * ROWS * pitch
            if found.with_parts:
                place = k // GROUP * GROUP + k
                mem.store_kept(copy, at + place, there & (place < pitch), upper, 0)
                mem.store_kept(copy, at + place + GROUP, there & (place < pitch), lower, 0)
            else:
                mem.store_kept(copy, at + k, there & (k < pitch), upper, 0)

    return matmul_k_major


class KMajor(NamedTuple):
    """A copy of a factor, and the launch that makes it."""

    name: str
    factor: Factor
    sizes: tuple[int, ...]  # of the factor's axes other than those of the matrix
    rows: int
    depth: int
    pitch: int  # numbers from a row of the copy to the next
    reading: Reading
    with_parts: bool
    dtype: str

    def meta(self, device: Any) -> ArrayMeta:
        shape = (prod(self.sizes), self.rows, self.pitch)
        return ArrayMeta(shape, self.dtype, contiguous_strides(shape), device, 0)

    def step(self) -> Step:
        found = CopyVariant(self.dtype, len(self.sizes), self.reading, self.with_parts)
        blocks = prod(self.sizes) * cdiv(self.rows, BLOCK) * cdiv(self.depth, DEPTH)
        return Step(
            build_copy(found), (blocks,), (self.name, self.factor, self.sizes, self.rows, self.depth, self.pitch)
        )


class Ready(NamedTuple):
    """A product in a form that tensor cores can read, its arrays, and the copies to make first."""

    product: Product
    metas: Mapping[str, ArrayMeta]
    copies: tuple[KMajor, ...]


def ready(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> Ready:
    """Return the product on copies of those factors that need one."""
    if not product.k.size:
        return Ready(product, metas, ())
    with_parts = p.precision == "3xtf32" and p.dtype == DTYPE
    copies = [
        copy_of(product, which, metas, p.dtype, with_parts)
        for which in "ab"
        if with_parts or _needs_copy(product, which, metas, p.dtype)
    ]
    made = product._replace(k=product.k._replace(size=parts_depth(product.k.size))) if with_parts else product
    for which, copied in copies:
        made = _with(made, which, copied)
    there = {copied.name: copied.meta(metas[product.names[0]].device) for _, copied in copies}
    return Ready(made, {**metas, **there}, tuple(copied for _, copied in copies))


def parts_depth(K: int) -> int:
    """Return how many numbers a row of parts has."""
    return 2 * cdiv(K, GROUP) * GROUP


def _needs_copy(product: Product, which: str, metas: Mapping[str, ArrayMeta], dtype: str) -> bool:
    """Whether a factor whose numbers are not split is copied first."""
    found = factor_boxes(product, which, metas)
    if dtype == DTYPE:
        return found is None or found.major != "k"
    return found is None and min(product.m.size, product.n.size) >= OFTEN


def _own(axes: tuple[Axis, ...], which: str) -> list[Axis]:
    """Return the axes that a factor is not broadcast along."""
    return [axis for axis in axes if axis.size > 1 and getattr(axis, which)]


def copy_of(
    product: Product, which: str, metas: Mapping[str, ArrayMeta], dtype: str, with_parts: bool
) -> tuple[str, KMajor]:
    """Return `which` and the copy of that factor, "a" or "b"."""
    vector = storage(dtype).vector
    rows = product.m if which == "a" else product.n
    around = _own((*product.batch, *product.outer), which) or [Axis(1)]
    name, K = product.names[2 if which == "a" else 3], product.k.size
    row, depth, *steps = (getattr(axis, which) for axis in (rows, product.k, *around))
    pitch = parts_depth(K) if with_parts else cdiv(K, vector) * vector
    return which, KMajor(
        f"{product.names[0]}: {which} along the sum",
        Factor(name, tuple(steps), (0,), row, depth),
        tuple(axis.size for axis in around),
        rows.size,
        K,
        pitch,
        reading(product, which, metas, dtype, (vector,), whole=True),
        with_parts,
        dtype,
    )


def _with(product: Product, which: str, copied: KMajor) -> Product:
    """Return the product with a copy in place of factor "a" or "b"."""
    step = copied.rows * copied.pitch
    axes = []
    for axis in (*product.outer[::-1], *product.batch[::-1]):
        own = bool(_own((axis,), which))
        axes.append(axis._replace(**{which: step if own else 0}))
        step *= axis.size if own else 1
    outer, batch = axes[: len(product.outer)], axes[len(product.outer) :]
    names, rows = list(product.names), "m" if which == "a" else "n"
    names[2 if which == "a" else 3] = copied.name
    return product._replace(
        names=tuple(names),
        outer=tuple(outer[::-1]),
        batch=tuple(batch[::-1]),
        k=product.k._replace(**{which: 1}),
        **{rows: getattr(product, rows)._replace(**{which: copied.pitch})},
    )
