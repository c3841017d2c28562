"""The choice among the kernels for rows, for softmax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from ...spec import ArrayMeta, Problem
from ..launch.device import Device
from ..launch.plans import Choice
from ..rows import chunks, cluster, registers, reread
from ..rows.reread import LongRowsConfig
from .arguments import Call
from .configs import BACKWARD_BLOCKS, BLOCKS, cluster_config, ring_configs, rows_config
from .operator import Softmax


def rows_choices(
    backward: bool, problem: Problem, results: Mapping[str, ArrayMeta], device: Device
) -> Iterator[Choice]:
    """Yield the kernel that keeps a row in the registers of as few threads as possible, if a row fits."""
    call = Call(problem, results)
    config = rows_config(call.N, call.dtype, backward, call.aligned) if call.contiguous else None
    if config is not None:
        steps = partial(registers.steps_of, config, Softmax(call.dtype, backward), call.arguments)
        yield Choice("simt", config, "a row fits in registers", steps)


def ring_choices(
    backward: bool, problem: Problem, results: Mapping[str, ArrayMeta], device: Device
) -> Iterator[Choice]:
    """Yield the ring with the smallest cluster that can hold a row, or with the largest cluster."""
    call = Call(problem, results)
    if not (call.contiguous and call.aligned and device.has_bulk_copies):
        return
    kind = Softmax(call.dtype, backward)
    for config in ring_configs(call.N, call.dtype, kind.inputs, device):
        reason = "a row waits in shared memory, and the next is on its way"
        yield Choice("sm90", config, reason, partial(chunks.steps_of, config, kind, call.arguments))


def long_rows_choices(
    backward: bool, problem: Problem, results: Mapping[str, ArrayMeta], device: Device
) -> Iterator[Choice]:
    """Yield the kernel with one block per row, which reads it twice."""
    call = Call(problem, results)
    if call.contiguous:
        config = LongRowsConfig(512, 2 if call.aligned else 8, call.aligned)
        steps = partial(reread.steps_of, config, Softmax(call.dtype, backward), call.arguments)
        yield Choice("simt", config, "a row is too long to be kept, and is read twice", steps)


def cluster_choices(
    backward: bool, problem: Problem, results: Mapping[str, ArrayMeta], device: Device
) -> Iterator[Choice]:
    """Yield the smallest cluster whose registers can hold a row; for backward, two rows."""
    call = Call(problem, results)
    if not (call.contiguous and call.aligned and device.has_bulk_copies):
        return
    config = cluster_config(call.N, call.dtype, device, BACKWARD_BLOCKS if backward else BLOCKS)
    if config is not None:
        steps = partial(cluster.steps_of, config, Softmax(call.dtype, backward), call.arguments, device)
        yield Choice("sm90", config, "a row waits in the registers of a cluster", steps)
