"""matmul in NumPy: the plain form, the tiled form, and the gradient.

Shapes below: a and b after their transposes, [..., M, K] and [..., K, N]; the axes before the last two broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erfc, pi, sqrt
from typing import Any, Literal, overload

import numpy as np

from ..spec import matmul as SPEC
from ._rounding import arithmetic, bound


@overload
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    *,
    return_preactivation: Literal[False] = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    precision: str | None = None,
) -> np.ndarray: ...


@overload
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    *,
    return_preactivation: Literal[True],
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    precision: str | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...


def matmul(
    a: np.ndarray,
    b: np.ndarray,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    precision: str | None = None,
    return_preactivation: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """act(op(a) @ op(b) + bias), where op transposes the last two axes on request.

    a [..., M, K] ([..., K, M] with transpose_a), b [..., K, N] ([..., N, K] with transpose_b) of one dtype (float64,
    float32, float16, bfloat16); the axes before the last two broadcast. bias [N] of that dtype or float32 (float64 for
    float64). activation: None, "relu", "gelu" (exact, by the error function) or "silu". precision: how float32 is
    multiplied: None (as float32), "tf32" or "3xtf32". float64 is always multiplied as float64; 16-bit dtypes accept no
    precision.

    Returns y [..., M, N] of a's dtype; with return_preactivation also the activation's input. Arithmetic is float32
    (float64 for float64), results are rounded once. K = 0 leaves act(bias).
    Raises TypeError and ValueError for a wrong call.
    """
    problem, _ = bound(SPEC, locals())
    with np.errstate(all="ignore"):
        left, right = _op(a, problem.transpose_a), _op(b, problem.transpose_b)  # [..., M, K], [..., K, N]
        z = _product(left, right, problem.precision)  # [..., M, N]
        if bias is not None:
            z = z + arithmetic(bias)  # [..., M, N]
        y = _activate(z, problem.activation)  # [..., M, N]
    return (y.astype(a.dtype), z.astype(a.dtype)) if problem.return_preactivation else y.astype(a.dtype)


def matmul_tiled(a: np.ndarray, b: np.ndarray, tile: int = 32, depth: int = 8) -> np.ndarray:
    """a [M, K] @ b [K, N] as the kernel of the rung simt computes it: one tile of the result at a time.

    Each tile is the sum of products of thin slices, `depth` columns of a and as many rows of b. A slice is read once
    for tile * tile * depth multiplications; a GPU keeps it in shared memory.
    """
    bound(SPEC, {"a": a, "b": b, "bias": None, **{param.name: param.default for param in SPEC.params}})
    left, right = arithmetic(a), arithmetic(b)
    (M, K), N = a.shape, b.shape[1]
    y = np.empty((M, N), a.dtype)
    for m0 in range(0, M, tile):
        for n0 in range(0, N, tile):
            rows, columns = slice(m0, m0 + tile), slice(n0, n0 + tile)
            acc = np.zeros(y[rows, columns].shape, left.dtype)  # [tile, tile]
            for k0 in range(0, K, depth):
                a_slice = left[rows, k0 : k0 + depth]  # [tile, depth]
                b_slice = right[k0 : k0 + depth, columns]  # [depth, tile]
                acc += a_slice @ b_slice
            y[rows, columns] = acc
    return y


def matmul_backward(
    a: np.ndarray,
    b: np.ndarray,
    dy: np.ndarray,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: np.ndarray | None = None,
    preactivation: np.ndarray | None = None,
    dpreactivation: np.ndarray | None = None,
    activation: str | None = None,
    precision: str | None = None,
    return_preactivation: bool = False,
    a_gradient: bool = True,
    b_gradient: bool = True,
    bias_gradient: bool = True,
) -> np.ndarray | tuple[np.ndarray, ...]:
    """The gradient, from forward's inputs, dy [..., M, N] and, with an activation, the preactivation.

    dpreactivation [..., M, N]: the gradient of the preactivation as a result, if it was used. a_gradient, b_gradient,
    bias_gradient: whether to return da, db, dbias.
    Returns the requested ones of da, db and dbias (dbias only with a bias), each of the shape and dtype of its input.
    dz is rounded to a's dtype before it is multiplied with a matrix.
    """
    problem, _ = bound(SPEC, locals(), backward=True)
    gradients = []
    with np.errstate(all="ignore"):
        # dL/dz = dL/dy * act'(z), plus the gradient of z as a result
        dz = arithmetic(dy)  # [..., M, N]
        if problem.activation is not None:
            assert preactivation is not None  # `bound` requires it
            dz = _slopes(arithmetic(preactivation), dz, problem.activation)  # [..., M, N]
        if dpreactivation is not None:
            dz = dz + arithmetic(dpreactivation)  # [..., M, N]
        dz = arithmetic(dz.astype(a.dtype))
        # z_mn = sum_k a_mk b_kn + bias_n:  dL/da_mk = sum_n dL/dz_mn b_kn,  dL/db_kn = sum_m a_mk dL/dz_mn
        if problem.a_gradient:
            right = _op(b, problem.transpose_b)  # [..., K, N]
            da = _product(dz, right.swapaxes(-1, -2), problem.precision)  # [..., M, K]
            gradients.append(_sum_to(_op(da, problem.transpose_a), a.shape).astype(a.dtype))
        if problem.b_gradient:
            left = _op(a, problem.transpose_a)  # [..., M, K]
            db = _product(left.swapaxes(-1, -2), dz, problem.precision)  # [..., K, N]
            gradients.append(_sum_to(_op(db, problem.transpose_b), b.shape).astype(b.dtype))
        if bias is not None and problem.bias_gradient:
            gradients.append(_sum_to(dz, bias.shape).astype(bias.dtype))
    return gradients[0] if len(gradients) == 1 else tuple(gradients)


def _op(x: np.ndarray, transposed: bool) -> np.ndarray:
    wide = arithmetic(x)
    return wide.swapaxes(-1, -2) if transposed else wide


def _product(left: np.ndarray, right: np.ndarray, precision: str | None) -> np.ndarray:
    if precision is None or left.dtype != np.float32:
        return left @ right
    if precision == "tf32":
        return as_tf32(left) @ as_tf32(right)
    # (A + a)(B + b) = AB + Ab + aB + ab; ab is below float32's last bit
    (upper_left, lower_left), (upper_right, lower_right) = tf32_parts(left), tf32_parts(right)
    return upper_left @ upper_right + (upper_left @ lower_right + lower_left @ upper_right)


def as_tf32(x: np.ndarray) -> np.ndarray:
    """Round float32 numbers to 11 bits of mantissa, ties away from zero, as cvt.rna.tf32 does."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def tf32_parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split float32 numbers into sums of two 11-bit numbers, to a last bit of float32.

    A number without such parts is split into (1 with its sign, the number). An infinity then meets only the other
    factor's upper part, which has that factor's sign or is 0 like it. So a product is infinite or NaN exactly where the
    float32 product is.
    """
    upper = as_tf32(x)
    finite = np.isfinite(upper)
    lower = as_tf32(np.where(finite, x - np.where(finite, upper, 0), upper))
    return np.where(finite, upper, np.copysign(np.float32(1), upper)), lower


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum x over the axes that an array of `shape` was broadcast along to get x's shape."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    spread = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(axis=spread, keepdims=True)


# --- activations: values act(z), and act'(z) * dy ------------------------------------------------


def _activate(z: np.ndarray, activation: str | None) -> np.ndarray:
    return z if activation is None else _ACTIVATIONS[activation][0](z)


def _slopes(z: np.ndarray, dy: np.ndarray, activation: str) -> np.ndarray:
    return _ACTIVATIONS[activation][1](z, dy)


def _relu(z: np.ndarray) -> np.ndarray:
    return np.where(z <= 0, 0, z).astype(z.dtype)


def _relu_slopes(z: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return np.where(z <= 0, 0, dy).astype(z.dtype)


def _gelu(z: np.ndarray) -> np.ndarray:
    return z * _normal_cdf(z)


def _gelu_slopes(z: np.ndarray, dy: np.ndarray) -> np.ndarray:
    density = np.exp(-z * z / 2) * z.dtype.type(1 / sqrt(2 * pi))
    return dy * (_normal_cdf(z) + z * density)


def _normal_cdf(z: np.ndarray) -> np.ndarray:
    """Phi(z) = erfc(-z / sqrt(2)) / 2. NumPy has no error function: Python's, number by number."""
    scaled = np.ascontiguousarray(z * z.dtype.type(-1 / sqrt(2)), np.float64).reshape(-1)
    values = np.fromiter(map(erfc, scaled.data), np.float64, z.size)
    return (values / 2).astype(z.dtype).reshape(z.shape)


def _silu(z: np.ndarray) -> np.ndarray:
    return z / (1 + np.exp(-z))


def _silu_slopes(z: np.ndarray, dy: np.ndarray) -> np.ndarray:
    sigmoid = 1 / (1 + np.exp(-z))
    return dy * (sigmoid * (1 + z * (1 - sigmoid)))


_ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": (_relu, _relu_slopes),
    "gelu": (_gelu, _gelu_slopes),
    "silu": (_silu, _silu_slopes),
}
