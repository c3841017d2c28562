"""softmax's ring kernels with one mistake in their protocol. The simulator must reject all of them.

A mutant replaces `ring`, `parts` or `start_cluster` while the kernel is built and run, with one verb changed. Mutants
only run in the simulator: on a GPU most of them hang, or give the right result by chance.
mutants.py derives the mutants with a single wrong step, for every kernel. These are other mistakes: two that fit
together, a step too many, or a step that only some threads or stages execute.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from dualops.cuda.compiler.backend import Kernel, cuda
from dualops.cuda.launch.step import flat
from dualops.cuda.ptx.async_copy import st_async_v2_f64
from dualops.cuda.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from dualops.cuda.ptx.warp import bar_warp_sync, cluster_ctarank
from dualops.cuda.rows import chunks, exchange
from dualops.cuda.rows.chunks import ChunksConfig
from dualops.cuda.rows.operator import RowArrays, Rows
from dualops.cuda.simulator import Deadlock, current
from dualops.cuda.softmax.operator import Softmax
from dualops.cuda.tile.ring import parts, ring, start_cluster
from dualops.cuda.tile.rows import FULL_WARP
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import Strided
from tests.checks import Rejected, check

DTYPE = "float64"
ROWS = 6  # all for one cluster
# each stage is filled several times, and there are enough stages for a warp to be a row ahead of another
CONFIG = ChunksConfig(warps=2, vectors=1, stages=4, cluster=1, chunks=2)

# patterns of the messages that reject mutants
NAN, VALUE = r"(y|dx): nan at", r"max error .* limit"
WRONG = f"{NAN}|{VALUE}"
STUCK = r"Deadlock: \d+ threads wait forever: block .* at mbarrier \d, phase \d: threads"
TOO_MANY = r"mbarrier \d: more than \d arrivals in phase \d"
NOT_THERE = r"mbarrier \d: used before it is initialised"


class Sizes(NamedTuple):
    """The sizes of the kernel that a mutant needs."""

    stages: int
    warps: int
    cluster: int

    @property
    def parts(self) -> int:
        """Number of pairs that are merged to a row's result."""
        return self.warps * self.cluster


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    name: str
    of: str  # "ring", "parts" or "start_cluster"
    change: Callable[[Any, Sizes], Any]  # (the right object) -> its replacement, or the replaced verbs
    reason: str  # a pattern of the message
    clusters: tuple[int, ...]


MUTANTS: dict[str, Mutant] = {}
DIRECTIONS = ("forward", "backward")


def mutant(
    of: str, reason: str, clusters: tuple[int, ...] = (1, 2)
) -> Callable[[Callable[[Any, Sizes], Any]], Callable[[Any, Sizes], Any]]:
    """Decorate a function that returns wrong verbs for the right ones: add a mutant of its name."""

    def decorate(change: Callable[[Any, Sizes], Any]) -> Callable[[Any, Sizes], Any]:
        MUTANTS[change.__name__] = Mutant(change.__name__, of, change, reason, clusters)
        return change

    return decorate


@contextmanager
def mutated(one: Mutant | None, config: ChunksConfig, backward: bool) -> Iterator[Kernel]:
    """Yield the kernel, rebuilt with the mutant; None: without a mutant."""
    sizes = Sizes(config.stages, config.warps, config.cluster)

    def instead(of: str, right: Any) -> Any:
        if one is None or one.of != of:
            return right
        changed = one.change(right, sizes)
        return right.but(**changed) if isinstance(changed, dict) else changed

    replaced = {
        "ring": lambda *sizes: instead("ring", ring(*sizes)),
        "start_cluster": instead("start_cluster", start_cluster),
    }
    build: Any = chunks.build
    not_kept: Any = exchange.in_cluster
    replaced["in_cluster"] = not_kept.__wrapped__
    with (
        mock.patch.multiple(chunks, **replaced),
        mock.patch.object(exchange, "parts", lambda *sizes: instead("parts", parts(*sizes))),
    ):
        yield build.__wrapped__(config, Softmax(DTYPE, backward))


def rejection(one: Mutant | None, cluster: int, backward: bool) -> str | None:
    """Return why the mutant is rejected; None if it passes."""
    config = replace(CONFIG, cluster=cluster)
    names = ["dx", "y", "dy"] if backward else ["y", "x"]
    columns = config.kept(DTYPE)
    case = Case("protocol", DTYPE, {"x": (ROWS, columns)}, seed=cluster)

    with mutated(one, config, backward) as kernel:

        def run(*arrays: np.ndarray, out: np.ndarray) -> None:
            pointers = [flat(array, name) for name, array in zip(names, (out, *arrays), strict=True)]
            launch = kernel[cluster, kernel.threads, 0, config.staged(DTYPE, 2 if backward else 1).nbytes]
            y, *inputs = (Strided(pointer, (columns,)) for pointer in pointers)
            arrays = RowArrays(y, y, *inputs, *[y] * (2 - len(inputs)))
            launch(arrays, (), Rows(ROWS, columns, (ROWS,)), columns // cluster)

        try:
            check(OPERATORS["softmax"], case, run, backward=backward, ways=("given",))
        except (Rejected, IndexError, Deadlock, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return None


# --- the ring of stages ---------------------------------------------------------------------------


@mutant("ring", STUCK)
def copies_one_stage_only(right, sizes):
    def copy(filling, *operands):
        if filling.stage == 0:
            right.copy(filling, *operands)

    return {"copy": copy}


@mutant("ring", NAN)
def one_lane_waits_for_full(right, sizes):
    def wait(smem, i):
        if cuda.threadIdx.x % 32 == 0:
            right.wait(smem, i)
        return i % sizes.stages

    return {"wait": wait}


@mutant("ring", STUCK)
def released_by_one_warp(right, sizes):
    def release(smem, stage):
        if cuda.threadIdx.x < 32:
            right.release(smem, stage)

    return {"release": release}


@mutant("ring", TOO_MANY)
def released_by_every_lane(right, sizes):
    def release(smem, stage):
        bar_warp_sync(FULL_WARP)
        mbarrier_arrive(smem.empty, stage)

    return {"release": release}


@mutant("ring", TOO_MANY)
def released_twice(right, sizes):
    def release(smem, stage):
        right.release(smem, stage)
        right.release(smem, stage)

    return {"release": release}


@mutant("ring", rf"{NAN}|{STUCK}")
def released_before_it_is_read(right, sizes):
    """Release a stage at the wait; in backward, at the first of two waits."""
    released = set()

    def wait(smem, i):
        stage = right.wait(smem, i)
        if (current(), i) not in released:
            released.add((current(), i))
            right.release(smem, stage)
        return stage

    return {"wait": wait, "release": lambda smem, stage: None}


@mutant("ring", NOT_THERE)
def last_stage_not_initialised(right, sizes):
    def init(smem):
        for stage in range(sizes.stages - 1):
            mbarrier_init(smem.full, stage, 1)
            mbarrier_init(smem.empty, stage, sizes.warps)

    return {"init": init}


# --- the start of a cluster, and the exchange of a row's parts ------------------------------------


@mutant("start_cluster", r"before barrier\.cluster\.wait", (2,))
def start_of_the_block_alone(right, sizes):
    def start():
        fence_mbarrier_init()
        cuda.syncthreads()

    return start


def _mine() -> tuple[int, int, int]:
    """Return this thread's block in its cluster, its warp and its lane."""
    return cluster_ctarank(), cuda.threadIdx.x // 32, cuda.threadIdx.x % 32


@mutant("parts", WRONG)
def parts_not_double_buffered(right, sizes):
    if sizes.cluster == 1:
        return {
            "send": lambda smem, row_round, a, b: right.send(smem, 0, a, b),
            "wait": lambda smem, row_round: right.wait(smem, 0),
        }

    def send(smem, row_round, a, b):
        rank, warp, lane = _mine()
        half = row_round & 1
        if (warp == 0) & (lane == 0):
            mbarrier_arrive_expect_tx(smem.bells, half, sizes.parts * 16)
        if lane < sizes.cluster:
            st_async_v2_f64(smem.pairs, (rank * sizes.warps + warp) * 2, lane, a, b, smem.bells, half)

    def wait(smem, row_round):
        right.wait(smem, row_round)
        return 0

    return {"send": send, "wait": wait}


@mutant("parts", NAN, (2,))
def one_bell_for_both_halves(right, sizes):
    def send(smem, row_round, a, b):
        rank, warp, lane = _mine()
        if (warp == 0) & (lane == 0):
            mbarrier_arrive_expect_tx(smem.bells, 0, sizes.parts * 16)
        if lane < sizes.cluster:
            at = ((row_round & 1) * sizes.parts + rank * sizes.warps + warp) * 2
            st_async_v2_f64(smem.pairs, at, lane, a, b, smem.bells, 0)

    def wait(smem, row_round):
        mbarrier_wait(smem.bells, 0, row_round & 1)
        return (row_round & 1) * sizes.parts * 2

    return {"send": send, "wait": wait}


@mutant("parts", TOO_MANY, (2,))
def every_warp_expects_parts(right, sizes):
    def send(smem, row_round, a, b):
        right.send(smem, row_round, a, b)
        if cuda.threadIdx.x == 32:
            mbarrier_arrive_expect_tx(smem.bells, row_round & 1, sizes.parts * 16)

    return {"send": send}


@mutant("parts", r"copies are still in flight when", (2,))
def sends_parts_that_nobody_waits_for(right, sizes):
    def send(smem, row_round, a, b):
        right.send(smem, row_round, a, b)
        if row_round == ROWS - 1:
            right.send(smem, row_round + 1, a, b)

    return {"send": send}


@mutant("parts", rf"{NAN}|{STUCK}")
def one_warp_sends_no_parts(right, sizes):
    def send(smem, row_round, a, b):
        if cuda.threadIdx.x < 32:
            right.send(smem, row_round, a, b)

    return {"send": send}


@mutant("parts", r"Deadlock: .* at syncthreads", (1,))
def meeting_of_the_whole_block(right, sizes):
    def wait(smem, row_round):
        cuda.syncthreads()
        return (row_round & 1) * sizes.parts * 2

    return {"wait": wait}


@mutant("parts", NAN, (1,))
def meeting_of_each_warp_alone(right, sizes):
    def wait(smem, row_round):
        bar_warp_sync(FULL_WARP)
        return (row_round & 1) * sizes.parts * 2

    return {"wait": wait}
