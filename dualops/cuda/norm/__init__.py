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
    rows_backward.py      rows kept in registers, up to 1 KiB; and all other rows, read twice: on older GPUs, unaligned,
                          or more than 512 KiB (layer_norm: 256)
    ring_backward.py      a producer warp copies rows to shared memory in advance, on sm_90
    sums.py               dw and db from the partial sums of blocks
naive.py                  one thread per row
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...spec import ArrayMeta
from ...spec.meta import compute_dtype
from ..compiler.backend import Kernel
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Argument, Step
from ..rows import cluster, registers, reread
from ..rows.cluster import share_of
from ..rows.operator import choices_of_calls
from ..rows.registers import RowsConfig
from ..rows.reread import LongRowsConfig
from . import naive, ring, ring_backward, rows_backward
from .arguments import Call
from .configs import cluster_config, ring_config, rows_config, sums_config
from .gradient_configs import comes_first
from .naive import NaiveConfig
from .operator import Norm
from .staging import RingConfig
from .sums import LANES, build_sums

BLOCKS = 4  # blocks of norm_long_rows_backward per SM


def rows_choices(call: Call, device: Device, first: bool | None = None) -> Iterator[Choice]:
    """Yield the kernel that keeps rows in registers. first: of a gradient; whether only for rows that would be slower
    with the ring, or only for all others.
    """
    config, reason = rows_config(call.N, call.variant, call.aligned), "a row fits in registers"
    if config is not None and call.variant.backward:
        if comes_first(call.N, call.variant, device) == first:
            yield Choice("simt", config, reason, *gradient_steps(config, call, device))
    elif config is not None:
        steps = partial(registers.steps_of, config, Norm(call.variant), call.args)
        yield Choice("simt", config, reason, steps)


def gradient_steps(
    config: RowsConfig | RingConfig, call: Call, device: Device
) -> tuple[Callable[[], list[Step]], dict[str, ArrayMeta]]:
    """Return the launches of a gradient with persistent blocks, which keep dw and db, and their workspace. As many
    blocks, or clusters, as run at once have a slot, but none without rows.
    """
    cluster = config.cluster if isinstance(config, RingConfig) else 1
    slots = min(cdiv(call.M, config.rows), max(device.sms * config.min_blocks // cluster, 1))
    args = call.partials_args(slots)
    if isinstance(config, RingConfig):
        make = partial(_ring_step, ring_backward.build_backward, config, call, slots * cluster, args)
    else:
        make = partial(_step, rows_backward.build_backward, config, call, slots, args, resident=True)
    return _with_sums(call, device, slots, make)


def cluster_choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the kernel that keeps rows in the registers of a cluster."""
    config = cluster_config(call.N, call.variant, device) if call.aligned else None
    if config is not None:
        steps = partial(cluster.steps_of, config, Norm(call.variant), call.args, device)
        yield Choice("sm90", config, "rows wait in the registers of a cluster", steps)


def ring_choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the kernel that copies rows in advance."""
    config = ring_config(call.N, call.variant, device) if call.aligned and call.N else None
    reason = "rows are copied to shared memory ahead"
    if config is not None and call.variant.backward:
        yield Choice("sm90", config, reason, *gradient_steps(config, call, device))
    elif config is not None:
        blocks = cdiv(call.M, config.rows) * config.cluster
        yield Choice("sm90", config, reason, partial(_ring_step, ring.build_forward, config, call, blocks, call.args))


def long_rows_choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the kernels that read rows twice."""
    config = LongRowsConfig(512, 2 if call.aligned else 8, call.aligned)
    if not call.variant.backward:
        make = partial(reread.steps_of, config, Norm(call.variant), call.args)
        yield Choice("simt", config, "a row is too long to be kept, and is read again", make)
        return
    tiles = cdiv(call.N, config.columns(call.dtype))
    slots = min(call.M, cdiv(device.sms * BLOCKS, tiles))
    make = partial(_long_rows_steps, config, call, tiles * slots, slots)
    steps, space = _with_sums(call, device, slots, make)
    reason = "a row is too long to be kept, and is read twice"
    yield Choice("simt", config, reason, steps, {"means": call.numbers(2, call.M), **space})


def naive_choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the kernel with one thread per row, and with one per column for dw and db."""
    config = NaiveConfig()
    if call.variant.backward:
        yield Choice("naive", config, "one thread per row, or a column", partial(_naive_steps, config, call))
    else:
        make = partial(_step, naive.build_forward, config, call, cdiv(call.M, config.threads), call.args)
        yield Choice("naive", config, "one thread per row", make)


first, later = (partial(rows_choices, first=first) for first in (True, False))
RUNGS = (rows_choices, cluster_choices, ring_choices, long_rows_choices, naive_choices)
FORWARD = choices_of_calls(Call, RUNGS, backward=False)
BACKWARD = choices_of_calls(Call, (first, ring_choices, later, *RUNGS[3:]), backward=True)


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
        Step(rows_backward.build_means(config, call.variant), (call.M,), ("means", *call.args)),
        Step(rows_backward.build_long_backward(config, call.variant), (blocks,), ("means", *call.partials_args(slots))),
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
