"""Gradients of rms_norm and layer_norm, whose blocks stay, take one row after another and keep dw and db.

A block's rows come to its registers, or ahead of it to the stages of a ring. A row takes its threads

    turn = BEGINS + MEETS * sums * log2(its warps) + BETWEEN * log2(its blocks) + NUMBERS * numbers * warps of an SM

The second and third term count `AHEAD` times if the next row's sums overlap with them. `BESIDE` is added if a block
takes several rows by a ring. Rows in registers also wait for each row to arrive, and `AGAIN` for a dsummed that
arrives behind the sums. All rows in flight share the bandwidth, of which rings that fill an SM lose a part. A stage of
a ring is free for another row when its own has arrived, is summed and is written, so that few stages can be the limit.
The largest of these times decides nearly alone. A second launch adds up the partial sums that blocks have kept:

    again = (ARRIVES + turn + memory) / (stages - 1 where rows overlap), of a ring alone
    longest = (turn^SHARP + memory^SHARP + again^SHARP)^(1 / SHARP)
    kernel = rounds * longest + KEPT * bytes of what they kept / bandwidth + 2 * LAUNCH

Fitted to figures of both norms on an H100, in microseconds, of a loop of rings with an eighth more instructions (before
2026-11-28); which Configs spill registers was read from compiled kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import log2

from ..cuda.launch.arrays import align_up, cdiv
from ..cuda.norm import gradient_steps, slots_of
from ..cuda.norm.arguments import Call
from ..cuda.norm.configs import with_stages
from ..cuda.norm.staging import RingConfig
from ..cuda.rows.registers import RowsConfig
from ..cuda.tile.storage import storage
from ..spec import Problem
from ..spec.meta import compute_dtype, itemsize
from .architectures import Architecture
from .candidates import Candidate, Part
from .model import LAUNCH, REACHED, Estimate
from .steps import MOST_REGISTERS

ARRIVES, BEGINS, MEETS, BETWEEN, NUMBERS = 0.4, 0.32, 0.053, 0.081, 0.0021
AGAIN = 0.71  # that dsummed takes to arrive behind the sums
BESIDE = 0.16  # of rows that a block takes at once by a ring
AHEAD = 0.84  # of meeting what is left where the next row's sums are on their way
FULL = 0.076  # of memory's time what it takes more where stages fill all of an SM's shared memory
KEPT = 7.5  # times that memory moves what is kept: by pieces, which are added up, and by a launch of its own
SHARP = {"rows": 2.6, "rings": 4.6}  # how sudden it is that one of them decides: they add up by this power
AnyConfig = RowsConfig | RingConfig
VECTORS, THREADS, BLOCKS, CLUSTERS = (1, 2, 3, 4, 8), (128, 256, 512), (1, 2, 3, 4), (1, 2, 4, 8, 16)
LEAST_THREADS, LEAST_OF_CLUSTER = 8, 128  # that share a row
STAGES = 6  # at most
LEAST, MOST = 256, 1024  # threads of an SM
# (rows come by a ring, dw and db are wanted) -> registers of a thread besides its numbers, and for each number
LEAST_REGISTERS = {
    (False, False): (31, 4.9),
    (False, True): (31, 4.1),
    (True, False): (34, 2.7),
    (True, True): (45, 2.9),
}


def candidates(p: Problem, gpu: Architecture, own: AnyConfig) -> Iterator[Candidate]:
    """The operator's own, and others whose registers hold dw, db and what a row needs."""
    call = _call(p)
    makes = ", ".join(p.outputs(p.spec.gradients))
    for config in dict.fromkeys((own, *_grid(call, gpu))):
        steps, _ = gradient_steps(config, call, gpu.device)
        rung, shared = ("sm90", config.layout(call.variant).nbytes) if isinstance(config, RingConfig) else ("simt", 0)
        yield Candidate(rung, (Part(makes, config),), rows_estimate(config, p, gpu), shared, steps)


def rows_estimate(config: AnyConfig, p: Problem, gpu: Architecture) -> Estimate:
    """Of one Config."""
    bandwidth, loaded = REACHED * gpu.memory_bandwidth, 3 if "dsummed" in p.arrays else 2
    cluster = config.cluster if isinstance(config, RingConfig) else 1
    slots = slots_of(p.M, config, cluster, gpu.device)
    row_bytes = (loaded + 1) * p.N * itemsize(p.dtype)
    full = _staged_bytes(config, p, loaded) / gpu.shared_per_sm
    turn = 1e-6 * _turn(config, p, cluster, loaded)
    memory = (1 + FULL * full) * slots * config.rows * row_bytes / bandwidth
    rounds = cdiv(p.M, slots * config.rows)
    vectors = _call(p).variant.weight_gradients
    kept = KEPT * slots * p.N * vectors * itemsize(compute_dtype(p.dtype)) / bandwidth
    launches = (2 if vectors else 1) * LAUNCH
    if isinstance(config, RingConfig):
        again = (1e-6 * ARRIVES + turn + memory) / (config.stages - config.overlap)
        longest = _longest("rings", turn, memory, again)
    else:
        longest = _longest("rows", turn, memory)
    seconds = rounds * longest + kept + launches
    busy = {"memory": p.M * row_bytes / bandwidth + kept}
    return Estimate(seconds, busy, {"waits": rounds * turn, "launches": launches})


def _call(p: Problem) -> Call:
    return Call(p, p.outputs(p.spec.gradients), backward=True)


def _longest(of: str, *terms: float) -> float:
    power = SHARP[of]
    return sum(term**power for term in terms) ** (1 / power)


def _turn(config: AnyConfig, p: Problem, cluster: int, loaded: int) -> float:
    """Microseconds that a row takes by itself."""
    numbers = config.vectors * storage(p.dtype).vector * (loaded + 1) / 3
    warps = config.row_threads * config.rows / 32 * config.min_blocks
    meets = MEETS * _sums(p) * log2(max(1, config.row_threads / 32)) + BETWEEN * log2(cluster)
    work = BEGINS + NUMBERS * numbers * warps
    if isinstance(config, RingConfig):
        return work + BESIDE * (config.rows > 1) + (AHEAD if config.overlap else 1) * meets
    return ARRIVES + work + meets + AGAIN * (loaded > 2)


def _sums(p: Problem) -> int:
    """Of a row."""
    return 1 if p.spec.name == "rms_norm" else 2


def _staged_bytes(config: AnyConfig, p: Problem, loaded: int) -> int:
    if not isinstance(config, RingConfig):
        return 0
    return config.stages * config.min_blocks * config.rows * config.columns(p.dtype) * itemsize(p.dtype) * loaded


def _grid(call: Call, gpu: Architecture) -> Iterator[AnyConfig]:
    """Those that don't spill registers."""
    for config in (*_in_registers(call), *(_in_rings(call, gpu) if gpu.device.has_bulk_copies else ())):
        room = gpu.registers_per_sm // (config.threads * config.min_blocks) // 8 * 8
        if _least_registers(config, call) <= min(room, MOST_REGISTERS):
            yield config


def _in_registers(call: Call) -> Iterator[RowsConfig]:
    for row_threads, vectors, rows, blocks in _shapes(call, 1):
        yield RowsConfig(row_threads, vectors, rows, min_blocks=blocks)


def _in_rings(call: Call, gpu: Architecture) -> Iterator[RingConfig]:
    both = call.variant.weight_gradients > 1  # leave w no registers, or few
    for cluster in [each for each in CLUSTERS if each <= gpu.device.max_cluster]:
        for (row_threads, vectors, rows, blocks), overlap in product(_shapes(call, cluster), (False, True)):
            if cluster > 1 and (rows > 1 or row_threads < LEAST_OF_CLUSTER):
                continue
            config = RingConfig(row_threads, vectors, rows, STAGES, cluster, blocks, both, overlap)
            config = with_stages(config, call.variant, gpu.device)
            if config.stages >= 2:
                yield config


def _shapes(call: Call, cluster: int) -> Iterator[tuple[int, int, int, int]]:
    """Threads of a row, vectors of a thread, rows of a block, and blocks of an SM."""
    for vectors, threads, blocks in product(VECTORS, THREADS, BLOCKS):
        wanted = cdiv(call.N, storage(call.dtype).vector * vectors * cluster)
        power = 1 << (wanted - 1).bit_length()
        row_threads = max(LEAST_THREADS, min(power, align_up(wanted, 64)))
        if row_threads <= threads and LEAST <= threads * blocks <= MOST:
            yield row_threads, vectors, threads // row_threads, blocks


def _least_registers(config: AnyConfig, call: Call) -> float:
    """With which the compiler spills none."""
    beside, each = LEAST_REGISTERS[isinstance(config, RingConfig), call.variant.weight_gradients > 1]
    return beside + each * config.vectors * storage(call.dtype).vector
