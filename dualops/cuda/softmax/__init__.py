"""softmax on the GPU: which kernel serves which problem, and the public functions.

rows.py       contiguous rows kept in registers: a few lanes, a block or a cluster of blocks a row
long_rows.py  contiguous rows too long for that: two readings
strided.py    any axis of any layout: two readings
naive.py      one thread a row: three readings
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ...spec import ArrayMeta, Problem
from ...spec import softmax as SPEC
from ...spec.base import itemsize
from ..arrays import collapse
from ..device import Device
from ..launch import Choice, Operation, Step
from ..tile import storage
from . import long_rows, naive, rows, strided
from .long_rows import LongRowsConfig
from .naive import NaiveConfig
from .rows import RowsConfig
from .strided import StridedConfig

RUNGS = SPEC.rungs


def softmax(x: Any, axis: int = -1, *, out: Any = None, kernel: str | None = None, stream: Any = None) -> Any:
    """exp(x) / sum(exp(x)) along `axis`; Milakov & Gimelshein 2018, arXiv:1805.02867.

    x: a device array of float64, float32, float16 or bfloat16, of any shape and non-negative strides. Returns an array
    of the same library, shape, dtype and memory order. Arithmetic is float32 (float64 for float64), the result is
    rounded once. out: an array to write to, which may be x itself. kernel: "naive" or "simt" instead of the best.
    stream: a stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError for rows that lie in memory along more than
    three strides. No gradient is recorded: see dualops.torch_bridge.
    """
    return forward((x,), (axis,), out, kernel, stream)


def softmax_backward(
    y: Any, dy: Any, axis: int = -1, *, out: Any = None, kernel: str | None = None, stream: Any = None
) -> Any:
    """The gradient of softmax with respect to x: dx = y * (dy - sum(y * dy)).

    y: what softmax returned; dy: the gradient of that, of the same shape and dtype. Returns dx in y's memory order.
    out, which may be y or dy itself, kernel, stream and errors as for `softmax`.
    """
    return backward((y, dy), (axis,), out, kernel, stream)


def forward_choices(problem: Problem, device: Device) -> Iterator[Choice]:
    """Ways to do softmax, best first."""
    return _choices(problem, device, ("y", "x"), problem.outputs())


def backward_choices(problem: Problem, device: Device) -> Iterator[Choice]:
    """Ways to do its gradient, best first."""
    return _choices(problem, device, ("dx", "y", "dy"), problem.outputs(SPEC.gradients))


def _choices(
    problem: Problem, device: Device, names: Sequence[str], results: dict[str, ArrayMeta]
) -> Iterator[Choice]:
    if problem.M * problem.N == 0:
        for rung in RUNGS:
            yield Choice(rung, None, "nothing to do", tuple)
        return
    metas = [problem.arrays.get(name) or results[name] for name in names]
    axis, (M, N) = problem.axis, (problem.M, problem.N)
    shape = metas[0].shape[:axis] + metas[0].shape[axis + 1 :]
    sizes, strides = collapse(shape, *[meta.strides[:axis] + meta.strides[axis + 1 :] for meta in metas])
    steps = [meta.strides[axis] if N > 1 else 1 for meta in metas]
    if len(sizes) <= 1 and all(step == 1 for step in steps):
        row_strides = [stride[0] if stride else 0 for stride in strides]
        width = 16 // problem.itemsize
        aligned = all(value % width == 0 for value in (N, *row_strides))
        aligned &= all(meta.pointer % 16 == 0 for meta in metas)
        for config, reason in _row_configs(problem, device, len(metas), aligned):
            build = rows.build_forward if len(names) == 2 else rows.build_backward
            blocks = -(-M // config.rows) * config.cluster
            args = (*names, M, N, *row_strides)
            yield Choice("simt", config, reason, partial(_one_step, build, config, problem.dtype, blocks, args))
        config = LongRowsConfig(1024, max(32 // (storage(problem.dtype).vector if aligned else 8), 4) // (len(names) - 1), aligned)
        build = long_rows.build_forward if len(names) == 2 else long_rows.build_backward
        args = (*names, N, *row_strides)
        reason = "the row is too long to be kept, and is read twice"
        yield Choice("simt", config, reason, partial(_one_step, build, config, problem.dtype, M, args))
    if len(sizes) > 3:
        return
    sizes = (1,) * (3 - len(sizes)) + sizes
    grid_args = [
        value
        for stride, step in zip(strides, steps, strict=True)
        for value in ((0,) * (3 - len(stride)) + stride + (step,))
    ]
    args = (*names, M, N, *sizes[1:], *grid_args)
    together = min(steps) > 1
    config = StridedConfig(32, 8) if together else StridedConfig(1, 128)
    reason = "neighbouring rows are read together" if together else "rows lie apart along more than one stride"
    build = strided.build_forward if len(names) == 2 else strided.build_backward
    yield Choice(
        "simt", config, reason, partial(_one_step, build, config, problem.dtype, -(-M // config.lanes), args)
    )
    simple = NaiveConfig()
    build = naive.build_forward if len(names) == 2 else naive.build_backward
    yield Choice(
        "naive",
        simple,
        "one thread a row",
        partial(_one_step, build, simple, problem.dtype, -(-M // simple.threads), args),
    )


def _one_step(build: Any, config: Any, dtype: str, blocks: int, args: tuple[Any, ...]) -> list[Step]:
    return [Step(build(config, dtype), (blocks,), args)]


def _row_configs(
    problem: Problem, device: Device, arrays: int, aligned: bool
) -> Iterator[tuple[RowsConfig, str]]:
    """Configs that keep a row in registers, best first."""
    vector = storage(problem.dtype).vector if aligned else 1
    vectors_needed = -(-problem.N // vector)
    most = 8 if itemsize(problem.dtype) < 8 else 8
    if not aligned:
        most = 16
    for threads, vectors, rows_, cluster in ROWS_LADDER:
        if vectors > most or threads * vectors * cluster < vectors_needed or cluster > device.max_cluster:
            continue
        yield RowsConfig(threads, vectors, rows_, cluster, aligned), "ladder"


ROWS_LADDER = (
    (32, 1, 4, 1), (32, 2, 4, 1), (32, 4, 4, 1), (64, 4, 2, 1), (128, 4, 1, 1), (256, 4, 1, 1), (512, 4, 1, 1), (1024, 4, 1, 1), (256, 8, 1, 4), (512, 8, 1, 8),
)

forward = Operation(SPEC, forward_choices, inplace=("x",))
backward = Operation(SPEC, backward_choices, backward=True, inplace=("y", "dy"))
