"""dualops beside its peers: the same data, the same process, the same two ways of timing.

Everybody's results are in torch's memory, held against the float64 reference and then timed after a warm-up, in bursts
and one call at a time. dualops must be right before anything is timed. A peer's error is shown, not judged, and a peer
that is missing or fails leaves a line that says why.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .cases import Suite, checked_workload, require_gpu
from .contestant import Contestant, dualops_contestant
from .timing import burst, extra_memory, matmul_rate, single
from .tree import ROOT, spec
from .work import Work, directions
from .workload import Workload

COLUMNS = {  # heading -> width
    "case": 26,
    "direction": 9,
    "who": 14,
    "burst": 10,
    "x burst": 7,
    "single": 10,
    "x single": 8,
    "rate": 14,
    "of roof": 7,
    "error / baseline": 16,
    "extra memory": 12,
}


@dataclass(frozen=True)
class Measurement:
    """One contestant on one direction of one case; times in seconds, memory in bytes."""

    case: str
    direction: str
    name: str
    roof: float  # the least time that this device could take
    burst: float | None = None
    single: float | None = None
    error: float | None = None  # largest error, relative to the truth's largest magnitude
    baseline_error: float | None = None
    extra_memory: int | None = None
    failure: str | None = None


def roof(work: Work, dtype: str) -> float:
    """Seconds that the case takes at the least: moving its bytes, or its operations at a matrix product's speed."""
    from dualops.cuda.roof import stream_roof

    return max(stream_roof(work.bytes_read, work.bytes_written), work.flops / matmul_rate(getattr(torch, dtype)))


def measured(start: Measurement, workload: Workload, contestant: Contestant) -> Measurement:
    """`start`, filled in."""
    accuracy = workload.check(contestant, start.direction)
    call = workload.call(contestant, start.direction)
    torch.cuda.empty_cache()  # where results lie beside the inputs moves times by 6 %: everybody gets fresh memory
    return replace(
        start,
        burst=burst(call),
        single=single(call),
        error=accuracy.kernel.max,
        baseline_error=accuracy.baseline.max,
        extra_memory=extra_memory(workload.lone_call(contestant, start.direction)),
    )


def measure(suite: type[Suite], case: spec.Case, direction: str, peers: bool) -> Iterator[Measurement]:
    """dualops and then, if wanted, its other rungs and each peer that has this direction.

    Raises WrongResult if dualops is wrong, NotImplementedError if it cannot do the case.
    """
    workload, dualops = checked_workload(suite.operator, case, suite.sample, direction)
    least = roof(Work.of(suite.operator, case, direction), case.dtype)
    yield measured(Measurement(case.id, direction, dualops.name, least), workload, dualops)
    rungs = {f"dualops {rung}": partial(_on_rung, suite.operator, case, rung) for rung in suite.rungs}
    for name, make in {**rungs, **suite.peers}.items() if peers else ():
        start = Measurement(case.id, direction, name, least)
        try:
            contestant = make(workload.problem)
            if getattr(contestant, direction) is not None:
                yield measured(start, workload, contestant)
        except Exception as error:  # whatever a peer raises is its result
            reason = (str(error).strip() or "no message").splitlines()[0]
            yield replace(start, failure=f"{type(error).__name__}: {reason}")


def _on_rung(operator: spec.Spec, case: spec.Case, rung: str, problem: spec.Problem) -> Contestant:
    return dualops_contestant(operator, case, rung)


def run(
    suite: type[Suite],
    *,
    case: str | None,
    peers: bool,
    show: Callable[[str], None],
    keep: Callable[[list[Measurement]], None] = lambda found: None,
) -> list[Measurement]:
    """Measure the operator's BENCH cases, or those whose name or id is `case`, showing each line as it comes.

    keep: is given all that was measured after each case, so that a run that is cut off leaves what it had. Raises
    ValueError if there is no such case.
    """
    require_gpu()
    operator = suite.operator
    chosen = [c for c in operator.tagged(spec.Tag.BENCH) if case in (None, c.name, c.id)]
    if not chosen:
        known = ", ".join(c.id for c in operator.tagged(spec.Tag.BENCH))
        raise ValueError(f"{operator.name} has no BENCH case {case!r}, it has {known}")
    show(line(list(COLUMNS)))
    found: list[Measurement] = []
    with torch.no_grad():
        for one in chosen:
            for direction in directions(operator):
                work = Work.of(operator, one, direction)
                first: Measurement | None = None
                for measurement in measure(suite, one, direction, peers):
                    first = first or measurement
                    show(line(cells(measurement, first, work)))
                    found.append(measurement)
            keep(found)
    return found


def cells(measurement: Measurement, dualops: Measurement, work: Work) -> list[str]:
    """A line of the table. The columns x are its time over dualops': above 1, dualops is faster."""
    m = measurement
    start = [m.case, m.direction, m.name]
    if m.failure or m.burst is None or m.single is None or dualops.burst is None or dualops.single is None:
        return [*start, m.failure or "not timed"]
    assert m.error is not None
    assert m.extra_memory is not None
    return [
        *start,
        duration(m.burst),
        f"{m.burst / dualops.burst:.2f}",
        duration(m.single),
        f"{m.single / dualops.single:.2f}",
        f"{work.rate(m.burst):.2f} {work.unit}",
        f"{m.roof / m.burst:.1%}",
        f"{m.error / m.baseline_error:.2f}" if m.baseline_error else f"{m.error:.1e} / 0",
        f"{m.extra_memory / 2**20:.2f} MiB",
    ]


def line(texts: Sequence[str]) -> str:
    """Columns of fixed widths; a text that is too long pushes the rest."""
    return "  ".join(text.ljust(width) for text, width in zip(texts, COLUMNS.values())).rstrip()


def duration(seconds: float) -> str:
    """`31.4 µs`, `1.207 ms`."""
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"


def document(operator: str, measurements: Iterable[Measurement], earlier: Path | None = None) -> dict[str, Any]:
    """What `--json` writes, and `python -m benchmarks plot` reads from `benchmarks/peer_results`: runs, oldest first.

    earlier: a file with runs before this one, if it exists. They keep the cases that are not measured now.
    """
    now = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(ROOT),
        "measurements": [asdict(measurement) for measurement in measurements],
    }
    measured = {one["case"] for one in now["measurements"]}
    before = json.loads(earlier.read_text())["runs"] if earlier is not None and earlier.exists() else []
    runs = [{**run, "measurements": [m for m in run["measurements"] if m["case"] not in measured]} for run in before]
    return {"operator": operator, "runs": [*(run for run in runs if run["measurements"]), now]}


def save(path: Path, content: dict[str, Any]) -> None:
    """Write it, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def commit(folder: Path) -> str:
    """The commit checked out in `folder`, with "+" if tracked files are changed; "unknown" outside git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
        return git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
