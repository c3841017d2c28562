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

from collections.abc import Iterator
from functools import partial
from typing import Any

from ...spec import softmax as SPEC
from ..launch.device import Device
from ..launch.operation import Operation
from ..launch.plans import Choice
from ..public import Array
from ..rows import chunks, cluster, registers, reread
from ..rows.operator import choices_of_calls
from ..rows.reread import LongRowsConfig
from . import naive, strided
from .arguments import Call
from .configs import BACKWARD_BLOCKS, BLOCKS, cluster_config, ring_configs, rows_config


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


def rows_choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the kernel that keeps a row in the registers of as few threads as possible, if a row fits."""
    config = rows_config(call.N, call.dtype, call.kind.backward, call.aligned) if call.contiguous else None
    if config is not None:
        steps = partial(registers.steps_of, config, call.kind, call.arguments)
        yield Choice("simt", config, "a row fits in registers", steps)


def cluster_choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the smallest cluster whose registers can hold a row; for backward, two rows."""
    if call.contiguous and call.aligned and device.has_bulk_copies:
        config = cluster_config(call.N, call.dtype, device, BACKWARD_BLOCKS if call.kind.backward else BLOCKS)
        if config is not None:
            steps = partial(cluster.steps_of, config, call.kind, call.arguments, device)
            yield Choice("sm90", config, "a row waits in the registers of a cluster", steps)


def ring_choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the ring with the smallest cluster that can hold a row, or with the largest cluster."""
    if call.contiguous and call.aligned and device.has_bulk_copies:
        for config in ring_configs(call.N, call.dtype, call.kind.inputs, device):
            steps = partial(chunks.steps_of, config, call.kind, call.arguments)
            yield Choice("sm90", config, "a row waits in shared memory, and the next is on its way", steps)


def long_rows_choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the kernel with one block per row, which reads it twice."""
    if call.contiguous:
        config = LongRowsConfig(512, 2 if call.aligned else 8, call.aligned)
        steps = partial(reread.steps_of, config, call.kind, call.arguments)
        yield Choice("simt", config, "a row is too long to be kept, and is read twice", steps)


RUNGS = (cluster_choices, rows_choices, ring_choices, long_rows_choices, strided.choices, naive.choices)
FORWARD = choices_of_calls(Call, RUNGS, backward=False)
BACKWARD = choices_of_calls(Call, (rows_choices, cluster_choices, *RUNGS[2:]), backward=True)
forward = Operation(SPEC, rungs=FORWARD, inplace=("x",))
backward = Operation(SPEC, rungs=BACKWARD, backward=True, inplace=("y", "dy"))
