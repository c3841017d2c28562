"""softmax's ladder on a GPU: what each step gains, and the counters that say why.

    python -m benchmarks ladder softmax --json benchmarks/ladder/h200.json

Times: every step, and the production kernels above them, on 32768 rows of bfloat16, in bursts as in `timing.py`, beside
the time of a plain kernel that moves the same bytes. Each result is first held against float64 truth. Counters: this
program runs itself under Nsight Compute, which counts one launch of each at 4096 columns (`profiler.py`); where that is
not to be had, the reason is kept in their place. `python -m benchmarks plot` puts both on the page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from typing import Any

import torch

from .cases import find, require_gpu
from .comparison import commit, duration
from .contestant import Contestant, dualops_contestant
from .ladder_table import COUNTERS
from .profiler import NoCounters, Profiled, profile, version
from .timing import burst
from .tree import ROOT, spec
from .work import Work
from .workload import Workload, WrongResult

OPERATOR = spec.OPERATORS["softmax"]
ROWS, COLUMNS, COUNTED = 32768, (1024, 4096, 16384), 4096
PRODUCTION = {"rows.py": "simt", "ring.py": "sm90"}  # whose rung serves such rows
METRICS = tuple(counter.metric for counter in COUNTERS)


@dataclass(frozen=True)
class Point:
    """One kernel on rows of one length; seconds a call."""

    who: str
    columns: int
    roof: float  # seconds that the same bytes take a plain kernel
    seconds: float | None = None
    failure: str | None = None


def case_of(columns: int) -> spec.Case:
    return spec.Case(f"rows{ROWS}x{columns}", "bfloat16", {"x": (ROWS, columns)})


def contestants(case: spec.Case) -> list[Contestant]:
    """The steps, from the first to the last, and the production kernels."""
    from dualops.cuda.softmax.ladder import STEPS, run_step

    steps = [Contestant(name, partial(run_step, name)) for name in STEPS]
    return steps + [dualops_contestant(OPERATOR, case, rung)._replace(name=name) for name, rung in PRODUCTION.items()]


def run(show: Callable[[str], None]) -> list[Point]:
    """Time everything, showing each line as it comes. Raises WrongResult if a kernel is wrong."""
    require_gpu()
    found = []
    with torch.no_grad():
        for columns in COLUMNS:
            for point in timed(columns):
                show(line(point))
                found.append(point)
    return found


def timed(columns: int) -> Iterator[Point]:
    """Every kernel on rows of this length."""
    from dualops.cuda.roof import stream_roof

    case = case_of(columns)
    work = Work.of(OPERATOR, case, "forward")
    roof = stream_roof(work.bytes_read, work.bytes_written)
    workload = Workload(OPERATOR, case, find(OPERATOR.name).sample)
    for contestant in contestants(case):
        try:
            accuracy = workload.check(contestant, "forward")
        except NotImplementedError as error:
            yield Point(contestant.name, columns, roof, failure=str(error))
            continue
        if not accuracy.passed:
            raise WrongResult(f"{contestant.name} {case.id}: {accuracy.message}")
        torch.cuda.empty_cache()  # everybody gets fresh memory, as in `comparison`
        yield Point(contestant.name, columns, roof, burst(workload.call(contestant, "forward")))


def line(point: Point) -> str:
    """` 4096  vectors         133.3 µs   98% of the roof`."""
    start = f"{point.columns:6}  {point.who:13}"
    if point.seconds is None:
        return f"{start}  {point.failure}"
    return f"{start} {duration(point.seconds):>11}  {point.roof / point.seconds:4.0%} of the roof"


def launch_once(device: str = "cuda") -> list[str]:
    """Launch every kernel once, for a profiler that watches; returns the names of those that do such rows."""
    require_gpu()
    x = torch.randn(ROWS, COUNTED, device=device).to(torch.bfloat16)
    y = torch.empty_like(x)
    done = []
    for contestant in contestants(case_of(COUNTED)):
        try:
            contestant.forward(x=x, out=y)
        except NotImplementedError:
            continue
        done.append(contestant.name)
    torch.cuda.synchronize()
    return done


def counters(names: list[str], show: Callable[[str], None]) -> dict[str, Any]:
    """What the profiler counts of one launch each; `names` are those who do rows of COUNTED elements, in order."""
    content: dict[str, Any] = {"rows": ROWS, "columns": COUNTED, "profiler": version(), "failure": None, "kernels": []}
    command = [sys.executable, "-m", "benchmarks", "ladder", OPERATOR.name, "--once"]
    try:
        found = profile(command, OPERATOR.name, METRICS)
        if len(found) != len(names):
            raise NoCounters(f"ncu saw {len(found)} kernels, expected {len(names)}: {', '.join(names)}")
    except NoCounters as reason:
        show(f"no counters: {reason}")
        return {**content, "failure": str(reason)}
    for name, launch in zip(names, found):
        show(told(name, launch))
    return {**content, "kernels": [{"who": name, **launch._asdict()} for name, launch in zip(names, found)]}


def told(name: str, launch: Profiled) -> str:
    """A line with the counters in the order of METRICS."""
    values = [launch.metrics.get(metric) for metric in METRICS]
    return f"{name:13} " + "  ".join("–" if value is None else f"{value:.4g}" for value in values)


def document(points: Iterable[Point], counted: dict[str, Any]) -> dict[str, Any]:
    """What `--json` writes, and `python -m benchmarks plot` reads."""
    return {
        "operator": OPERATOR.name,
        "dtype": "bfloat16",
        "rows": ROWS,
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(ROOT),
        "points": [asdict(point) for point in points],
        "counters": counted,
    }
