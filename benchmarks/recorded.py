"""Recorded results: asv's, commit by commit, and the comparisons with peers. All of them are JSON on disk."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from .cases import class_name
from .tree import spec
from .work import DIRECTIONS, Work, directions


class Key(NamedTuple):
    """A point of a curve: an operator's case in one direction."""

    operator: str
    case: str  # Case.id
    direction: str


class Recording(NamedTuple):
    """asv's results for one commit on one machine."""

    commit: str
    committed: datetime
    measured: datetime
    device: str
    seconds: dict[Key, float]


class PeerRun(NamedTuple):
    """The date, GPU and commit of a comparison with peers."""

    commit: str
    day: str
    device: str

    @property
    def short(self) -> str:
        """The commit's first digits, with + if files differed from it."""
        return self.commit[:8] + "+" * self.commit.endswith("+")


class Peers(NamedTuple):
    """The results of `python -m benchmarks run OPERATOR --peers --json` for an operator."""

    measurements: dict[Key, dict[str, dict[str, Any]]]  # by case and direction, then by contestant
    runs: dict[Key, PeerRun]


def recordings(results: Path, machine: str) -> list[Recording]:
    """Return asv's results for `machine`, oldest commit first. Raises FileNotFoundError for an unknown machine."""
    folder = results / machine
    device = json.loads((folder / "machine.json").read_text())["cpu"]
    found = [_recording(path, device) for path in folder.glob("*.json") if path.name != "machine.json"]
    return sorted((one for one in found if one.seconds), key=lambda one: (one.committed, one.commit))


def all_recordings(results: Path) -> list[Recording]:
    """Return the results for every machine, oldest commit first."""
    machines = sorted(path.parent.name for path in results.glob("*/machine.json"))
    found = [one for machine in machines for one in recordings(results, machine)]
    return sorted(found, key=lambda one: (one.committed, one.commit))


def _recording(path: Path, device: str) -> Recording:
    content = json.loads(path.read_text())
    operators = {class_name(operator): operator for operator in spec.OPERATORS}
    seconds: dict[Key, float] = {}
    started = [content["date"]]
    for name, row in content["results"].items():
        entry = dict(zip(content["result_columns"], row))  # asv drops a row's trailing columns that are empty
        operator, direction = operators.get(name.split(".")[1]), name.rsplit("time_")[-1]
        if operator is None or direction not in DIRECTIONS or not entry.get("result"):
            continue
        started.append(entry.get("started_at") or 0)
        (cases,) = entry["params"]
        for case, value in zip(cases, entry["result"], strict=True):
            if value is not None and isfinite(value):  # None: it failed; NaN: it was skipped
                seconds[Key(operator, case.strip("'"), direction)] = value
    return Recording(content["commit_hash"], _moment(content["date"]), _moment(max(started)), device, seconds)


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1e3, UTC)


def peer_runs(folder: Path) -> dict[str, Peers]:
    """Return the comparisons with peers, by operator; none if the folder does not exist."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        operator = content["operator"]
        found[operator] = peers = Peers({}, {})
        for run in content["runs"]:
            for measurement in run["measurements"]:
                key = Key(operator, measurement["case"], measurement["direction"])
                peers.measurements.setdefault(key, {})[measurement["name"]] = measurement
                peers.runs[key] = PeerRun(run["commit"], run["date"], run["gpu"])
    return found


def known_cases(operator: str) -> dict[str, spec.Case]:
    """Return the current spec's BENCH and COMPARE cases, by id. Recorded results of other cases are not shown."""
    found = spec.OPERATORS.get(operator)
    timed = [] if found is None else [*found.tagged(spec.Tag.BENCH), *found.tagged(spec.Tag.COMPARE)]
    return {case.id: case for case in timed}


def keys() -> list[Key]:
    """Return every case and direction, in the order of the specs."""
    return [
        Key(name, case_id, direction)
        for name, operator in spec.OPERATORS.items()
        for direction in DIRECTIONS
        for case_id, case in known_cases(name).items()
        if direction in directions(operator, case)
    ]


def work_of(key: Key) -> Work:
    """Return the operations and bytes of a known case."""
    return Work.of(spec.OPERATORS[key.operator], known_cases(key.operator)[key.case], key.direction)
