"""Time and memory of attention against the length of its sequences: the purpose of the blocked form.

    python -m benchmarks scaling --json benchmarks/scaling/h200.json

B=1, H=16, D=64, no mask, float32 and bfloat16, forward and backward: dualops on each of its rungs, torch's
memory-efficient attention, and the NumPy reference, on the CPU, for lengths that take seconds. Times are of bursts, as
in `timing.py`; for NumPy the median of up to three calls. Memory is the peak of a call beyond its inputs and results.
For lengths up to NumPy's longest, one head of every result is compared with float64 truth before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from importlib import import_module
from itertools import product
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch

from .cases import find, require_gpu
from .comparison import commit, duration
from .contestant import Contestant, dualops_contestant
from .timing import burst, extra_memory, within
from .tree import ROOT, spec
from .work import DIRECTIONS, Work
from .workload import Workload, WrongResult

OPERATOR = spec.OPERATORS["flash_attention"]
DTYPES = ("float32", "bfloat16")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
H, D = 16, 64
NUMPY_UP_TO = 2048
NUMPY_CALLS, NUMPY_SECONDS = 3, 6.0
MOST_BYTES = 60e9  # most memory of a contestant in addition to its inputs and results
NUMPY, PEER = "NumPy reference", "SDPA efficient"


@dataclass(frozen=True)
class Point:
    """One contestant at one length; seconds per call, peak bytes beyond inputs and results."""

    who: str
    direction: str
    dtype: str
    S: int
    flops: int
    seconds: float | None = None
    extra_memory: int | None = None  # None: not measured
    failure: str | None = None


def case_of(dtype: str, S: int) -> spec.Case:
    shape = (1, H, S, D)
    return spec.Case(f"s{S}", dtype, {"q": shape, "k": shape, "v": shape}, {"return_lse": True})


def run(*, longest: int, show: Callable[[str], None]) -> list[Point]:
    """Measure all lengths up to `longest`, and show each point when it is done. Raises WrongResult if dualops errs."""
    require_gpu()
    found = []
    with torch.no_grad():
        for dtype, S in product(DTYPES, (length for length in LENGTHS if length <= longest)):
            for point in measured(case_of(dtype, S), S):
                show(line(point))
                found.append(point)
    return found


def measured(case: spec.Case, S: int) -> Iterator[Point]:
    """Measure all contestants at one length, in one dtype."""
    workload = Workload(OPERATOR, case, find(OPERATOR.name).sample)
    workload.prepare_backward(dualops_contestant(OPERATOR, case))
    peer = find(OPERATOR.name).peers[PEER](workload.problem)
    ours = [dualops_contestant(OPERATOR, case, rung) for rung in import_module("dualops.cuda").RUNGS[OPERATOR.name]]
    for direction in DIRECTIONS:
        start = Point("", direction, case.dtype, S, Work.of(OPERATOR, case, direction).flops)
        if S <= NUMPY_UP_TO:
            function, arrays = workload.reference(direction), workload.arguments(direction)
            yield replace(start, who=NUMPY, seconds=seconds_of(partial(function, **arrays)))
        for contestant in (*ours, peer):
            yield one(replace(start, who=contestant.name), workload, contestant)


def one(start: Point, workload: Workload, contestant: Contestant) -> Point:
    """Return `start` with its figures, or with a failure if it needs too much memory. Raises WrongResult if dualops is
    wrong.
    """
    asked = scores_bytes(workload.problem, start.direction) if contestant.name == "dualops naive" else 0
    if asked > MOST_BYTES:
        return replace(start, failure=f"would need {asked / 1e9:.0f} GB, more than {MOST_BYTES / 1e9:.0f}")
    try:
        if start.S <= NUMPY_UP_TO:
            accuracy = workload.check(contestant, start.direction)
            if not accuracy.passed and contestant.name != PEER:
                raise WrongResult(f"{contestant.name} {start.direction} {workload.case.id}: {accuracy.message}")
        torch.cuda.empty_cache()
        seconds = burst(workload.call(contestant, start.direction))
        extra = extra_memory(workload.lone_call(contestant, start.direction))
    except (RuntimeError, NotImplementedError) as error:  # memory, or a backend without this dtype
        reason = (str(error).strip() or "no message").splitlines()[0]
        return replace(start, failure=f"{type(error).__name__}: {reason}")
    return replace(start, seconds=seconds, extra_memory=extra)


def scores_bytes(problem: spec.Problem, direction: str) -> int:
    """Return the bytes of the unfused form: all scores; in backward their gradient too."""
    p = problem
    number = 8 if p.dtype == "float64" else 4
    return prod((p.B, p.H, p.Sq, p.Sk)) * number * (2 if direction == "backward" else 1)


def seconds_of(call: Callable[[], object]) -> float:
    """Measure seconds per call on the host. The first call counts only if it is so slow that it is the only one."""

    def once() -> float:
        started = perf_counter()
        call()
        return perf_counter() - started

    first = once()
    more = within(NUMPY_CALLS + 1, NUMPY_SECONDS, first) - 1
    return median(once() for _ in range(more)) if more else first


def line(point: Point) -> str:
    """`bfloat16   4096  backward  dualops simt        12.300 ms    22.400 TFLOP/s        0.25 MiB`."""
    p = point
    start = f"{p.dtype:8} {p.S:6}  {p.direction:8}  {p.who:15}"
    if p.seconds is None:
        return f"{start}  {p.failure}"
    memory = "" if p.extra_memory is None else f"  {p.extra_memory / 2**20:10.2f} MiB"
    return f"{start}  {duration(p.seconds):>12}  {p.flops / p.seconds / 1e12:8.3f} TFLOP/s{memory}"


def document(points: Iterable[Point]) -> dict[str, Any]:
    """Return the content for `--json`, which `python -m benchmarks plot` reads."""
    return {
        "operator": OPERATOR.name,
        "heads": H,
        "width": D,
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(ROOT),
        "points": [asdict(point) for point in points],
    }
