"""The kernels of rms_norm and layer_norm, and which of them serves which problem.

forward:
    ../rows/registers.py  rows kept in registers: a few lanes, several warps or a block per row
    ../rows/cluster.py    long rows, kept in the registers of a cluster of blocks, on sm_90, with weights of x's dtype:
                          rms_norm up to 1 MiB, layer_norm up to 384 KiB, less with a residual
    ring.py               a producer warp copies rows to shared memory in advance, on sm_90; a cluster of blocks shares
                          a long row. If weights have a wider dtype than x, and for layer_norm from 384 to 512 KiB, the
                          next long row's sums are sent while a row is written
    ../rows/reread.py     all other rows, read twice: on older GPUs, unaligned, or too long for the kernels above: more
                          than 512 KiB (rms_norm with weights of x's dtype: 1 MiB; layer_norm with a residual and wider
                          weights: 128 KiB)
gradients:
    rows_backward.py      rows kept in registers, up to 1 KiB
    ring_backward.py      a producer warp copies rows to shared memory in advance, on sm_90
    long_rows_backward.py all other rows, read twice: on older GPUs, unaligned, or more than 512 KiB (layer_norm: 256)
    sums.py               dw and db from the partial sums of blocks
naive.py                  one thread per row
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ...spec import ArrayMeta, Problem
from ...spec.meta import compute_dtype
from ..compiler.backend import Kernel
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Argument, Step
from ..rows import cluster, registers, reread
from ..rows.cluster import ClusterRowsConfig, share_of
from ..rows.registers import RowsConfig
from ..rows.reread import LongRowsConfig
from . import long_rows_backward, naive, ring, ring_backward, rows_backward
from .arguments import Call
from .configs import cluster_config, ring_config, rows_config, sums_config
from .gradient_configs import comes_first
from .naive import NaiveConfig
from .operator import Norm
from .staging import RingConfig
from .sums import LANES, build_sums

BLOCKS = 4  # blocks of norm_long_rows_backward per SM


def forward_rows(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel that keeps rows in registers."""
    call = Call(problem, results, backward=False)
    config = rows_config(call.N, call.variant, call.aligned)
    if config is not None:
        yield Choice("simt", config, "a row fits in registers", partial(rows_steps, config, call))


def rows_steps(config: RowsConfig, call: Call) -> list[Step]:
    """Return the launch of forward's kernel that keeps rows in registers."""
    return registers.steps_of(config, Norm(call.variant), call.args)


def backward_rows(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the gradient's kernel that keeps rows in registers."""
    call = Call(problem, results, backward=True)
    if not comes_first(call.N, call.variant, device):
        yield from _rows_of_gradient(call, device)


def backward_first(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the gradient's kernel that keeps rows in registers, for rows that would be slower with the ring."""
    call = Call(problem, results, backward=True)
    if comes_first(call.N, call.variant, device):
        yield from _rows_of_gradient(call, device)


def _rows_of_gradient(call: Call, device: Device) -> Iterator[Choice]:
    config = rows_config(call.N, call.variant, call.aligned)
    if config is not None:
        yield Choice("simt", config, "a row fits in registers", *gradient_steps(config, call, device))


def gradient_steps(
    config: RowsConfig | RingConfig, call: Call, device: Device
) -> tuple[Callable[[], list[Step]], dict[str, ArrayMeta]]:
    """Return the launches of a gradient with persistent blocks, which keep dw and db, and their workspace."""
    if isinstance(config, RowsConfig):
        slots = slots_of(call.M, config, 1, device)
        make = partial(
            _step, rows_backward.build_backward, config, call, slots, call.partials_args(slots), resident=True
        )
    else:
        slots = slots_of(call.M, config, config.cluster, device)
        blocks, args = slots * config.cluster, call.partials_args(slots)
        make = partial(_ring_step, ring_backward.build_backward, config, call, blocks, args)
    return _with_sums(call, device, slots, make)


def slots_of(M: int, config: RowsConfig | RingConfig, cluster: int, device: Device) -> int:
    """Return the number of persistent blocks, or clusters: as many as run at once, but none without rows."""
    return min(cdiv(M, config.rows), max(device.sms * config.min_blocks // cluster, 1))


def forward_cluster(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel that keeps rows in the registers of a cluster."""
    call = Call(problem, results, backward=False)
    config = cluster_config(call.N, call.variant, device) if call.aligned else None
    if config is not None:
        make = partial(cluster_steps, config, call, device)
        yield Choice("sm90", config, "rows wait in the registers of a cluster", make)


def cluster_steps(config: ClusterRowsConfig, call: Call, device: Device) -> list[Step]:
    """Return the launch of forward's kernel whose rows are split among a cluster."""
    return cluster.steps_of(config, Norm(call.variant), call.args, device)


def forward_ring(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel that copies rows in advance."""
    call = Call(problem, results, backward=False)
    config = ring_config(call.N, call.variant, device) if call.aligned and call.N else None
    if config is not None:
        blocks = cdiv(call.M, config.rows) * config.cluster
        make = partial(_ring_step, ring.build_forward, config, call, blocks, call.args)
        yield Choice("sm90", config, "rows are copied to shared memory ahead", make)


def backward_ring(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    call = Call(problem, results, backward=True)
    config = ring_config(call.N, call.variant, device) if call.aligned and call.N else None
    if config is not None:
        yield Choice("sm90", config, "rows are copied to shared memory ahead", *gradient_steps(config, call, device))


def forward_long_rows(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel that reads rows twice."""
    call = Call(problem, results, backward=False)
    config = LongRowsConfig(512, 2 if call.aligned else 8, call.aligned)
    make = partial(reread.steps_of, config, Norm(call.variant), call.args)
    yield Choice("simt", config, "a row is too long to be kept, and is read again", make)


def backward_long_rows(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    call = Call(problem, results, backward=True)
    config = LongRowsConfig(512, 2 if call.aligned else 8, call.aligned)
    tiles = cdiv(call.N, config.columns(call.dtype))
    slots = min(call.M, cdiv(device.sms * BLOCKS, tiles))
    make = partial(_long_rows_steps, config, call, tiles * slots, slots)
    steps, space = _with_sums(call, device, slots, make)
    reason = "a row is too long to be kept, and is read twice"
    yield Choice("simt", config, reason, steps, {"means": call.numbers(2, call.M), **space})


def forward_naive(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel with one thread per row."""
    call, config = Call(problem, results, backward=False), NaiveConfig()
    make = partial(_step, naive.build_forward, config, call, cdiv(call.M, config.threads), call.args)
    yield Choice("naive", config, "one thread per row", make)


def backward_naive(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    call, config = Call(problem, results, backward=True), NaiveConfig()
    yield Choice("naive", config, "one thread per row, or a column", partial(_naive_steps, config, call))


FORWARD = (forward_rows, forward_cluster, forward_ring, forward_long_rows, forward_naive)
BACKWARD = (backward_first, backward_ring, backward_rows, backward_long_rows, backward_naive)


def _with_sums(
    call: Call, device: Device, slots: int, steps: Callable[[], list[Step]]
) -> tuple[Callable[[], list[Step]], dict[str, ArrayMeta]]:
    """Return the launches of `steps`, which write partial sums to `slots`, and the one that adds them; the workspace.

    Without rows, only the last launch remains: it writes zeros.
    """
    wanted, N = call.variant.weight_gradients, call.N
    if not wanted:
        return steps, {}
    blocks = wanted * cdiv(N, LANES)
    config = sums_config(blocks, device)

    def all_steps() -> list[Step]:
        kernel = build_sums(config, compute_dtype(call.dtype), *call.sums_dtypes)
        made = steps() if call.M else []
        return [*made, Step(kernel, (blocks,), ("dw", "db", "partials", slots, N), resident=True)]

    return all_steps, {"partials": call.numbers(wanted, slots, N)}


def _step(
    build: Callable[..., Kernel],
    config: Any,
    call: Call,
    blocks: int,
    args: tuple[Argument, ...],
    resident: bool = False,
) -> list[Step]:
    return [Step(build(config, call.variant), (blocks,), args, resident=resident)]


def _ring_step(
    build: Callable[..., Kernel], config: RingConfig, call: Call, blocks: int, args: tuple[Argument, ...]
) -> list[Step]:
    share = share_of(call.N, config.cluster, config.columns(call.dtype), call.dtype)
    kernel, nbytes = build(config, call.variant), config.layout(call.variant).nbytes
    return [Step(kernel, (blocks,), (*args, share), nbytes, resident=True)]


def _long_rows_steps(config: LongRowsConfig, call: Call, blocks: int, slots: int) -> list[Step]:
    return [
        Step(long_rows_backward.build_means(config, call.variant), (call.M,), ("means", *call.args)),
        Step(long_rows_backward.build_backward(config, call.variant), (blocks,), ("means", *call.partials_args(slots))),
    ]


def _naive_steps(config: NaiveConfig, call: Call) -> list[Step]:
    """Return the launches. Those of dw and db come first, since dx may overwrite dy."""
    sums = []
    if call.variant.weight_gradients:
        kernel = naive.build_sums(config, call.variant, *call.sums_dtypes)
        sums = [Step(kernel, (cdiv(call.N, config.threads),), ("dw", "db", *call.args[:2]))]
    if not call.M:
        return sums
    blocks, args = cdiv(call.M, config.threads), (call.dx, *call.args)
    return [*sums, *_step(naive.build_backward, config, call, blocks, args)]
