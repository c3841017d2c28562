"""softmax of long rows and its gradient on sm_90: which Config of ring_stages.py serves which problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from ...spec import ArrayMeta, Problem
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from . import ring_stages
from .arguments import Call
from .ring_config import MOST_STAGES, RingConfig

# stages, 0: as many as there is room for; chunks, 0: all but one of these. Shares of the roof are those of H200,
# 2026-11-26, 2^29 elements of 2 bytes or 2^28 of 4.
FORWARD_RING = (
    RingConfig(16, 2, 0, 1, 0),  # of shorter rows, for who asks for it
    RingConfig(16, 2, 0, 8, 0),  # 1 MiB: 0.88; two blocks an SM 0.86, read twice 0.63
    RingConfig(8, 2, 0, 16, 0, min_blocks=2),  # 2 MiB: 0.73; one block an SM 0.69, read twice 0.58
    RingConfig(16, 2, 0, 16, 0),  # 4 MiB: 0.79; two blocks an SM 0.67, read twice 0.63
)
# 128 KiB to 512 KiB: 0.95, 1 MiB 0.91 (read twice 0.58), 2 MiB 0.86 (0.56), 4 MiB 0.61 (0.58)
BACKWARD_RING = tuple(RingConfig(12, 2, 0, cluster, 0) for cluster in (1, 2, 4, 8, 16))
SIMULATED_RING = tuple(RingConfig(4, 1, 0, cluster, 0) for cluster in (1, 2, 4, 8, 16))  # small enough for a simulator
LARGEST_CLUSTER = 16
KEPT_BY_SM = 1 << 10  # bytes of shared memory that an SM keeps of each block


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The smallest cluster that holds a row, or the largest that there is."""
    return _choices(Call(problem, results), 1, device)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the choices for the gradient."""
    return _choices(Call(problem, results), 2, device)


def _choices(call: Call, inputs: int, device: Device) -> Iterator[Choice]:
    if not (call.contiguous and call.aligned and device.has_bulk_copies):
        return
    for config in _ring_configs(call.N, call.dtype, inputs, device):
        reason = "a row waits in shared memory, and the next is on its way"
        yield Choice("sm90", config, reason, partial(_steps, call, config, inputs))


def _ring_configs(N: int, dtype: str, inputs: int, device: Device) -> Iterator[RingConfig]:
    """The first that keeps a row of N elements; else the last that there is, if it copies again what it can't keep.

    The largest cluster may copy a quarter again, which it finds in L2: two blocks an SM are worth that.
    """
    ladder = BACKWARD_RING if inputs == 2 else FORWARD_RING
    found = None
    for config in ladder if device.name != "simulator" else SIMULATED_RING:
        if config.cluster > device.max_cluster:
            break
        found = with_stages(config, dtype, inputs, device)
        if found.kept(dtype) >= (N * 3 // 4 if found.cluster == LARGEST_CLUSTER and found.min_blocks > 1 else N):
            # an even share for every block
            yield replace(found, chunks=min(found.chunks, cdiv(N, found.cluster * found.chunk(dtype))))
            return
    if found is not None:
        yield found


def with_stages(config: RingConfig, dtype: str, inputs: int, device: Device) -> RingConfig:
    """With as many stages as it asks for and as there is room for."""
    room = (device.shared_memory_per_block + KEPT_BY_SM) // config.min_blocks - KEPT_BY_SM
    stage = replace(config, stages=1).staged(dtype, inputs).nbytes
    stages = min((room - config.static_bytes(dtype)) // stage, config.stages or MOST_STAGES)
    return replace(config, stages=stages, chunks=config.chunks or stages - 1)


def _steps(call: Call, config: RingConfig, inputs: int) -> list[Step]:
    args = (*call.metas, call.M, call.N, *call.row_strides, config.share(call.N, call.dtype))
    build = ring_stages.build_backward if inputs == 2 else ring_stages.build_forward
    kernel, blocks = build(config, call.dtype), call.M * config.cluster
    return [Step(kernel, (blocks,), args, config.staged(call.dtype, inputs).nbytes, resident=True)]
