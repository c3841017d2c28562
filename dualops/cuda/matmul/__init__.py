"""matmul on the GPU: which kernel serves which problem, and the public functions. Each rung adds one idea:

naive.py   one thread per element of the result; each operand is loaded from memory for one multiplication
simt.py    tiles in shared memory and in registers; the arithmetic of CUDA cores is the limit
sm80.py    tensor cores, fed by a ring of stages; the speed of mma.sync is the limit
sm90       Hopper's tensor cores: warpgroups multiply from shared memory, which TMA fills; persistent blocks with
           specialized warpgroups; clusters split long sums, but do not share tiles

Tensor cores multiply bfloat16 and float16, and float32 if the call has a `precision`. sm90 needs compute capability 9.0
and at most two batch axes. sm80 needs 8.0 and supports any layout. simt serves all other calls.

sm90 loads factors as boxes: one axis of each matrix is contiguous, all other strides are multiples of 16 bytes. A large
16-bit factor of another layout is copied first, and so is a float32 factor that is not contiguous along the sum
(`sm90.parts`); `plan` says which. Results are stored as boxes too, or row by row. If there are few tiles with long
sums, the blocks of a cluster split each sum (`sm90.split`). `sm90.slices` explains how long sums in float32 stay
accurate.

The rungs share: `product`, which describes forward and both gradients as matrix products by axes and strides; `tiled`,
which has the order of tiles, the epilogue and the choices of both directions; `loading`, which copies slices of a
factor of any layout to shared memory through registers; `gradient`, which has dz and dbias.

README.md explains the rungs in smaller steps, each a kernel that adds one idea. These are in examples/ladder/matmul.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from ...spec import matmul as SPEC
from ..launch.operation import Operation
from ..public import Array, Launch
from . import naive, simt, sm80, sm90


@overload
def matmul(
    a: Array,
    b: Array,
    *,
    return_preactivation: Literal[False] = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Array | None = None,
    activation: str | None = None,
    precision: str | None = None,
    **launch: Unpack[Launch],
) -> Array: ...


@overload
def matmul(
    a: Array,
    b: Array,
    *,
    return_preactivation: Literal[True],
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Array | None = None,
    activation: str | None = None,
    precision: str | None = None,
    **launch: Unpack[Launch],
) -> tuple[Array, Array]: ...


def matmul(
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Any = None,
    activation: str | None = None,
    precision: str | None = None,
    return_preactivation: bool = False,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute act(op(a) @ op(b) + bias). op transposes the last two axes if transpose_a or transpose_b says so.

    a [..., M, K] ([..., K, M] with transpose_a), b [..., K, N] ([..., N, K] with transpose_b): device arrays of one
    library and dtype (float64, float32, float16, bfloat16), of any non-negative strides, such as a transposed view's.
    The axes before the last two broadcast. bias [N]: of that dtype or float32 (float64 for float64). activation: None,
    "relu", "gelu" (by the error function) or "silu".
    precision: None, or for float32 also "tf32" or "3xtf32", which need tensor cores (8.0 and later). "tf32" rounds the
    factors to 11 bits of mantissa, to nearest; tensor cores would truncate float32. "3xtf32" splits each factor into
    two such parts; its error is like float32's. Infinities and NaN are at the same places as in float32. But numbers of
    2**128 - 2**116 and more count as infinite, and numbers below 2**-113 lose their last bits.

    Returns y [..., M, N], row-major, of a's dtype; with return_preactivation also the activation's input, which
    `matmul_backward` needs. Sums are float32 (float64 for float64) and results are rounded once. float32 is multiplied
    as tf32 only with a precision. With K = 0 the result is act(bias). Bit-equal from run to run.
    Memory in addition to the results, on Hopper: a copy of each 16-bit factor whose rows are not a multiple of 16 bytes
    long, if M and N are at least 256; for "tf32" a copy of each factor that is not contiguous along the sum; for
    "3xtf32" copies of both, twice as large. `dualops.cuda.plan` says which.
    out: an array for y, or (y, preactivation), of any strides, sharing no memory with the inputs. kernel: a rung
    instead of the best. stream: a stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError if this device or rung does not support it. No
    gradient is recorded: see dualops.torch_bridge.
    """
    params = (transpose_a, transpose_b, activation, precision, return_preactivation)
    return forward((a, b, bias), params, out, kernel, stream)


def matmul_backward(
    a: Any,
    b: Any,
    dy: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Any = None,
    preactivation: Any = None,
    dpreactivation: Any = None,
    activation: str | None = None,
    precision: str | None = None,
    return_preactivation: bool = False,
    a_gradient: bool = True,
    b_gradient: bool = True,
    bias_gradient: bool = True,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute the gradient of `matmul` from its arguments, dy [..., M, N] and, with an activation, the preactivation.

    dpreactivation [..., M, N]: the gradient of the returned preactivation, if a caller used it. a_gradient,
    b_gradient, bias_gradient: whether to compute da, db, dbias. The other arguments are those of the `matmul` call.
    Returns the requested ones of da, db and dbias (dbias only with a bias), each of the shape, dtype and order of axes
    of its input, summed over the axes along which the input was broadcast. Bit-equal from run to run: no atomics.
    Memory in addition to the results: dz, as large as dy, with an activation or dpreactivation; with a bias a row of
    sums for every 512 rows of dy; and the same copies of factors as for `matmul`, for each product.
    """
    arrays = (a, b, dy, bias, preactivation, dpreactivation)
    params = (transpose_a, transpose_b, activation, precision, return_preactivation)
    return backward(arrays, (*params, a_gradient, b_gradient, bias_gradient), out, kernel, stream)


TILED = (sm90.RUNG, sm80.RUNG, simt.RUNG)
forward = Operation(SPEC, rungs=(*(rung.forward_choices for rung in TILED), naive.forward_choices))
backward = Operation(SPEC, rungs=(*(rung.backward_choices for rung in TILED), naive.backward_choices), backward=True)
