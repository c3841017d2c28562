"""The parts of matmul's gradients that are not products: dz, element by element, and its sums over rows.

dz = act'(z) * dy + dpreactivation     16 bytes per thread if all arrays are dense with one order of axes, else one
                                       element
dbias = sum of dz over rows            each block sums a slab of rows, 16 bytes at a time if rows are aligned; a second
                                       launch adds the slabs' sums in a fixed order
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.matmul import has_dz
from ...spec.meta import Strided, compute_dtype, contiguous_strides
from ..compiler.backend import Kernel, builds, cuda, i64, kernel
from ..launch.arrays import align_up, cdiv, collapse
from ..launch.step import Step
from ..launch.views import strided
from ..tile.numbers import numbers
from ..tile.storage import access, storage
from .activations import activation
from .product import Product, a_gradient_product, axes_of, b_gradient_product

THREADS = 256
LANES, LINES = 32, 8  # lanes and lines of a block that sums columns
SUM_THREADS = LANES * LINES
VECTORS_AHEAD, ELEMENTS_AHEAD = 4, 8  # loads that a thread has in flight
SUM_BLOCKS = 1024  # most blocks for the rows: almost two waves of four blocks on each SM of an H200
LEAST_SLAB = 128  # least rows of a slab


class DzVariant(NamedTuple):
    """The compile-time values of the kernel of dz."""

    dtype: str
    activation: str | None
    added: bool  # whether dpreactivation is given
    axes: int
    aligned: bool


@builds
def build_dz(variant: DzVariant) -> Kernel:
    """Build matmul_dz(dz, dy, z, added, sizes, count). added: dpreactivation; count: elements."""
    mem, vec, all_axes = storage(variant.dtype), access(variant.dtype, variant.aligned), axes_of(variant.axes)
    num, act = numbers(mem.number), activation(variant.activation, mem.number)

    @kernel(*[strided(variant.dtype, variant.axes)] * 4, all_axes.type, i64, threads=THREADS)
    def matmul_dz(dz, dy, z, added, sizes, count):
        index = (i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x) * vec.vector
        keep = index < count
        gradient = cuda.local.array(vec.vector, mem.number)
        other = cuda.local.array(vec.vector, mem.number)
        vec.load(gradient, 0, dy.data, all_axes.at(index, sizes, dy.strides), keep, num.zero)
        if variant.activation is not None:
            vec.load(other, 0, z.data, all_axes.at(index, sizes, z.strides), keep, num.zero)
            for c in range(vec.vector):
                gradient[c] = act.pull(other[c], gradient[c])
        if variant.added:
            vec.load(other, 0, added.data, all_axes.at(index, sizes, added.strides), keep, num.zero)
            for c in range(vec.vector):
                gradient[c] += other[c]
        vec.store(dz.data, all_axes.at(index, sizes, dz.strides), keep, gradient, 0)

    return matmul_dz


class SumsVariant(NamedTuple):
    """The compile-time values of the kernel of column sums."""

    dtype: str
    out_dtype: str
    axes: int
    aligned: bool

    @property
    def width(self) -> int:
        """Return the columns of a block."""
        return LANES * access(self.dtype, self.aligned).vector


@builds
def build_column_sums(variant: SumsVariant) -> Kernel:
    """Build matmul_column_sums(out, x, sizes, rows, columns, slab).

    out[i, column] = the compensated sum of the `slab` rows of slab i of x. A block has 8 lines of 32 lanes, and each
    line has every 8th row. A lane has 16 bytes of a row if rows are aligned and x's last stride, that of columns, is 1,
    else one element. sizes: sizes of the axes of x that are its rows.
    """
    mem, vec, out_mem = storage(variant.dtype), access(variant.dtype, variant.aligned), storage(variant.out_dtype)
    num, row_axes = numbers(mem.number), axes_of(variant.axes)
    AHEAD = VECTORS_AHEAD if variant.aligned else ELEMENTS_AHEAD
    PITCH = variant.width + vec.vector  # one slot in 33 is unused, so that lanes write and read different banks

    @kernel(
        strided(variant.out_dtype, 2),
        strided(variant.dtype, variant.axes + 1),
        row_axes.type,
        *[i64] * 3,
        threads=SUM_THREADS,
        min_blocks=4 if variant.axes == 1 else 1,  # four with 64 registers; divisions for several axes would spill then
    )
    def matmul_column_sums(out, x, sizes, rows, columns, slab):
        parts = cuda.shared.array(LINES * PITCH, mem.number)
        coming = cuda.local.array(AHEAD * vec.vector, mem.number)
        total = cuda.local.array(vec.vector, mem.number)
        lost = cuda.local.array(vec.vector, mem.number)
        tid = cuda.threadIdx.x
        lane, line = tid % LANES, tid // LANES
        column_blocks = (columns + variant.width - 1) // variant.width
        which = i64(cuda.blockIdx.x) // column_blocks
        first = i64(cuda.blockIdx.x) % column_blocks * variant.width
        column = first + lane * vec.vector
        end = min((which + 1) * slab, rows)
        for c in range(vec.vector):
            total[c], lost[c] = num.zero, num.zero
        for row in range(which * slab + line, end, LINES * AHEAD):
            for i in range(AHEAD):
                there = row + i * LINES
                index = row_axes.at(there, sizes, x.strides) + column * x.strides[-1]
                vec.load(coming, i * vec.vector, x.data, index, (there < end) & (column < columns), num.zero)
            for i in range(AHEAD * vec.vector):  # in two loops, sm_100's compiler would put `coming` on the stack
                c = i % vec.vector
                total[c], lost[c] = num.add_compensated(total[c], lost[c], coming[i])
        mine = line * PITCH + lane * vec.vector + lane * vec.vector // LANES
        for c in range(vec.vector):
            parts[mine + c] = total[c]
        cuda.syncthreads()
        if (tid < variant.width) & (first + tid < columns):  # one column per thread
            result, rest = num.zero, num.zero
            for other in range(LINES):
                result, rest = num.add_compensated(result, rest, parts[other * PITCH + tid + line])
            out_mem.store(out.data, which * out.strides[0] + (first + tid) * out.strides[1], result)

    return matmul_column_sums


def dz_meta(p: Problem) -> ArrayMeta:
    """Return the metadata of dz, in row-major order."""
    dy = p.arrays["dy"]
    return ArrayMeta(dy.shape, p.dtype, contiguous_strides(dy.shape), dy.device, 0)


def dz_name(p: Problem) -> str:
    """Return the name of the array that has dz."""
    return "dz" if has_dz(p) else "dy"


def dz_steps(p: Problem) -> list[Step]:
    """Return the launch that computes dz, if dz is not dy."""
    if not has_dz(p) or not p.arrays["dy"].size:
        return []
    names = ("dz", "dy", "preactivation" if p.activation else "", "dpreactivation")
    metas = {**p.arrays, "dz": dz_meta(p)}
    there = [metas[name] for name in names if name in metas]
    shape = there[0].shape
    dense = contiguous_strides(shape)  # the strides of a missing array
    sizes, strides = collapse(shape, *(metas[name].strides if name in metas else dense for name in names))
    vector, count = storage(p.dtype).vector, prod(shape)
    aligned = (
        all(own == (1,) for own in strides) and count % vector == 0 and all(meta.pointer % 16 == 0 for meta in there)
    )
    sizes, strides = sizes or (1,), [stride or (0,) for stride in strides]
    found = DzVariant(p.dtype, p.activation, "dpreactivation" in metas, len(sizes), aligned)
    blocks = cdiv(count, THREADS * (vector if aligned else 1))
    return [Step(build_dz(found), (blocks,), (*map(Strided, names, strides), sizes, count))]


class Rows(NamedTuple):
    """dz as rows to sum: sizes and strides of all axes except the last, and the last one's stride."""

    meta: ArrayMeta
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    column: int

    def argument(self, name: str) -> Strided:
        """Return the array as a kernel's argument."""
        return Strided(name, (*self.strides, self.column))

    @property
    def total(self) -> int:
        return prod(self.sizes)

    @property
    def aligned(self) -> bool:
        """Return whether the rows can be read 16 bytes at a time."""
        vector = storage(self.meta.dtype).vector
        steps = (self.meta.shape[-1], *self.strides)
        return self.column == 1 and self.meta.pointer % 16 == 0 and all(step % vector == 0 for step in steps)

    def sums(self, out_dtype: str) -> SumsVariant:
        """Return the variant of the kernel that sums the rows."""
        return SumsVariant(self.meta.dtype, out_dtype, len(self.sizes), self.aligned)

    @property
    def column_blocks(self) -> int:
        """Return the number of blocks that share a slab."""
        return cdiv(self.meta.shape[-1], self.sums(self.meta.dtype).width)

    @property
    def slab(self) -> int:
        """Return the rows that a block sums: whole iterations of its loads."""
        slabs = cdiv(SUM_BLOCKS, max(self.column_blocks, 1))
        return max(LEAST_SLAB, align_up(cdiv(self.total, slabs), LINES * VECTORS_AHEAD))

    @property
    def slabs(self) -> int:
        return cdiv(self.total, self.slab)


def rows_of(p: Problem) -> Rows:
    meta = dz_meta(p) if has_dz(p) else p.arrays["dy"]
    sizes, (strides,) = collapse(meta.shape[:-1], meta.strides[:-1])
    return Rows(meta, sizes or (1,), strides or (0,), meta.strides[-1])


def partial_sums(p: Problem) -> dict[str, ArrayMeta]:
    """Return the array for the slabs' sums, if there are several slabs."""
    slabs = rows_of(p).slabs
    shape = (slabs, p.N)
    device = p.arrays["dy"].device
    meta = ArrayMeta(shape, compute_dtype(p.dtype), contiguous_strides(shape), device, 0)
    return {"partial_sums": meta} if slabs > 1 else {}


def column_sums_steps(p: Problem, dbias: ArrayMeta) -> list[Step]:
    """Return the launch that computes dbias, or two launches if there are several slabs."""
    rows, N, number = rows_of(p), p.N, compute_dtype(p.dtype)
    blocks, slabs, out = rows.column_blocks, rows.slabs, Strided("dbias", (0, dbias.strides[0]))
    walk = (rows.argument(dz_name(p)), rows.sizes, rows.total, N, rows.slab)
    if slabs <= 1:
        return [Step(build_column_sums(rows.sums(dbias.dtype)), (blocks,), (out, *walk))]
    # the second launch has few rows: reading elements spreads their columns over more blocks
    again, sums = SumsVariant(number, dbias.dtype, 1, aligned=False), Strided("partial_sums", (N, 1))
    return [
        Step(build_column_sums(rows.sums(number)), (blocks * slabs,), (sums, *walk)),
        Step(build_column_sums(again), (cdiv(N, again.width),), (out, sums, (slabs,), slabs, N, slabs)),
    ]


def gradient_workspace(p: Problem) -> dict[str, ArrayMeta]:
    """Return the metadata of dz, if dz is not dy."""
    return {"dz": dz_meta(p)} if has_dz(p) else {}


def gradient_metas(p: Problem, results: Mapping[str, ArrayMeta]) -> dict[str, ArrayMeta]:
    """Return the metadata of all arrays of a gradient's products."""
    return {**p.arrays, **results, "dz": dz_meta(p)}


def gradient_products(p: Problem, results: Mapping[str, ArrayMeta]) -> dict[str, Product]:
    """Return the products for da and db that are requested and not empty."""
    metas, dz = gradient_metas(p, results), dz_name(p)
    made = {"da": a_gradient_product, "db": b_gradient_product}
    return {name: make(p, metas, dz) for name, make in made.items() if name in results and results[name].size}
