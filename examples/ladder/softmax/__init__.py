"""softmax as a ladder: each step is a kernel with one idea more than the previous one.

dualops/cuda/softmax/README.md explains it step by step.

    thread_a_row   a thread takes a row, which it reads three times                        dualops/cuda/softmax/naive.py
    tree           a block takes a row; its threads agree through shared memory            kernels.py
    shuffles       they agree within a warp first, without shared memory
    registers      each thread keeps its elements in registers: x is read once
    vectors        a load reads 16 bytes
    online         maximum and sum in one pass, for rows too long to be kept               dualops/cuda/rows/reread.py

For learning, tests and benchmarks: `run_step("tree", x)` on contiguous rows, forward only, wherever kernels run. The
production kernels of `dualops.cuda.softmax`, dualops/cuda/rows/registers.py and cluster.py, continue from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from dualops.cuda.launch.device import Device
from dualops.cuda.launch.operation import Choice, Operation
from dualops.cuda.launch.step import Step
from dualops.cuda.launch.views import absent
from dualops.cuda.rows import reread
from dualops.cuda.rows.operator import RowArrays, Rows
from dualops.cuda.rows.reread import LongRowsConfig
from dualops.cuda.softmax import naive
from dualops.cuda.softmax.naive import NaiveConfig
from dualops.cuda.softmax.operator import Softmax
from dualops.cuda.tile.storage import access, storage
from dualops.spec import ArrayMeta, Problem, softmax as SPEC
from dualops.spec.meta import Strided

from .kernels import KeepConfig, ReadAgainConfig, build_keep, build_read_again

THREADS = 256  # per block, in every step except the first
MOST_TERMS = 256  # numbers that a thread adds one by one: float32 loses the last bits of longer sums
MOST_KEPT = 64  # registers in which a thread keeps elements of a row


class LadderStep(NamedTuple):
    """A step: what is new in it, its Config for rows of N elements, its launch for M of them."""

    idea: str
    configure: Callable[[int, str, bool], Any]  # (N, dtype, aligned) -> Config, None for unsupported rows
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
    """Return the Config with enough loads for the row, rounded up to a power of two: each number is its own kernel."""
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
    """Yield the steps that support the problem. All need contiguous rows along the last axis."""
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


# the steps are rungs of a separate operation, with softmax's validator, plans and errors
forward = Operation(replace(SPEC, name="softmax_ladder", rungs=tuple(STEPS)), rungs=(choices,), inplace=("x",))


def run_step(name: str, x: Any, out: Any = None, stream: Any = None) -> Any:
    """Compute softmax along the last axis of `x` by the step `name` of STEPS.

    x: a contiguous device array of any shape (in the simulator a NumPy array). out, stream and the result are those of
    `dualops.cuda.softmax`. `dualops.cuda.plan("softmax_ladder", x, kernel=name)` shows the launch.
    Raises ValueError for an unknown step, NotImplementedError for rows that the step does not support: rows of more
    than 65536 elements (tree, shuffles) or 16384, in float64 8192 (registers, vectors), and rows that are not whole,
    aligned vectors (vectors).
    """
    return forward((x,), (-1,), out, name, stream)
