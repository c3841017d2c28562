"""softmax on the GPU: which kernel serves which problem, and the public functions. To learn how, begin with README.md.

rows.py       contiguous rows kept in registers: a warp, some warps or a block a row
ring.py       contiguous rows spread over a cluster of blocks and copied ahead, on sm_90
long_rows.py  contiguous rows too long for that: two readings
strided.py    any axis of any layout: two readings
naive.py      one thread a row: three readings
ladder.py     the steps between naive.py and rows.py, for README.md; nothing here uses them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from ...spec import ArrayMeta, Problem, softmax as SPEC
from ..arrays import collapse
from ..backend import Kernel
from ..device import Device
from ..launch import Choice, Operation
from ..step import Step
from ..tile.storage import storage
from . import long_rows, naive, ring, rows, strided
from .long_rows import LongRowsConfig
from .naive import NaiveConfig
from .ring import RingConfig
from .rows import RowsConfig
from .strided import StridedConfig

RUNGS = SPEC.rungs


def softmax(x: Any, axis: int = -1, *, out: Any = None, kernel: str | None = None, stream: Any = None) -> Any:
    """exp(x) / sum(exp(x)) along `axis`; Milakov & Gimelshein 2018, arXiv:1805.02867.

    x: a device array of float64, float32, float16 or bfloat16, of any shape and non-negative strides. Returns an array
    of the same library, shape, dtype and memory order. Arithmetic is float32 (float64 for float64), the result is
    rounded once. out: an array to write to, which may be x itself. kernel: "naive", "simt" or "sm90" instead of the
    best. stream: a stream object or handle instead of the library's current one.
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


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Ways to do softmax, best first."""
    metas = {"y": results["y"], "x": problem.arrays["x"]}
    builds = (
        rows.build_forward,
        ring.build_forward,
        long_rows.build_forward,
        strided.build_forward,
        naive.build_forward,
    )
    return _choices(problem, metas, builds, FORWARD_ROWS, device)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Ways to do its gradient, best first."""
    metas = {"dx": results["dx"], "y": problem.arrays["y"], "dy": problem.arrays["dy"]}
    builds = (
        rows.build_backward,
        ring.build_backward,
        long_rows.build_backward,
        strided.build_backward,
        naive.build_backward,
    )
    return _choices(problem, metas, builds, BACKWARD_ROWS, device)


# (row_threads, vectors, rows) by rising length of row: the first that holds the row is taken. Shares of the roof that a
# plain kernel with the same reads and writes reaches: bf16, H200, 32768 rows, 2026-11-21, both still with plain stores.
FORWARD_ROWS = (
    (32, 1, 4),
    (32, 2, 4),
    (64, 2, 2),  # 1024 columns: 0.98; a warp a row with 4 vectors 0.96
    (128, 2, 1),
    (256, 2, 1),  # 4096 columns: 0.97; 128 threads with 4 vectors 0.95
    (256, 4, 1),
    (512, 4, 1),  # 16384 columns: 0.97; 256 threads with 8 vectors 0.96, 1024 with 2 0.66
    (1024, 4, 1),
)
BACKWARD_ROWS = (
    (32, 1, 4),
    (32, 2, 4),
    (64, 2, 2),  # 1024 columns: 1.00; four rows a block 0.97
    (128, 2, 1),
    (128, 4, 2),  # 4096 columns: 0.99; 512 threads with 1 vector 0.98
    (256, 4, 1),
    (512, 4, 1),  # 16384 columns: 0.97; 1024 threads with 2 vectors 0.97
)
# rows that are not aligned: one element a load, so more loads a thread
UNALIGNED_ROWS = ((32, 4, 4), (32, 16, 4), (128, 16, 1), (512, 16, 1))


def _choices(
    problem: Problem,
    metas: Mapping[str, ArrayMeta],
    builds: Sequence[Callable[..., Kernel]],
    row_shapes: tuple[tuple[int, int, int], ...],
    device: Device,
) -> Iterator[Choice]:
    """Ways for the arrays `metas`, results first.

    builds: of kept rows, rings, long rows, strided rows, and naive; row_shapes: FORWARD_ROWS or BACKWARD_ROWS.
    """
    axis, M, N, dtype = problem.axis, problem.M, problem.N, problem.dtype
    if M * N == 0:
        for rung in RUNGS:
            yield Choice(rung, None, "nothing to do", tuple)
        return
    build_rows, build_ring, build_long, build_strided, build_naive = builds
    shape = next(iter(metas.values())).shape
    shape = shape[:axis] + shape[axis + 1 :]
    sizes, strides = collapse(shape, *[meta.strides[:axis] + meta.strides[axis + 1 :] for meta in metas.values()])
    steps = [meta.strides[axis] if N > 1 else 1 for meta in metas.values()]
    if len(sizes) <= 1 and all(step == 1 for step in steps):
        row_strides = [stride[0] if stride else 0 for stride in strides]
        vector = storage(dtype).vector
        aligned = all(value % vector == 0 for value in (N, *row_strides))
        aligned = aligned and all(meta.pointer % 16 == 0 for meta in metas.values())
        args = (*metas, M, N, *row_strides)
        config = _rows_config(N, dtype, row_shapes if aligned else UNALIGNED_ROWS, aligned)
        if config is not None:
            make = partial(_step, build_rows, config, dtype, -(-M // config.rows), args)
            yield Choice("simt", config, "a row fits in registers", make)
        for config in _ring_configs(N, dtype, aligned, len(metas) - 1, device):
            make = partial(_ring_step, build_ring, config, dtype, M, args, len(metas) - 1)
            yield Choice("sm90", config, "a row waits in shared memory, and the next is on its way", make)
        config = LongRowsConfig(512, 2 if aligned else 8, aligned)
        reason = "a row is too long to be kept, and is read twice"
        yield Choice("simt", config, reason, partial(_step, build_long, config, dtype, M, (*metas, N, *row_strides)))
    if len(sizes) > 3:
        return
    args = (*metas, M, N, *((1,) * (3 - len(sizes)) + sizes)[1:])
    for stride, step in zip(strides, steps, strict=True):
        args += (0,) * (3 - len(stride)) + stride + (step,)
    together = min(steps) > 1
    config = StridedConfig(32, 8) if together else StridedConfig(1, 128)
    reason = "neighbouring rows are read together" if together else "rows lie along more than one stride"
    yield Choice("simt", config, reason, partial(_step, build_strided, config, dtype, -(-M // config.lanes), args))
    config = NaiveConfig()
    make = partial(_step, build_naive, config, dtype, -(-M // config.threads), args)
    yield Choice("naive", config, "one thread a row", make)


@cache
def _row_configs(shapes: tuple[tuple[int, int, int], ...], dtype: str, aligned: bool) -> list[tuple[int, RowsConfig]]:
    """The longest row that each config keeps in registers, and the config, by rising length."""
    configs = [RowsConfig(*shape, aligned) for shape in shapes]
    return [(config.columns(dtype), config) for config in configs]


def _rows_config(N: int, dtype: str, shapes: tuple[tuple[int, int, int], ...], aligned: bool) -> RowsConfig | None:
    """The first config that keeps a row of N elements in registers, None if none does."""
    return next((config for columns, config in _row_configs(shapes, dtype, aligned) if columns >= N), None)


def _ring_configs(N: int, dtype: str, aligned: bool, inputs: int, device: Device) -> Iterator[RingConfig]:
    """The smallest cluster that can keep a row: in registers going forward, in its stages going back."""
    if not aligned or not device.has_bulk_copies:
        return
    warps, vectors, chunks = RING_SHAPE[inputs] if device.name != "simulator" else (4, 1, 3)
    stage_bytes = RingConfig(warps, vectors, 1, 1, 1).staged(dtype, inputs).nbytes
    stages = min((device.shared_memory_per_block - RING_OVERHEAD) // stage_bytes, 32)
    if inputs == 2:
        chunks = stages - 1  # one to run ahead with
    for cluster in (1, 2, 4, 8):
        config = RingConfig(warps, vectors, stages, cluster, chunks)
        if cluster * config.share(dtype) >= N and cluster <= device.max_cluster:
            needed = -(-N // (cluster * config.chunk(dtype)))  # an even share for every block
            yield replace(config, chunks=needed)
            return


# (warps, vectors, most chunks a share) of the forward ring, which reads one array, and of the backward ring, which
# reads two. Shares of the roof, bf16, H200, 2026-11-21, at 8192 x 65536 and 2048 x 262144: forward 0.91 and 0.75,
# backward 0.97 and 0.99; two readings, with plain stores: 0.64 and 0.63, 0.59 and 0.58
RING_SHAPE = {1: (15, 3, 3), 2: (12, 2, 0)}
RING_OVERHEAD = 8 << 10  # bytes of shared memory for barriers and parts, at most


def _ring_step(
    build: Callable[..., Kernel], config: RingConfig, dtype: str, M: int, args: tuple[Any, ...], inputs: int
) -> list[Step]:
    kernel = build(config, dtype)
    return [Step(kernel, (M * config.cluster,), args, config.staged(dtype, inputs).nbytes, resident=True)]


def _step(build: Callable[..., Kernel], config: Any, dtype: str, blocks: int, args: tuple[Any, ...]) -> list[Step]:
    return [Step(build(config, dtype), (blocks,), args)]


forward = Operation(SPEC, forward_choices, inplace=("x",))
backward = Operation(SPEC, backward_choices, backward=True, inplace=("y", "dy"))
