"""softmax on the GPU: which kernel serves which problem, and the public functions. To learn how, begin with README.md.

../rows/registers.py  contiguous rows kept in registers: a warp, several warps or a block per row
../rows/cluster.py    contiguous rows of 32 KiB to 1 MiB (backward: 512 KiB) in the registers of a cluster, on sm_90
../rows/chunks.py     longer contiguous rows in the shared memory of a cluster, copied in advance, on sm_90; a part of
                      rows of more than 3 MB (backward: 1.5 MB) is read twice
../rows/reread.py     contiguous rows that are too long for these, read twice
strided.py            any axis of any layout, read twice
naive.py              contiguous rows, one thread each, read three times

For README.md, examples/ladder/softmax has the steps between naive.py and rows/registers.py.
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
    """Compute exp(x) / sum(exp(x)) along `axis`; Milakov & Gimelshein 2018, arXiv:1805.02867.

    x: a device array of float64, float32, float16 or bfloat16, of any shape and non-negative strides. Returns an array
    of the same library, shape, dtype and memory order. Arithmetic is float32 (float64 for float64), and the result is
    rounded once. out: an array to write to, which may be x itself. kernel: "naive", "simt" or "sm90" instead of the
    best. stream: a stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call. Raises NotImplementedError for rows that need more than three
    strides, and for rows that are not contiguous if kernel is "naive" or "sm90". No gradient is recorded: see
    dualops.torch_bridge.
    """
    return forward((x,), (axis,), out, kernel, stream)


def softmax_backward(
    y: Array, dy: Array, axis: int = -1, *, out: Array | None = None, kernel: str | None = None, stream: Any = None
) -> Array:
    """Return the gradient of softmax with respect to x: dx = y * (dy - sum(y * dy)).

    y: softmax's result. dy: its gradient, of the same shape and dtype. Returns dx in y's memory order. out may be y or
    dy itself. kernel, stream and errors are those of `softmax`.
    """
    return backward((y, dy), (axis,), out, kernel, stream)


RUNGS = (cluster_choices, rows_choices, ring_choices, long_rows_choices, strided.choices, naive.choices)
BACKWARD = (rows_choices, cluster_choices, *RUNGS[2:])
forward = Operation(SPEC, rungs=tuple(partial(rung, False) for rung in RUNGS), inplace=("x",))
backward = Operation(SPEC, rungs=tuple(partial(rung, True) for rung in BACKWARD), backward=True, inplace=("y", "dy"))
