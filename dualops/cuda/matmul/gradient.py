"""What the gradients need beside products: dz, element by element, and its sums over rows.

dz = act'(z) * dy + dpreactivation     elements a thread, 16 bytes at a time where all arrays lie alike and dense
dbias = sum of dz over rows            SLAB rows a block, then the slabs' sums, in an order that is always the same
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.matmul import has_dz
from ...spec.meta import compute_dtype, contiguous_strides
from ..arrays import cdiv, collapse
from ..backend import Kernel, builds, cuda, i64, kernel, pointer
from ..step import Step
from ..tile.numbers import numbers
from ..tile.storage import access, storage
from .activations import activation
from .product import Product, a_gradient_product, axes_of, b_gradient_product

THREADS = 256
LANES, LINES = 32, 8  # of a block that sums columns
SUM_THREADS, HALVINGS = LANES * LINES, LINES.bit_length() - 1
SLAB = 512  # rows
AHEAD = 8  # rows of a thread that are on their way at once


class DzVariant(NamedTuple):
    """What the kernel of dz is built for."""

    dtype: str
    activation: str | None
    added: bool  # whether dpreactivation is there
    axes: int
    aligned: bool


@builds
def build_dz(variant: DzVariant) -> Kernel:
    """matmul_dz(dz, dy, z, added, sizes, strides of dz, dy, z, added, count)."""
    mem, vec, all_axes = storage(variant.dtype), access(variant.dtype, variant.aligned), axes_of(variant.axes)
    num, act = numbers(mem.number), activation(variant.activation, mem.number)

    @kernel(*[pointer(mem.element)] * 4, *[all_axes.type] * 5, i64, threads=THREADS)
    def matmul_dz(dz, dy, z, added, sizes, dz_strides, dy_strides, z_strides, added_strides, count):
        index = (i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x) * vec.vector
        keep = index < count
        gradient = cuda.local.array(vec.vector, mem.number)
        other = cuda.local.array(vec.vector, mem.number)
        vec.load(gradient, 0, dy, all_axes.at(index, sizes, dy_strides), keep, num.zero)
        if variant.activation is not None:
            vec.load(other, 0, z, all_axes.at(index, sizes, z_strides), keep, num.zero)
            for c in range(vec.vector):
                gradient[c] = act.pull(other[c], gradient[c])
        if variant.added:
            vec.load(other, 0, added, all_axes.at(index, sizes, added_strides), keep, num.zero)
            for c in range(vec.vector):
                gradient[c] += other[c]
        vec.store(dz, all_axes.at(index, sizes, dz_strides), keep, gradient, 0)

    return matmul_dz


@builds
def build_column_sums(dtype: str, out_dtype: str, axes: int) -> Kernel:
    """matmul_column_sums(out, slab_stride, out_stride, x, sizes, strides, column_stride, rows, columns, slab).

    out[number of a slab, column] = the sum of `slab` rows of x, compensated, each of 8 threads a part,
    AHEAD of whose loads are on their way at once.
    """
    mem, out_mem, row_axes = storage(dtype), storage(out_dtype), axes_of(axes)
    num = numbers(mem.number)

    @kernel(
        pointer(out_mem.element), i64, i64, pointer(mem.element), *[row_axes.type] * 2, *[i64] * 4, threads=SUM_THREADS
    )
    def matmul_column_sums(out, slab_stride, out_stride, x, sizes, strides, column_stride, rows, columns, slab):
        parts = cuda.shared.array(SUM_THREADS, mem.number)
        lane, line = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        column_blocks = (columns + LANES - 1) // LANES
        which = i64(cuda.blockIdx.x) // column_blocks
        column = i64(cuda.blockIdx.x) % column_blocks * LANES + lane
        total, lost = num.zero, num.zero
        end = min((which + 1) * slab, rows)
        coming = cuda.local.array(AHEAD, mem.number)
        if column < columns:
            for row in range(which * slab + line, end, LINES * AHEAD):
                for i in range(AHEAD):
                    there = i64(min(row + i * LINES, end - 1))
                    coming[i] = mem.load(x, row_axes.at(there, sizes, strides) + column * column_stride)
                for i in range(AHEAD):
                    if row + i * LINES < end:
                        total, lost = num.add_compensated(total, lost, coming[i])
        parts[line * LANES + lane] = total
        for step in range(HALVINGS):
            cuda.syncthreads()
            half = LINES >> (step + 1)
            if line < half:
                parts[line * LANES + lane] += parts[(line + half) * LANES + lane]
        if (line == 0) & (column < columns):
            out_mem.store(out, which * slab_stride + column * out_stride, parts[lane])

    return matmul_column_sums


def dz_meta(p: Problem) -> ArrayMeta:
    """dz in row-major order."""
    dy = p.arrays["dy"]
    return ArrayMeta(dy.shape, p.dtype, contiguous_strides(dy.shape), dy.device, 0)


def dz_name(p: Problem) -> str:
    """The array that has dz."""
    return "dz" if has_dz(p) else "dy"


def dz_steps(p: Problem) -> list[Step]:
    """The launch that makes dz, where it is not dy."""
    if not has_dz(p) or not p.arrays["dy"].size:
        return []
    names = ("dz", "dy", "preactivation" if p.activation else "", "dpreactivation")
    metas = {**p.arrays, "dz": dz_meta(p)}
    there = [metas[name] for name in names if name in metas]
    shape = there[0].shape
    dense = contiguous_strides(shape)  # of an array that is not there
    sizes, strides = collapse(shape, *(metas[name].strides if name in metas else dense for name in names))
    vector, count = storage(p.dtype).vector, prod(shape)
    aligned = (
        all(own == (1,) for own in strides) and count % vector == 0 and all(meta.pointer % 16 == 0 for meta in there)
    )
    sizes, strides = sizes or (1,), [stride or (0,) for stride in strides]
    found = DzVariant(p.dtype, p.activation, "dpreactivation" in metas, len(sizes), aligned)
    blocks = cdiv(count, THREADS * (vector if aligned else 1))
    return [Step(build_dz(found), (blocks,), (*names, sizes, *strides, count))]


class Rows(NamedTuple):
    """dz as rows that are summed: sizes and strides of all axes but the last, and the last one's stride."""

    meta: ArrayMeta
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    column: int

    @property
    def total(self) -> int:
        return prod(self.sizes)


def rows_of(p: Problem) -> Rows:
    meta = dz_meta(p) if has_dz(p) else p.arrays["dy"]
    sizes, (strides,) = collapse(meta.shape[:-1], meta.strides[:-1])
    return Rows(meta, sizes or (1,), strides or (0,), meta.strides[-1])


def partial_sums(p: Problem) -> dict[str, ArrayMeta]:
    """Where the sums of slabs wait, if there are several."""
    slabs = cdiv(rows_of(p).total, SLAB)
    shape = (slabs, p.N)
    device = p.arrays["dy"].device
    meta = ArrayMeta(shape, compute_dtype(p.dtype), contiguous_strides(shape), device, 0)
    return {"partial_sums": meta} if slabs > 1 else {}


def column_sums_steps(p: Problem, dbias: ArrayMeta) -> list[Step]:
    """One launch, or two where there are several slabs."""
    rows, N, blocks = rows_of(p), p.N, cdiv(p.N, LANES)
    slabs = cdiv(rows.total, SLAB)
    axes, given = len(rows.sizes), (dz_name(p), rows.sizes, rows.strides, rows.column, rows.total, N)
    if slabs <= 1:
        return [
            Step(build_column_sums(p.dtype, dbias.dtype, axes), (blocks,), ("dbias", 0, dbias.strides[0], *given, SLAB))
        ]
    number = compute_dtype(p.dtype)
    first = build_column_sums(p.dtype, number, axes)
    second = build_column_sums(number, dbias.dtype, 1)
    sums = ("partial_sums", (slabs,), (N,), 1, slabs, N)
    return [
        Step(first, (blocks * slabs,), ("partial_sums", N, 1, *given, SLAB)),
        Step(second, (blocks,), ("dbias", 0, dbias.strides[0], *sums, slabs)),
    ]


def gradient_workspace(p: Problem) -> dict[str, ArrayMeta]:
    """dz, where it is not dy."""
    return {"dz": dz_meta(p)} if has_dz(p) else {}


def gradient_metas(p: Problem, results: Mapping[str, ArrayMeta]) -> dict[str, ArrayMeta]:
    """All arrays of a gradient's products."""
    return {**p.arrays, **results, "dz": dz_meta(p)}


def gradient_products(p: Problem, results: Mapping[str, ArrayMeta]) -> dict[str, Product]:
    """The products that make da and db, of those that are wanted and not empty."""
    metas, dz = gradient_metas(p, results), dz_name(p)
    made = {"da": a_gradient_product, "db": b_gradient_product}
    return {name: make(p, metas, dz) for name, make in made.items() if name in results and results[name].size}
