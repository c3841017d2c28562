"""softmax as a ladder: each step is a kernel with one idea more than the one before. README.md goes up, step by step.

    thread_a_row   a thread takes a row, which it reads three times                        naive.py
    tree           a block takes a row; its threads agree through shared memory
    shuffles       they agree within a warp first, without shared memory
    registers      a thread keeps what it has read: x is read once
    vectors        a load brings 16 bytes
    online         maximum and sum in one reading, for rows too long to be kept            ../rows/reread.py

For learning, tests and benchmarks: `run_step("tree", x)` on contiguous rows, forward only, wherever kernels run. What
`dualops.cuda.softmax` takes instead, rows/registers.py and rows/cluster.py, goes on from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem, softmax as SPEC
from ...spec.meta import Strided
from ..compiler.backend import Kernel, Namespace, builds, cuda, i32, i64, kernel, pointer, verb
from ..launch.device import Device
from ..launch.operation import Choice, Operation
from ..launch.step import Step
from ..launch.views import absent
from ..rows import reread
from ..rows.operator import RowArrays, Rows
from ..rows.reread import LongRowsConfig
from ..tile.numbers import numbers
from ..tile.rows import lane_reductions
from ..tile.storage import access, storage
from . import naive
from .naive import NaiveConfig
from .operator import Softmax

THREADS = 256  # of a block, in every step but the first
MOST_TERMS = 256  # that a thread adds one by one: float32 loses the last bits of longer sums
MOST_KEPT = 64  # registers in which a thread keeps elements of a row


# --- how the threads of a block agree on one number ----------------------------------------------


class Agreement(Namespace):
    """Verbs: every thread of the block brings its x, all leave with the maximum, or the sum, of all.

    `part` is a shared array that is used once, so that nobody need wait until all others have read it.
    """

    size: int  # of `part`
    max: Callable[..., Any]  # (x, part)
    sum: Callable[..., Any]  # (x, part)


@verb
def add(a, b):
    return a + b


@cache
def by_tree(number: Any, threads: int) -> Agreement:
    """The first half of the threads takes what the second half has, then half of these, ..., then thread 0.

    Barriers: 1 + log2(threads). The busy threads are neighbours and read neighbours: no two in one bank.
    """

    def along(combine: Callable[..., Any]) -> Callable[..., Any]:
        @verb
        def agree(x, part):
            tid = cuda.threadIdx.x
            part[tid] = x
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if tid < half:
                    part[tid] = combine(part[tid], part[tid + half])
                cuda.syncthreads()
                half >>= 1
            return part[0]

        return agree

    return Agreement(size=threads, max=along(numbers(number).maximum), sum=along(add))


@cache
def by_shuffles(number: Any, threads: int) -> Agreement:
    """The lanes of a warp swap registers; a warp leaves one number, and every warp combines what all have left.

    Barriers: 1. All 32 lanes stay busy, and end with the same number.
    """
    warps = threads // 32
    lanes, parts = lane_reductions(number, 32), lane_reductions(number, warps)

    def along(among_lanes: Callable[..., Any], among_warps: Callable[..., Any]) -> Callable[..., Any]:
        @verb
        def agree(x, part):
            lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
            x = among_lanes(x)
            if lane == 0:
                part[warp] = x
            cuda.syncthreads()
            return among_warps(part[lane % warps])

        return agree

    return Agreement(size=warps, max=along(lanes.max, parts.max), sum=along(lanes.sum, parts.sum))


AGREEMENTS = {"tree": by_tree, "shuffles": by_shuffles}


# --- tree, shuffles ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadAgainConfig:
    """A block a row, which is read three times."""

    threads: int  # a power of two, from 32
    agree: str  # "tree" or "shuffles"


@builds
def build_read_again(config: ReadAgainConfig, dtype: str) -> Kernel:
    """softmax_read_again(y, x, N): a block takes a row, thread `tid` of it the elements tid, tid + threads, ...

        1  the maximum of my elements; the block agrees on the row's
        2  x again: the sum of exp(x - maximum) over my elements; the block agrees on the row's
        3  x again: y = exp(x - maximum) / sum

    Shared memory: two numbers a thread by tree, two a warp by shuffles.
    """
    mem = storage(dtype)
    num, block = numbers(mem.number), AGREEMENTS[config.agree](mem.number, config.threads)

    @kernel(pointer(mem.element), pointer(mem.element), i32, threads=config.threads)
    def softmax_read_again(y, x, N):
        tid = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * N  # where it begins
        part_max = cuda.shared.array(block.size, mem.number)
        part_sum = cuda.shared.array(block.size, mem.number)

        my_max = num.minus_inf
        for n in range(tid, N, config.threads):
            my_max = num.maximum(my_max, mem.load(x, row + n))
        row_max = block.max(my_max, part_max)

        my_sum = num.zero
        for n in range(tid, N, config.threads):
            my_sum += num.exp(mem.load(x, row + n) - row_max)
        rescale = num.one / block.sum(my_sum, part_sum)

        for n in range(tid, N, config.threads):
            mem.store(y, row + n, num.exp(mem.load(x, row + n) - row_max) * rescale)

    return softmax_read_again


# --- registers, vectors --------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepConfig:
    """A block a row, which is kept in registers."""

    threads: int  # a power of two, from 32
    loads: int  # that a thread makes, all before it needs the first
    aligned: bool  # a load brings 16 bytes, not one element

    def columns(self, dtype: str) -> int:
        """Longest row."""
        return self.threads * self.loads * access(dtype, self.aligned).vector


@builds
def build_keep(config: KeepConfig, dtype: str) -> Kernel:
    """softmax_keep(y, x, N): a block takes a row, thread `tid` of it the vectors tid, tid + threads, ...

        1  all my elements to registers; beyond the row's end -infinity, which changes neither maximum nor sum
        2  their maximum; the block agrees on the row's
        3  e = num.exp(x - maximum) in their place, and the sum of e; the block agrees on the row's
        4  y = e / sum

    Registers: loads * vector numbers a thread, and about 20 more. Shared memory: two numbers a warp.
    """
    mem, vec = storage(dtype), access(dtype, config.aligned)
    num, block = numbers(mem.number), by_shuffles(mem.number, config.threads)

    @kernel(pointer(mem.element), pointer(mem.element), i32, threads=config.threads)
    def softmax_keep(y, x, N):
        tid = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * N  # where it begins
        part_max = cuda.shared.array(block.size, mem.number)
        part_sum = cuda.shared.array(block.size, mem.number)
        frag = cuda.local.array(config.loads * vec.vector, mem.number)  # my elements of x, then e, then y
        for j in range(config.loads):
            n = (j * config.threads + tid) * vec.vector
            vec.load(frag, j * vec.vector, x, row + n, n < N, num.minus_inf)

        my_max = num.minus_inf
        for i in range(len(frag)):
            my_max = num.maximum(my_max, frag[i])
        row_max = block.max(my_max, part_max)

        my_sum = num.zero
        for i in range(len(frag)):
            frag[i] = num.exp(frag[i] - row_max)
            my_sum += frag[i]
        rescale = num.one / block.sum(my_sum, part_sum)

        for i in range(len(frag)):
            frag[i] *= rescale
        for j in range(config.loads):
            n = (j * config.threads + tid) * vec.vector
            vec.store(y, row + n, n < N, frag, j * vec.vector)

    return softmax_keep


# --- all steps -----------------------------------------------------------------------------------


class LadderStep(NamedTuple):
    """A step: what is new in it, its Config for rows of N elements, its launch for M of them."""

    idea: str
    configure: Callable[[int, str, bool], Any]  # (N, dtype, aligned) -> Config, None where it does no such rows
    launch: Callable[[Any, str, int, int], Step]  # (Config, dtype, M, N)


def _thread_a_row(config: NaiveConfig, dtype: str, M: int, N: int) -> Step:
    return Step(naive.build_forward(config, dtype), (-(-M // config.threads),), ("y", "x", M, N, N, N))


def _read_again(config: ReadAgainConfig, dtype: str, M: int, N: int) -> Step:
    return Step(build_read_again(config, dtype), (M,), ("y", "x", N))


def _keep(config: KeepConfig, dtype: str, M: int, N: int) -> Step:
    return Step(build_keep(config, dtype), (M,), ("y", "x", N))


def _online(config: LongRowsConfig, dtype: str, M: int, N: int) -> Step:
    y, x, none = Strided("y", (N,)), Strided("x", (N,)), absent(1)
    (step,) = reread.steps_of(config, Softmax(dtype), (RowArrays(y, none, x, none), (), Rows(M, N, (M,))))
    return step


def _configure_read_again(agree: str, N: int, dtype: str, aligned: bool) -> ReadAgainConfig | None:
    return ReadAgainConfig(THREADS, agree) if N <= MOST_TERMS * THREADS else None


def _configure_keep(vectors: bool, N: int, dtype: str, aligned: bool) -> KeepConfig | None:
    """As few loads as hold the row, rounded up to a power of two: a kernel for each number."""
    if vectors and not aligned:
        return None
    most = MOST_KEPT * 32 // storage(dtype).number.bitwidth // access(dtype, vectors).vector
    ladder = [KeepConfig(THREADS, 1 << power, vectors) for power in range(most.bit_length())]
    return next((config for config in ladder if config.columns(dtype) >= N), None)


STEPS: dict[str, LadderStep] = {
    "thread_a_row": LadderStep("a thread takes a row", lambda N, dtype, aligned: NaiveConfig(), _thread_a_row),
    "tree": LadderStep(
        "a block takes a row; its threads agree through shared memory",
        partial(_configure_read_again, "tree"),
        _read_again,
    ),
    "shuffles": LadderStep(
        "threads agree within a warp first, without shared memory",
        partial(_configure_read_again, "shuffles"),
        _read_again,
    ),
    "registers": LadderStep("a thread keeps what it has read", partial(_configure_keep, False), _keep),
    "vectors": LadderStep("a load brings 16 bytes", partial(_configure_keep, True), _keep),
    "online": LadderStep(
        "maximum and sum in one reading",
        lambda N, dtype, aligned: LongRowsConfig(THREADS, 2 if aligned else 8, aligned),
        _online,
    ),
}


def choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The steps that do the problem. None does another axis than the last, or rows that are not side by side."""
    metas, dtype, M, N = (results["y"], problem.arrays["x"]), problem.dtype, problem.M, problem.N
    if problem.axis != len(metas[0].shape) - 1 or not all(meta.is_row_major for meta in metas):
        return
    aligned = N % storage(dtype).vector == 0 and all(meta.pointer % 16 == 0 for meta in metas)
    for name, (idea, configure, launch) in STEPS.items():
        config = configure(N, dtype, aligned)
        if config is not None:
            yield Choice(name, config, idea, partial(_one_launch, launch, config, dtype, M, N))


def _one_launch(launch: Callable[..., Step], *args: Any) -> list[Step]:
    return [launch(*args)]


# the steps are rungs of an operation of its own, with softmax's validator, plans and errors
forward = Operation(replace(SPEC, name="softmax_ladder", rungs=tuple(STEPS)), rungs=(choices,), inplace=("x",))


def run_step(name: str, x: Any, out: Any = None, stream: Any = None) -> Any:
    """softmax along the last axis of `x` by the step `name` of STEPS.

    x: a contiguous device array of any shape (in the simulator a NumPy array); out, stream and what is returned: as for
    `dualops.cuda.softmax`. `dualops.cuda.plan("softmax_ladder", x, kernel=name)` says how it is launched.
    Raises ValueError for an unknown step, NotImplementedError for rows that the step does not do: longer than 65536
    elements (tree, shuffles) or 16384, in float64 8192 (registers, vectors); not of whole, aligned vectors (vectors).
    """
    return forward((x,), (-1,), out, name, stream)
