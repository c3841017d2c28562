"""Which kernel of rows serves which problem of softmax."""

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
    """A row in the registers of as few threads as hold it, if any do."""
    call = Call(problem, results)
    config = rows_config(call.N, call.dtype, backward, call.aligned) if call.contiguous else None
    if config is not None:
        steps = partial(registers.steps_of, config, Softmax(call.dtype, backward), call.arguments)
        yield Choice("simt", config, "a row fits in registers", steps)


def ring_choices(
    backward: bool, problem: Problem, results: Mapping[str, ArrayMeta], device: Device
) -> Iterator[Choice]:
    """The smallest cluster that holds a row, or the largest that there is."""
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
    """A block a row, which is read twice."""
    call = Call(problem, results)
    if call.contiguous:
        config = LongRowsConfig(512, 2 if call.aligned else 8, call.aligned)
        steps = partial(reread.steps_of, config, Softmax(call.dtype, backward), call.arguments)
        yield Choice("simt", config, "a row is too long to be kept, and is read twice", steps)


def cluster_choices(
    backward: bool, problem: Problem, results: Mapping[str, ArrayMeta], device: Device
) -> Iterator[Choice]:
    """The smallest cluster that holds a row; backward: two rows."""
    call = Call(problem, results)
    if not (call.contiguous and call.aligned and device.has_bulk_copies):
        return
    config = cluster_config(call.N, call.dtype, device, BACKWARD_BLOCKS if backward else BLOCKS)
    if config is not None:
        steps = partial(cluster.steps_of, config, Softmax(call.dtype, backward), call.arguments, device)
        yield Choice("sm90", config, "a row waits in the registers of a cluster", steps)
