"""matmul, the first idea: one thread an element of the result, which reads its row of a and its column of b.

    1  for each k:  total += a[m, k] * b[k, n]
    2  y[m, n] = act(total + bias[n])

An element of a is read N times, and one of b M times, from caches at the best: two loads for a multiplication and an
addition. The sum is taken in pieces of PIECE terms, and the pieces are summed with compensation (Kahan 1965), since one
float32 sum of thousands of terms loses more than the accuracy rule allows.

Any strides and dtypes. The gradients are the same kernel with other strides, and for dbias a thread a column.
"""

from __future__ import annotations

from ...spec import ArrayMeta, Problem
from ..arrays import cdiv
from ..backend import Kernel, builds, cuda, i64, kernel, pointer, types
from ..step import Step
from ..tile import numbers, storage
from .activations import activation
from .gradient import dz_name, rows_of
from .product import Product, Variant, argument_types, arguments, offsets

THREADS = 128
PIECE = 256  # terms


@builds
def build_product(variant: Variant) -> Kernel:
    """matmul_naive(y, z, a, b, bias, bias_stride, batches, outers, B, rounds, M, N, K)."""
    kept = storage(variant.dtype)
    number, load, store = kept.number, kept.load, kept.store
    load_bias = storage(variant.bias_dtype or variant.dtype).load
    add = numbers(number).add_compensated
    act = activation(variant.activation, number).value
    along_batch, along_outer = offsets(variant.batch_axes), offsets(max(variant.outer_axes, 1))
    WITH_BIAS, WITH_Z, ZERO = variant.bias_dtype is not None, variant.preactivation, number(0)

    @kernel(*argument_types(variant), threads=THREADS)
    def matmul_naive(y, z, a, b, bias, bias_stride, batches, outers, B, rounds, M, N, K):
        index = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        n, m, batch = index % N, index // N % M, index // N // M
        if batch < B:
            a_row = along_batch(batch, batches, a.batch) + m * a.row
            b_column = along_batch(batch, batches, b.batch) + n * b.row
            total, lost = ZERO, ZERO
            for r in range(rounds):
                a_at = a_row + along_outer(i64(r), outers, a.outer)
                b_at = b_column + along_outer(i64(r), outers, b.outer)
                for k0 in range(0, K, PIECE):
                    piece = ZERO
                    for k in range(k0, min(k0 + PIECE, K)):
                        piece += load(a.data, a_at + k * a.depth) * load(b.data, b_at + k * b.depth)
                    total, lost = add(total, lost, piece)
            if WITH_BIAS:
                total += load_bias(bias, n * bias_stride)
            if WITH_Z:
                store(z.data, along_batch(batch, batches, z.batch) + m * z.row + n * z.column, total)
            store(y.data, along_batch(batch, batches, y.batch) + m * y.row + n * y.column, act(total))

    return matmul_naive


@builds
def build_column_sums(dtype: str, out_dtype: str, axes: int) -> Kernel:
    """matmul_naive_column_sums(out, out_stride, x, sizes, strides, column_stride, rows, columns). A column a thread."""
    number, load, store = storage(dtype).number, storage(dtype).load, storage(out_dtype).store
    element, out_element = storage(dtype).element, storage(out_dtype).element
    add, along_rows, ZERO = numbers(number).add_compensated, offsets(axes), number(0)
    walk = types.UniTuple(i64, axes)

    @kernel(pointer(out_element), i64, pointer(element), walk, walk, *[i64] * 3, threads=THREADS)
    def matmul_naive_column_sums(out, out_stride, x, sizes, strides, column_stride, rows, columns):
        column = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if column < columns:
            total, lost = ZERO, ZERO
            for row in range(rows):
                value = load(x, along_rows(i64(row), sizes, strides) + column * column_stride)
                total, lost = add(total, lost, value)
            store(out, column * out_stride, total)

    return matmul_naive_column_sums


def product_steps(given: Product, found: Variant) -> list[Step]:
    """The launch that makes a product, if there is anything to make."""
    count = given.batches * given.m.size * given.n.size
    return [Step(build_product(found), (cdiv(count, THREADS),), arguments(given))] if count else []


def column_sums_steps(p: Problem, dbias: ArrayMeta) -> list[Step]:
    """The launch that makes dbias."""
    rows = rows_of(p)
    build = build_column_sums(p.dtype, dbias.dtype, len(rows.sizes))
    walk = (rows.sizes, rows.strides, rows.column)
    return [Step(build, (cdiv(p.N, THREADS),), ("dbias", dbias.strides[0], dz_name(p), *walk, rows.total, p.N))]
