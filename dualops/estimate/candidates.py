"""The candidates of a ranking: Configs of kernels, each with its estimated time and the launches that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from ..cuda.compiler.binaries import Wanted, build_all
from ..cuda.launch.step import Step
from .architectures import Architecture
from .model import Estimate


class Part(NamedTuple):
    """One kernel of a candidate: its results ("dq"), and its Config."""

    makes: str
    config: Any

    def __str__(self) -> str:
        return f"{self.makes}: {config_text(self.config)}"


class Candidate(NamedTuple):
    """One way to solve a problem. steps: its launches, whose kernels `build` compiles."""

    rung: str
    parts: tuple[Part, ...]
    estimate: Estimate
    steps: Callable[[], Sequence[Step]]

    @property
    def configs(self) -> tuple[Any, ...]:
        return tuple(part.config for part in self.parts)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block, of the kernel that needs most."""
        return max(step.shared_bytes for step in self.steps())


class Built(NamedTuple):
    """The assembler's report on a candidate's kernels."""

    registers: int  # per thread, of the kernel that needs most
    spill_bytes: int
    allowed: bool


class Ranked(NamedTuple):
    """A candidate in a ranking. taken: whether a call uses it today; built: None if it was not compiled."""

    candidate: Candidate
    taken: bool
    built: Built | None = None


class Ranking(NamedTuple):
    """The candidates for one direction of a problem, or for one of its products, best first."""

    title: str
    flops: int  # of the problem, not of tiles
    nbytes: int  # that the problem must read and write, at least
    rows: tuple[Ranked, ...]


def rank(title: str, flops: int, nbytes: int, candidates: Iterable[Candidate]) -> Ranking:
    """Rank by time. The first of the `candidates` is the one that a call uses."""
    rows = [Ranked(each, not place) for place, each in enumerate(candidates)]
    rows.sort(key=lambda row: row.candidate.estimate.seconds)
    return Ranking(title, flops, nbytes, tuple(rows))


def build(ranking: Ranking, gpu: Architecture, count: int, begin: Callable[[str], None] = lambda name: None) -> Ranking:
    """Return the ranking with its first `count` candidates compiled for the GPU's architecture.

    Candidates that spill, or that the architecture refuses, go last. begin: called with each candidate's name first.
    """
    fine, refused = [], []
    for row in ranking.rows[:count]:
        begin(str(row.candidate.parts[0]))
        wanted = [Wanted(step.kernel, gpu.device.arch, step.shared_bytes) for step in row.candidate.steps()]
        reports = [*build_all(dict.fromkeys(wanted), 1)]
        allowed = all(report.allowed for report in reports)
        built = Built(max(each.registers for each in reports), sum(each.spill_bytes for each in reports), allowed)
        (fine if allowed else refused).append(row._replace(built=built))
    return ranking._replace(rows=(*fine, *ranking.rows[count:], *refused))


def config_text(config: Any) -> str:
    """Return the fields of a Config that differ from their defaults, and all fields without a default."""
    if not is_dataclass(config):
        return str(config)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    shown = [field.name for field in fields(config) if values[field.name] != field.default]
    return " ".join(name if values[name] is True else f"{name}={values[name]}" for name in shown) or "defaults"
