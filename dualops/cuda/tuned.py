"""What was measured of the ways to do a problem, kept on the disk beside kernels: `tuning` writes it, calls read it.

A file is of an operator's direction, its arrays' shapes, each axis to the next power of two, their dtypes, the
parameters, those that are fractions whatever they are, and the GPU; and of the sources and the compiler that the
kernels were of, so that a change to either begins anew. In it is a record for each problem that was timed, its very
sizes, strides and alignment, the newest first: times of different problems are not compared. A file is written whole
and renamed into place, by one process at a time: a reader sees all of it or none, and two that measure the same problem
add to what the other kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..spec import ArrayMeta, Problem
from .compile import built_of, cache_dir, write_whole
from .device import Device
from .plans import Choice

MARGIN = 0.01  # of the first way's time: who is not so much faster is not taken for it
ALIGNMENT = 16  # bytes: what kernels ask about
MOST = 16  # records of problems that are like each other


class Way(NamedTuple):
    """A rung and its Config, as text."""

    rung: str
    config: str


def way_of(choice: Choice) -> Way:
    """What a choice is known by."""
    return Way(choice.rung, str(choice.config))


@dataclass(frozen=True)
class Record:
    """What is known of a problem's ways.

    problem: it and its like. timed: the very one. seconds: of a call, by each way that was measured, the operator's own
    first.
    """

    problem: str
    device: str
    timed: str
    seconds: Mapping[Way, float]

    def __str__(self) -> str:
        best = self.best
        lines = [
            f"{1e6 * seconds:12.1f} us {'*' if way == best else ' '} {way.rung}  {way.config}"
            for way, seconds in sorted(self.seconds.items(), key=lambda each: each[1])
        ]
        return "\n".join([f"{self.problem} on {self.device}; * is taken", *lines])

    @property
    def best(self) -> Way:
        """The fastest, or the operator's own first where that is as fast."""
        return _best(self.seconds, next(iter(self.seconds)))


def _best(seconds: Mapping[Way, float], first: Way) -> Way:
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < (1 - MARGIN) * seconds[first] else first


def fastest_of(choices: Sequence[Choice], records: Iterable[Record]) -> tuple[Choice, Record] | None:
    """The best of a problem's choices, by the first of the records that has the operator's own first choice.

    None where none has: what was timed of other ways does not say whether they are faster than that one.
    """
    offered = {way_of(choice): choice for choice in reversed(choices)}
    for record in records if choices else ():
        first = way_of(choices[0])
        if first in record.seconds:
            known = {way: seconds for way, seconds in record.seconds.items() if way in offered}
            return offered[_best(known, first)], record
    return None


def recorded(op: str, problem: Problem, device: Device, lengths: Iterable[str]) -> list[Record]:
    """What was kept of problems like this one, the newest first. lengths: the parameters that are sizes.

    Where nothing was kept of an operation at all, sizes are not looked at.
    """
    return _read(_path(op, title(op, problem, lengths), device)) if _folder(op).is_dir() else []


def measured(op: str, problem: Problem, device: Device, lengths: Iterable[str]) -> Record | None:
    """What was kept of this very problem; None if nothing was."""
    timed = _exactly(op, problem)
    return next((record for record in recorded(op, problem, device, lengths) if record.timed == timed), None)


def keep(op: str, problem: Problem, device: Device, lengths: Iterable[str], seconds: Mapping[Way, float]) -> Record:
    """Add what was measured to the record, which becomes the newest. Raises OSError where it can't be written."""
    told, timed = title(op, problem, lengths), _exactly(op, problem)
    path = _path(op, told, device)
    with _alone():
        records = _read(path)
        before = next((record.seconds for record in records if record.timed == timed), {})
        made = Record(told, device.name, timed, {**before, **seconds})
        others = [record for record in records if record.timed != timed]
        write_whole(path, _text([made, *others[: MOST - 1]]).encode())
    return made


def clear(op: str | None = None) -> int:
    """Forget what was kept of an operation, or of all; how many records that were."""
    folder = _root() if op is None else _folder(op)
    if not folder.is_dir():
        return 0
    with _alone():
        count = sum(len(_read(path)) for path in folder.rglob("*.json"))
        shutil.rmtree(folder, ignore_errors=True)
    return count


def title(op: str, problem: Problem, lengths: Iterable[str] = ()) -> str:
    """A problem and its like, as one line: "matmul a=4096x1024:bfloat16 b=1024x4096:bfloat16 transpose_b=True"."""
    arrays = [f"{name}={_array(meta)}" for name, meta in problem.arrays.items()]
    return " ".join([op, *arrays, *_params(problem, lengths)])


def _exactly(op: str, problem: Problem) -> str:
    """A problem alone: the sizes that it has, where its numbers lie, and how they are aligned."""
    arrays = [
        f"{name}={meta.shape}:{meta.dtype} {meta.strides} {meta.pointer % ALIGNMENT if meta.shape else ''}"
        for name, meta in problem.arrays.items()
    ]
    return " ".join([op, *arrays, *_params(problem, ())])


def _params(problem: Problem, lengths: Iterable[str]) -> Iterator[str]:
    defaults = {param.name: param.default for param in (*problem.spec.params, *problem.spec.gradient_params)}
    for name, value in problem.params.items():
        if name in problem.spec.requests or (type(value) is type(defaults.get(name)) and value == defaults.get(name)):
            continue
        if name in lengths and value is not None:
            value = bucket(value)
        yield f"{name}={'float' if type(value) is float else repr(value)}"


def bucket(size: Any) -> int:
    """The power of two that a size does not exceed; 0 of 0. Of a traced size it is these questions that are noted."""
    if size == 0:
        return 0
    power = 1
    while size > power:
        power *= 2
    return power


def _array(meta: ArrayMeta) -> str:
    return f"{'x'.join(str(bucket(size)) for size in meta.shape) or '()'}:{meta.dtype}"


def _root() -> Path:
    return cache_dir() / "tuned"


def _folder(op: str) -> Path:
    return _root() / op


def _path(op: str, told: str, device: Device) -> Path:
    place = f"{device.name} {device.arch} {device.sms}"
    key = "\n".join([built_of(), place, told])
    return _folder(op) / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


@contextmanager
def _alone() -> Iterator[None]:
    """While no other process writes or forgets. Raises OSError where the cache can't be written."""
    cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    with (cache_dir() / "tuned.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield


def _text(records: Sequence[Record]) -> str:
    made = [
        {"timed": each.timed, "seconds": [{**way._asdict(), "seconds": took} for way, took in each.seconds.items()]}
        for each in records
    ]
    return json.dumps({"problem": records[0].problem, "device": records[0].device, "records": made}, indent=1)


def _read(path: Path) -> list[Record]:
    """None where the file is missing, or has no record."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(path.read_text())
        every = [
            (each["timed"], {Way(way["rung"], way["config"]): float(way["seconds"]) for way in each["seconds"]})
            for each in found["records"]
        ]
        return [Record(found["problem"], found["device"], timed, seconds) for timed, seconds in every if seconds]
    return []
