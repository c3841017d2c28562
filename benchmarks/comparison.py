"""Compare dualops with its peers: the same data, the same process, the same two kinds of timing, in turns.

All results are in torch's memory and are compared with the float64 reference. Then come the rounds. In each round the
roof, dualops and every peer are timed one after another, in a new order, after a warm-up, in bursts and in single
calls. Those that take long for a call are timed in the first round only. A turn begins with the original data and fresh
memory, and frees everything that it allocated. dualops must be right before anything is timed. A peer's error is shown,
but has no limit. For a peer that is missing or fails, a line gives the reason.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch

from .cases import Suite, checked, require_gpu
from .contestant import Contestant, PeerMaker, dualops_contestant
from .roofline import Roof, roof
from .timing import ROUNDS, Figure, Turn, extra_memory, figure, turn
from .tree import ROOT, spec
from .work import Work, directions
from .workload import Workload

COLUMNS = {  # heading -> width
    "case": 26,
    "direction": 9,
    "who": 16,
    "burst": 10,
    "spread": 6,
    "x burst": 7,
    "single": 10,
    "spread of it": 12,
    "x single": 8,
    "rate": 14,
    "of roof": 7,
    "error / baseline": 16,
    "extra memory": 12,
}
SLOW = 0.25  # seconds of a call of a contestant that takes one turn only


@dataclass(frozen=True)
class Measurement:
    """One contestant on one direction of one case; times in seconds, memory in bytes.

    A spread is that of the rounds, (highest - lowest) / median.
    """

    case: str
    direction: str
    name: str
    roof: float = 0.0  # the least time that this device could take
    roof_spread: float = 0.0
    burst: float | None = None
    burst_spread: float | None = None
    single: float | None = None
    single_spread: float | None = None
    error: float | None = None  # largest error, relative to the truth's largest magnitude
    baseline_error: float | None = None
    extra_memory: int | None = None
    failure: str | None = None

    def judged(self, accuracy: spec.Accuracy) -> Measurement:
        """Return it with its errors."""
        return replace(self, error=accuracy.kernel.max, baseline_error=accuracy.baseline.max)


@dataclass
class Entrant:
    """A contestant with its results and its turns so far. Without a contestant, it has failed."""

    found: Measurement
    contestant: Contestant | None
    turns: list[Turn] = field(default_factory=list)

    def check(self, workload: Workload) -> None:
        """Compare its result with the reference."""
        assert self.contestant is not None
        workload.restore(self.found.direction)
        accuracy = workload.check(self.contestant, self.found.direction, same_bits=False)
        self.contestant.release()
        self.found = self.found.judged(accuracy)

    @property
    def takes_turns(self) -> bool:
        """Return whether it takes another turn: it has not failed, and is not too slow to take several."""
        return self.contestant is not None and not any(each.burst > SLOW for each in self.turns)

    def take_turn(self, workload: Workload) -> None:
        """Time it in one more turn; memory is measured in the first round."""
        assert self.contestant is not None
        direction = self.found.direction
        workload.restore(direction)
        torch.cuda.empty_cache()  # the addresses of results change times by 6 %: all get fresh memory
        self.turns.append(turn(workload.call(self.contestant, direction)))
        if len(self.turns) == 1:
            extra = extra_memory(workload.lone_call(self.contestant, direction))
            self.found = replace(self.found, extra_memory=extra)
        self.contestant.release()

    def fail(self, error: Exception) -> None:
        """Drop the contestant, with the reason and without figures."""
        reason = (str(error).strip() or "no message").splitlines()[0]
        found = Measurement(self.found.case, self.found.direction, self.found.name)
        self.found, self.contestant, self.turns = replace(found, failure=f"{type(error).__name__}: {reason}"), None, []

    def result(self, least: Figure) -> Measurement:
        """Return the figures of all rounds, with the roof's."""
        found = replace(self.found, roof=least.seconds, roof_spread=least.spread)
        if not self.turns:
            return found
        burst, single = (figure(rounds) for rounds in zip(*self.turns))
        return replace(
            found, burst=burst.seconds, burst_spread=burst.spread, single=single.seconds, single_spread=single.spread
        )


def measure(workload: Workload, direction: str, peers: Mapping[str, PeerMaker]) -> list[Measurement]:
    """Time dualops and each peer that supports this direction, in turns.

    Raises WrongResult if dualops is wrong, NotImplementedError if it does not support the case.
    """
    operator, case = workload.operator, workload.case
    dualops, accuracy = checked(workload, direction)
    start = Measurement(case.id, direction, dualops.name)
    everybody = [Entrant(start.judged(accuracy), dualops)]
    for name, make in peers.items():
        one = Entrant(replace(start, name=name), None)
        try:
            one.contestant = make(workload.problem)
            if getattr(one.contestant, direction) is None:
                continue
            one.found = replace(one.found, name=one.contestant.name)
            one.check(workload)
        except Exception as error:  # whatever a peer raises is its result
            one.fail(error)
        everybody.append(one)
    try:
        least = take_rounds(workload, everybody, roof(Work.of(operator, case, direction), case.dtype))
    except Exception as error:  # a peer may have left the GPU in a state in which nothing works any more
        failures = [f"{one.found.name}: {one.found.failure}" for one in everybody if one.found.failure]
        error.add_note(f"before that: {', '.join(failures) or 'nobody failed'}")
        raise
    return [one.result(least) for one in everybody]


def take_rounds(workload: Workload, everybody: Sequence[Entrant], top: Roof) -> Figure:
    """Time the roof and all contestants in turns, each round in another order; return the roof's figure.

    A contestant right after the roof, a matrix product, begins at a lower clock: so it is another one in each round.
    Raises the errors of the roof and of dualops, the first contestant.
    """
    ours, roofs = everybody[0], []
    for number in range(ROUNDS):
        order = [None, *everybody]
        Random(number).shuffle(order)
        for one in order:
            if one is None:
                roofs.append(turn(top.call).burst * top.scale)
            elif one.takes_turns:
                try:
                    one.take_turn(workload)
                except Exception as error:
                    if one is ours:
                        raise
                    one.fail(error)
    return figure(roofs)


def contestants(
    suite: type[Suite], case: spec.Case, *, peers: bool, slow: bool, named: Sequence[str] = ()
) -> dict[str, PeerMaker]:
    """Return the contestants besides dualops: its other rungs, and the peers. named: only those with one of these words
    in their names. Raises ValueError for a word in no name.
    """
    rungs = {f"dualops {rung}": partial(_on_rung, suite.operator, case, rung) for rung in suite.rungs}
    everybody = ({**rungs, **suite.peers} if peers else {}) | (dict(suite.slow_peers) if slow else {})
    for word in named:
        if not any(word in name for name in everybody):
            raise ValueError(f"{suite.operator.name} has no peer {word!r}, it has {', '.join(everybody)}")
    return {name: make for name, make in everybody.items() if not named or any(word in name for word in named)}


def _on_rung(operator: spec.Spec, case: spec.Case, rung: str, problem: spec.Problem) -> Contestant:
    return dualops_contestant(operator, case, rung)


def run(
    suite: type[Suite],
    *,
    cases: Sequence[str] = (),
    peers: bool,
    named: Sequence[str] = (),
    slow: bool = False,
    show: Callable[[str], None],
    keep: Callable[[list[Measurement]], None] = lambda found: None,
) -> list[Measurement]:
    """Measure the operator's BENCH cases, or the BENCH and COMPARE cases whose name or id matches one of `cases`.

    named: only peers with one of these words in their names. slow: also peers that search for minutes. show: called
    with the lines of each direction. keep: called with all measurements after each direction, so that an interrupted
    run keeps its results. Raises ValueError if there is no such case or peer.
    """
    require_gpu()
    meant, found = chosen(suite.operator, cases), []
    build_ahead(suite.operator, meant)
    show(line(list(COLUMNS)))
    with torch.no_grad():
        for one in meant:
            who = contestants(suite, one, peers=peers, slow=slow, named=named)
            for measured in measure_case(suite, one, who, show):
                found += measured
                keep(found)
    return found


def build_ahead(operator: spec.Spec, cases: Iterable[spec.Case]) -> None:
    """Compile dualops' kernels on all cores, not one after another when a case needs them."""
    import_module("dualops.cuda").warm(*(f"{operator.name}:{case.id}" for case in cases))


def measure_case(
    suite: type[Suite], case: spec.Case, peers: Mapping[str, PeerMaker], show: Callable[[str], None]
) -> Iterator[list[Measurement]]:
    """Measure each direction of a case on the same data, and show its lines."""
    operator = suite.operator
    workload = Workload(operator, case, suite.sample)
    for direction in directions(operator, case):
        measured, work = measure(workload, direction, peers), Work.of(operator, case, direction)
        show(line(roof_cells(measured[0], work)))
        for measurement in measured:
            show(line(cells(measurement, measured[0], work)))
        yield measured


def chosen(operator: spec.Spec, names: Sequence[str]) -> list[spec.Case]:
    """Return the named cases, or all BENCH cases if none is named. Raises ValueError for an unknown name."""
    bench = operator.tagged(spec.Tag.BENCH)
    if not names:
        return bench
    there = {case.id: case for case in (*bench, *operator.tagged(spec.Tag.COMPARE))}
    meant = {
        name: [c for c in there.values() if fnmatchcase(c.name, name) or fnmatchcase(c.id, name)] for name in names
    }
    for name, found in meant.items():
        if not found:
            raise ValueError(f"{operator.name} has no BENCH or COMPARE case {name!r}, it has {', '.join(there)}")
    return [case for case in there.values() if any(case in found for found in meant.values())]


def roof_cells(measurement: Measurement, work: Work) -> list[str]:
    """Return the cells of the roof, whose time the others are compared with."""
    m, rate = measurement, f"{work.rate(measurement.roof):.2f} {work.unit}"
    times = [duration(m.roof), f"{m.roof_spread:.1%}", f"{m.roof / m.burst:.2f}" if m.burst else ""]
    return [m.case, m.direction, "roof", *times, "", "", "", rate]


def cells(measurement: Measurement, dualops: Measurement, work: Work) -> list[str]:
    """Return a line of the table. The columns x are its time divided by dualops': above 1, dualops is faster."""
    m = measurement
    start = [m.case, m.direction, m.name]
    if m.failure or m.burst is None or m.single is None or dualops.burst is None or dualops.single is None:
        return [*start, m.failure or "not timed"]
    assert m.error is not None
    assert m.extra_memory is not None
    return [
        *start,
        duration(m.burst),
        f"{m.burst_spread:.1%}",
        f"{m.burst / dualops.burst:.2f}",
        duration(m.single),
        f"{m.single_spread:.1%}",
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
    """Return the content for `--json`, which `python -m benchmarks plot` reads from `benchmarks/peer_results`: runs,
    oldest first.

    earlier: a file with earlier runs, if it exists. Cases and directions that are not measured now are kept.
    """
    now = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(ROOT),
        "measurements": [asdict(measurement) for measurement in measurements],
    }
    measured = {_place(one) for one in now["measurements"]}
    before = json.loads(earlier.read_text())["runs"] if earlier is not None and earlier.exists() else []
    runs = [{**run, "measurements": [m for m in run["measurements"] if _place(m) not in measured]} for run in before]
    return {"operator": operator, "runs": [*(run for run in runs if run["measurements"]), now]}


def _place(measurement: Mapping[str, Any]) -> tuple[str, str]:
    return measurement["case"], measurement["direction"]


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a file, with its folder, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".part")
    begun.write_text(json.dumps(content, indent=1) + "\n")
    begun.replace(path)


def commit(folder: Path) -> str:
    """Return the commit checked out in `folder`, with "+" if measured files have changes; "unknown" outside git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "dualops", "benchmarks/*.py").strip()
        return git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
