"""matmul on the GPU: which kernel serves which problem, and the public functions. A ladder, one idea a rung:

naive.py   a thread an element of the result; every operand comes from memory, and is loaded for one multiplication
simt.py    tiles in shared memory and in registers: limited by what CUDA cores multiply
sm80.py    tensor cores, fed by a ring of stages: limited by what mma.sync multiplies
sm90       the same on Hopper: products of a warpgroup out of shared memory, which copies of boxes fill; persistent
           blocks of warpgroups with different work; clusters split long sums, and share no tiles

Tensor cores multiply bfloat16 and float16, and float32 in a precision that the caller asks for: sm90 on compute
capability 9.0, with up to two batch axes, sm80 on 8.0 and later with any layout; simt does what is left.

sm90 loads factors as boxes: an axis of each matrix contiguous, all else 16 bytes or a multiple apart. A large factor of
16 bits that does not lie so is copied first, and so is float32 that is not contiguous along the sum (`sm90.parts`);
`plan` says which. Results go out as boxes too, or row by row. Few tiles of long sums are split over the blocks of
clusters (`sm90.split`). `sm90.pieces` says how long sums of float32 stay exact.

What the rungs share: `product` has a matrix product by its axes and strides, as which forward and both gradients are
launched; `tiled` which block makes which tile, what is done with sums, and the choices of both directions; `loading`
brings a factor of any layout into shared memory by way of registers; `gradient` has dz and dbias.

README.md explains them in smaller steps, each a kernel with one idea more, which are in examples/ladder/matmul.
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
    """act(op(a) @ op(b) + bias), where op transposes the last two axes if it is told to.

    a [..., M, K] ([..., K, M] with transpose_a), b [..., K, N] ([..., N, K] with transpose_b): device arrays of one
    library and dtype (float64, float32, float16, bfloat16), of any non-negative strides, the axes before the last two
    broadcasting; a transposed view is as good as the transposed array. bias [N] of that dtype or float32 (float64 for
    float64). activation: None, "relu", "gelu" (by the error function) or "silu".
    precision, of float32 alone: None; "tf32", which rounds the factors to 11 bits of mantissa (to nearest: raw float32
    would be cut off by tensor cores); "3xtf32", which splits each in two such parts, with an error like float32's:
    infinities and NaN are where float32 has them, but numbers from 2**128 - 2**116 on count as infinite, and of those
    below 2**-113 the last bits are lost. Both need tensor cores (8.0 and later).

    Returns y [..., M, N], row-major, of a's dtype; with return_preactivation also what the activation came upon, which
    backward takes. Sums are float32 (float64 for float64), results are rounded once; float32 is never multiplied as
    tf32 unasked. K = 0 leaves act(bias). Bit-equal from run to run. Memory beside the results: on Hopper copies of each
    factor of 16 bits whose rows are no multiple of 16 bytes, where M and N are 256 or more; of each that does not lie
    along the sum, for "tf32"; of both, twice as large, for "3xtf32". `dualops.cuda.plan` says which.
    out: an array for y, or (y, preactivation), of any strides, sharing no memory with the inputs. kernel: a rung
    instead of the best. stream: a stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError where this device or rung can't do it. No
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
    """The gradient of `matmul`, from what it took, dy [..., M, N] and, beside an activation, the preactivation.

    dpreactivation [..., M, N]: the gradient of the preactivation as a result, where it was used. a_gradient,
    b_gradient, bias_gradient: whether da, db, dbias are wanted. The other arguments are those of `matmul`, and must be
    what they were.
    Returns those of da, db and dbias that are wanted (dbias where there is a bias), each of the shape, dtype and order
    of axes of its input, summed over what that was broadcast along. Bit-equal from run to run: no atomics. Beside the
    results there is dz, as large as dy, where there is an activation or dpreactivation, a row of sums for every 512
    rows of dy where there is a bias, and the copies of factors that each product needs as `matmul` does.
    """
    arrays = (a, b, dy, bias, preactivation, dpreactivation)
    params = (transpose_a, transpose_b, activation, precision, return_preactivation)
    return backward(arrays, (*params, a_gradient, b_gradient, bias_gradient), out, kernel, stream)


forward = Operation(
    SPEC,
    rungs=(sm90.forward_choices, sm80.forward_choices, simt.forward_choices, naive.forward_choices),
)
backward = Operation(
    SPEC,
    rungs=(sm90.backward_choices, sm80.backward_choices, simt.backward_choices, naive.backward_choices),
    backward=True,
)
