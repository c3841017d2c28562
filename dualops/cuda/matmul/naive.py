"""matmul, the plainest kernel: each thread computes one element of the result from a row of a and a column of b.

    1  for each k:  total += a[m, k] * b[k, n]
    2  y[m, n] = act(total + bias[n])

Each element of a is read N times, and each of b M times, at best from caches: two loads for a multiplication and an
addition. The sum has pieces of PIECE terms, which are added with compensation (Kahan 1965): the error of a single
float32 sum of thousands of terms would exceed the accuracy rule.

Any strides and dtypes. The gradients are the same kernel with other strides; for dbias each thread sums a column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ..compiler.backend import Kernel, builds, cuda, i64, kernel
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..launch.views import strided
from ..tile.numbers import numbers
from ..tile.storage import storage
from .activations import activation
from .gradient import dz_name, dz_steps, gradient_products, gradient_workspace, rows_of
from .product import (
    Product,
    Variant,
    argument_types,
    arguments,
    axes_of,
    forward_product,
    needs_tensor_cores,
    product_axes,
    variant,
)

THREADS = 128
PIECE = 256  # terms of a piece


@builds
def build_product(variant: Variant) -> Kernel:
    """Build matmul_naive, whose arguments are `product.arguments`."""
    mem, bias_mem = storage(variant.dtype), storage(variant.bias_dtype or variant.dtype)
    num, act = numbers(mem.number), activation(variant.activation, mem.number)
    axes = product_axes(variant)

    @kernel(*argument_types(variant), threads=THREADS)
    def matmul_naive(y, z, a, b, bias, sizes):
        index = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        n, m, batch = index % sizes.N, index // sizes.N % sizes.M, index // sizes.N // sizes.M
        if batch < sizes.B:
            a_row = axes.batch.at(batch, sizes.batches, a.batch) + m * a.row
            b_column = axes.batch.at(batch, sizes.batches, b.batch) + n * b.row
            total, lost = num.zero, num.zero
            for r in range(sizes.rounds):
                a_at = a_row + axes.outer.at(i64(r), sizes.outers, a.outer)
                b_at = b_column + axes.outer.at(i64(r), sizes.outers, b.outer)
                for k0 in range(0, sizes.K, PIECE):
                    piece = num.zero
                    for k in range(k0, min(k0 + PIECE, sizes.K)):
                        piece += mem.load(a.data, a_at + k * a.depth) * mem.load(b.data, b_at + k * b.depth)
                    total, lost = num.add_compensated(total, lost, piece)
            if variant.has_bias:
                total += bias_mem.load(bias.data, n * bias.stride)
            if variant.preactivation:
                mem.store(z.data, axes.batch.at(batch, sizes.batches, z.batch) + m * z.row + n * z.column, total)
            y_at = axes.batch.at(batch, sizes.batches, y.batch) + m * y.row + n * y.column
            mem.store(y.data, y_at, act.value(total))

    return matmul_naive


@builds
def build_column_sums(dtype: str, out_dtype: str, axes: int) -> Kernel:
    """Build matmul_naive_column_sums(out, x, sizes, rows, columns): one column per thread, see `gradient.Rows`."""
    mem, out_mem, row_axes = storage(dtype), storage(out_dtype), axes_of(axes)
    num = numbers(mem.number)

    @kernel(strided(out_dtype, 1), strided(dtype, axes + 1), row_axes.type, i64, i64, threads=THREADS)
    def matmul_naive_column_sums(out, x, sizes, rows, columns):
        column = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if column < columns:
            total, lost = num.zero, num.zero
            for row in range(rows):
                value = mem.load(x.data, row_axes.at(i64(row), sizes, x.strides) + column * x.strides[-1])
                total, lost = num.add_compensated(total, lost, value)
            out_mem.store(out.data, column * out.strides[0], total)

    return matmul_naive_column_sums


def product_steps(given: Product, found: Variant) -> list[Step]:
    """Return the launch that computes a product, none for an empty one."""
    count = given.batches * given.m.size * given.n.size
    return [Step(build_product(found), (cdiv(count, THREADS),), arguments(given))] if count else []


def column_sums_steps(p: Problem, dbias: ArrayMeta) -> list[Step]:
    """Return the launch that computes dbias."""
    rows = rows_of(p)
    build = build_column_sums(p.dtype, dbias.dtype, len(rows.sizes))
    args = (Strided("dbias", dbias.strides), rows.argument(dz_name(p)), rows.sizes, rows.total, p.N)
    return [Step(build, (cdiv(p.N, THREADS),), args)]


REASON = "one thread per element: each load serves one multiplication"


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel for y: one thread per element."""
    if not needs_tensor_cores(problem):
        product = forward_product(problem, {**problem.arrays, **results})
        yield Choice("naive", None, REASON, partial(product_steps, product, variant(product, problem)))


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernels of the gradients: one thread per element."""
    if not needs_tensor_cores(problem):
        workspace = gradient_workspace(problem)
        yield Choice("naive", None, REASON, partial(_backward_steps, problem, results), workspace)


def _backward_steps(problem: Problem, results: Mapping[str, ArrayMeta]) -> list[Step]:
    steps = dz_steps(problem)
    for product in gradient_products(problem, results).values():
        steps += product_steps(product, variant(product, problem))
    if "dbias" in results and problem.N:
        steps += column_sums_steps(problem, results["dbias"])
    return steps
