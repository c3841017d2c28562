"""An operator's ladder on a GPU: the time of each step, and counters that explain it.

    python -m benchmarks ladder softmax --json benchmarks/ladder/softmax/h200.json

Times: every step and the production kernels are timed in bursts as in `timing.py`. Right before each of them, its
baseline is timed: a plain kernel that moves the same bytes, or cuBLAS. Each result is first compared with the float64
truth. Counters: this program runs itself under Nsight Compute, which counts one launch of each (`profiler.py`). If the
profiler is not available, the file contains the reason instead. `python -m benchmarks plot` puts both on the operator's
page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch

from .cases import find, require_gpu
from .comparison import commit, duration
from .contestant import Contestant, dualops_contestant
from .ladder_table import PAGES, Page
from .matmul import eager
from .profiler import NoCounters, Profiled, profile, version
from .timing import burst
from .tree import ROOT, spec
from .work import Work, bind
from .workload import Workload, WrongResult


class Ladder(NamedTuple):
    """The timed kernels of an operator."""

    operator: spec.Spec
    steps: str  # the module of its steps
    production: Mapping[str, str]  # production kernels: their names in tables, and their rungs
    against: Callable[[Workload], Callable[[], float]]  # returns a function that times the baseline, in seconds

    @property
    def page(self) -> Page:
        return PAGES[self.operator.name]

    def case(self, name: str) -> spec.Case:
        return {case.id: case for case in self.operator.cases}[name]


def streaming(workload: Workload) -> Callable[[], float]:
    """Time a plain kernel that moves the bytes of the case, once."""
    from dualops.cuda.tuning.roof import stream_roof

    work = Work.of(workload.operator, workload.case, "forward")
    seconds = stream_roof(work.bytes_read, work.bytes_written)
    return lambda: seconds


def cublas(workload: Workload) -> Callable[[], float]:
    """Time torch.matmul, again for each kernel: the chip's clock falls as it gets warm."""
    theirs = eager(bind(workload.operator, workload.case))
    return lambda: burst(workload.call(theirs, "forward"))


LADDERS = {
    "softmax": Ladder(
        spec.OPERATORS["softmax"], "examples.ladder.softmax", {"rows.py": "simt", "ring.py": "sm90"}, streaming
    ),
    "matmul": Ladder(spec.OPERATORS["matmul"], "examples.ladder.matmul", {"sm90": "sm90"}, cublas),
}


@dataclass(frozen=True)
class Point:
    """One kernel on one case; seconds per call."""

    who: str
    case: str
    roof: float  # seconds of the baseline
    seconds: float | None = None
    failure: str | None = None


def contestants(ladder: Ladder, case: spec.Case) -> list[Contestant]:
    """Return the steps, from the first to the last, and the production kernels."""
    steps = import_module(ladder.steps)
    found = [Contestant(name, partial(steps.run_step, name)) for name in steps.STEPS]
    for name, rung in ladder.production.items():
        found.append(dualops_contestant(ladder.operator, case, rung)._replace(name=name))
    return found


def run(ladder: Ladder, show: Callable[[str], None]) -> list[Point]:
    """Time everything, and show each line when it is done. Raises WrongResult if a kernel is wrong."""
    require_gpu()
    found = []
    with torch.no_grad():
        for name in ladder.page.cases:
            for point in timed(ladder, ladder.case(name)):
                show(line(point))
                found.append(point)
    return found


def timed(ladder: Ladder, case: spec.Case) -> Iterator[Point]:
    """Time every kernel on this case."""
    workload = Workload(ladder.operator, case, find(ladder.operator.name).sample)
    against = ladder.against(workload)
    for contestant in contestants(ladder, case):
        try:
            accuracy = workload.check(contestant, "forward")
        except NotImplementedError as error:
            yield Point(contestant.name, case.id, against(), failure=str(error))
            continue
        if not accuracy.passed:
            raise WrongResult(f"{contestant.name} {case.id}: {accuracy.message}")
        torch.cuda.empty_cache()  # each kernel gets fresh memory, as in `comparison`
        yield Point(contestant.name, case.id, against(), burst(workload.call(contestant, "forward")))


def line(point: Point) -> str:
    """`rows32768x4096-bfloat16  vectors                 133.3 µs   98%`."""
    start = f"{point.case:24} {point.who:18}"
    if point.seconds is None:
        return f"{start} {point.failure}"
    return f"{start} {duration(point.seconds):>11}  {point.roof / point.seconds:4.0%}"


def launch_once(ladder: Ladder, device: str = "cuda") -> list[str]:
    """Launch every kernel once, for a profiler; return the names of the kernels that support the case."""
    require_gpu()
    case = ladder.case(ladder.page.counted)
    arrays = {
        name: torch.randn(shape, device=device).to(getattr(torch, case.dtype)) for name, shape in case.shapes.items()
    }
    done = []
    for contestant in contestants(ladder, case):
        try:
            contestant.forward(**arrays)
        except NotImplementedError:
            continue
        done.append(contestant.name)
    torch.cuda.synchronize()
    return done


def counters(ladder: Ladder, names: list[str], show: Callable[[str], None]) -> dict[str, Any]:
    """Return the profiler's counters of one launch per kernel. names: the kernels that support the case, in order."""
    content: dict[str, Any] = {"case": ladder.page.counted, "profiler": version(), "failure": None, "kernels": []}
    metrics = [counter.metric for counter in ladder.page.counters]
    command = [sys.executable, "-m", "benchmarks", "ladder", ladder.operator.name, "--once"]
    try:
        found = profile(command, ladder.operator.name, metrics)
        if len(found) != len(names):
            raise NoCounters(f"ncu saw {len(found)} kernels, expected {len(names)}: {', '.join(names)}")
    except NoCounters as reason:
        show(f"no counters: {reason}")
        return {**content, "failure": str(reason)}
    for name, launch in zip(names, found):
        show(format_counters(name, launch, metrics))
    return {**content, "kernels": [{"who": name, **launch._asdict()} for name, launch in zip(names, found)]}


def format_counters(name: str, launch: Profiled, metrics: Iterable[str]) -> str:
    """Return a line with the counters in the order of `metrics`."""
    values = [launch.metrics.get(metric) for metric in metrics]
    return f"{name:18} " + "  ".join("–" if value is None else f"{value:.4g}" for value in values)


def document(ladder: Ladder, points: Iterable[Point], counted: dict[str, Any]) -> dict[str, Any]:
    """Return the content for `--json`, which `python -m benchmarks plot` reads."""
    return {
        "operator": ladder.operator.name,
        "dtype": ladder.case(ladder.page.counted).dtype,
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(ROOT),
        "points": [asdict(point) for point in points],
        "counters": counted,
    }
