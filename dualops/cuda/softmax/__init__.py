"""softmax on the GPU: which kernel serves which problem, and the public functions. To learn how, begin with README.md.

../rows/registers.py  contiguous rows kept in registers: a warp, some warps or a block a row
../rows/cluster.py  contiguous rows of 32 KiB to 1 MiB (backward 512 KiB), in the registers of a cluster, on sm_90
../rows/chunks.py  contiguous rows spread over a cluster of blocks and copied ahead, on sm_90: they wait in stages; a
              part is read again of rows longer than 3 MB (backward 1.5)
../rows/reread.py  contiguous rows too long for that: two readings
strided.py    any axis of any layout: two readings
naive.py      contiguous rows, one thread each: three readings
examples/ladder/softmax has the steps between naive.py and rows/registers.py, for README.md
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...spec import softmax as SPEC
from ..launch.operation import Operation
from ..public import Array
from . import naive, strided
from .rungs import cluster_choices, long_rows_choices, ring_choices, rows_choices


def softmax(
    x: Array, axis: int = -1, *, out: Array | None = None, kernel: str | None = None, stream: Any = None
) -> Array:
    """exp(x) / sum(exp(x)) along `axis`; Milakov & Gimelshein 2018, arXiv:1805.02867.

    x: a device array of float64, float32, float16 or bfloat16, of any shape and non-negative strides. Returns an array
    of the same library, shape, dtype and memory order. Arithmetic is float32 (float64 for float64), the result is
    rounded once. out: an array to write to, which may be x itself. kernel: "naive", "simt" or "sm90" instead of the
    best. stream: a stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError for rows that lie in memory along more than
    three strides, and where a rung was asked for that does contiguous rows alone: "naive" and "sm90". No gradient is
    recorded: see dualops.torch_bridge.
    """
    return forward((x,), (axis,), out, kernel, stream)


def softmax_backward(
    y: Array, dy: Array, axis: int = -1, *, out: Array | None = None, kernel: str | None = None, stream: Any = None
) -> Array:
    """The gradient of softmax with respect to x: dx = y * (dy - sum(y * dy)).

    y: what softmax returned; dy: the gradient of that, of the same shape and dtype. Returns dx in y's memory order.
    out, which may be y or dy itself, kernel, stream and errors as for `softmax`.
    """
    return backward((y, dy), (axis,), out, kernel, stream)


RUNGS = (cluster_choices, rows_choices, ring_choices, long_rows_choices, strided.choices, naive.choices)
BACKWARD = (rows_choices, cluster_choices, *RUNGS[2:])
forward = Operation(SPEC, rungs=tuple(partial(rung, False) for rung in RUNGS), inplace=("x",))
backward = Operation(SPEC, rungs=tuple(partial(rung, True) for rung in BACKWARD), backward=True, inplace=("y", "dy"))
