"""Measured times of the ways to compute a problem, kept on disk next to kernels. `tune` writes them, calls read them.

There is one file for each combination of operator, direction, array shapes (each axis rounded up to a power of two),
dtypes, parameters (any value for fractions), GPU, sources and compiler. So a change of the sources or the compiler
starts a new file. A file has a record for each problem that was timed, with its exact sizes, strides and alignment,
including those of results. The newest is first, and at most MOST are kept. Times of different problems are not
compared. The contents of arrays do not count: neither a mask's blocks nor where sequences end. One process at a time
writes a file: two processes that measure the same problem add to each other's records.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ..compiler import cache
from ..compiler.binaries import built_of
from ..launch.device import Device
from ..launch.plans import Choice

MARGIN = 0.01  # a way must be faster than the first one by this fraction to replace it
ALIGNMENT = 16  # bytes: the alignment that kernels check
MOST = 16  # records of similar problems


class Timed(NamedTuple):
    """A problem that is timed. lengths: the parameters that are sizes."""

    op: str
    problem: Problem
    results: Mapping[str, ArrayMeta]
    device: Device
    lengths: Collection[str]

    @property
    def exactly(self) -> str:
        """Return the exact problem as text: sizes, results, strides and alignment."""
        arrays = [
            f"{name}={meta.shape}:{meta.dtype} {meta.strides} {meta.pointer % ALIGNMENT if meta.shape else ''}"
            for name, meta in (*self.problem.arrays.items(), *self.results.items())
        ]
        return " ".join([self.op, *arrays, *_params(self.problem, ())])


class Way(NamedTuple):
    """A way to compute a problem: a rung and its Config, as text."""

    rung: str
    config: str


def way_of(choice: Choice) -> Way:
    """Return a choice's Way."""
    return Way(choice.rung, str(choice.config))


@dataclass(frozen=True)
class Record:
    """Measured times of a problem's ways.

    problem: the title of similar problems. timed: the exact problem. seconds: the time of a call by each measured way.
    The operator's own first choice comes first.
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
        """Return the fastest way, or the operator's own first choice if that is as fast."""
        return _best(self.seconds, next(iter(self.seconds)))


def _best(seconds: Mapping[Way, float], first: Way) -> Way:
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < (1 - MARGIN) * seconds[first] else first


def fastest_of(choices: Sequence[Choice], records: Iterable[Record]) -> tuple[Choice, Record] | None:
    """Return the best of a problem's choices, by the first record whose problem has the same first choice.

    None without such a record: if the operator's own choice differs, the times of its ways probably differ too.
    """
    offered = {way_of(choice): choice for choice in reversed(choices)}
    for record in records if choices else ():
        first = way_of(choices[0])
        if first == next(iter(record.seconds)):
            known = {way: seconds for way, seconds in record.seconds.items() if way in offered}
            return offered[_best(known, first)], record
    return None


def recorded(op: str, problem: Problem, device: Device, lengths: Iterable[str]) -> list[Record]:
    """Return the records of problems similar to this one, newest first. lengths: the parameters that are sizes.

    If the operation has no records at all, sizes are not read.
    """
    return _read(_path(op, title(op, problem, lengths), device)) if os.path.isdir(_folder(op)) else []


def measured(of: Timed) -> Record | None:
    """Return the record of exactly this problem, None if there is none."""
    return next((each for each in recorded(of.op, of.problem, of.device, of.lengths) if each.timed == of.exactly), None)


def keep(of: Timed, seconds: Mapping[Way, float], failed: Collection[Way] = ()) -> Record:
    """Add measured times to the record, which becomes the newest. Raises OSError if it can't be written.

    seconds: the operator's own first way first. failed: ways to remove from the record.
    """
    heading = title(of.op, of.problem, of.lengths)
    path = _path(of.op, heading, of.device)
    with _alone():
        records = _read(path)
        before = next((record.seconds for record in records if record.timed == of.exactly), {})
        every = {**seconds, **{way: each for way, each in before.items() if way not in seconds}}
        made = Record(heading, of.device.name, of.exactly, {way: every[way] for way in every if way not in failed})
        others = [record for record in records if record.timed != of.exactly]
        cache.write(path, _text([made, *others[: MOST - 1]]).encode())
    return made


def clear(op: str | None = None) -> int:
    """Delete the records of an operation, or of all. Return their number. Raises OSError if that fails."""
    folder = _root() if op is None else _folder(op)
    if not folder.is_dir():
        return 0
    with _alone():
        count = sum(max(1, len(_read(path))) for path in folder.rglob("*.record"))
        shutil.rmtree(folder)
    return count


def title(op: str, problem: Problem, lengths: Iterable[str] = ()) -> str:
    """Return the title of similar problems: "matmul a=4096x1024:bfloat16 b=1024x4096:bfloat16 transpose_b=True"."""
    arrays = [f"{name}={_array(meta)}" for name, meta in problem.arrays.items()]
    return " ".join([op, *arrays, *_params(problem, lengths)])


def _params(problem: Problem, lengths: Iterable[str]) -> Iterator[str]:
    defaults = {param.name: param.default for param in (*problem.spec.params, *problem.spec.gradient_params)}
    for name, value in problem.params.items():
        if name in problem.spec.requests or (type(value) is type(defaults.get(name)) and value == defaults.get(name)):
            continue
        if name in lengths and value is not None:
            value = bucket(value)
        yield f"{name}={'float' if type(value) is float else repr(value)}"


def bucket(size: Any) -> int:
    """Return the least power of two that is not less than a size, 0 for 0. A traced size records these comparisons."""
    if size == 0:
        return 0
    power = 1
    while size > power:
        power *= 2
    return power


def _array(meta: ArrayMeta) -> str:
    return f"{'x'.join(str(bucket(size)) for size in meta.shape) or '()'}:{meta.dtype}"


def _root() -> Path:
    return cache.folder() / "tuned"


def _folder(op: str) -> Path:
    return _root() / op


def _path(op: str, heading: str, device: Device) -> Path:
    place = f"{device.name} {device.arch} {device.sms}"
    key = "\n".join([built_of(), place, heading])
    return _folder(op) / f"{hashlib.sha256(key.encode()).hexdigest()}.record"


def _alone() -> AbstractContextManager[None]:
    """Keep other processes from writing or deleting records. Raises OSError if the cache can't be written."""
    return cache.locked(cache.folder() / "tuned.lock")


def _text(records: Sequence[Record]) -> str:
    made = [
        {"timed": each.timed, "seconds": [{**way._asdict(), "seconds": took} for way, took in each.seconds.items()]}
        for each in records
    ]
    return json.dumps({"problem": records[0].problem, "device": records[0].device, "records": made}, indent=1)


def _read(path: Path) -> list[Record]:
    """Return a file's records, none if it is missing, damaged or not trusted."""
    content = cache.read(path)
    if content is None:
        return []
    try:
        found = json.loads(content)
        return [_record(found["problem"], found["device"], each) for each in found["records"]]
    except cache.DAMAGED:
        return []


def _record(problem: str, device: str, found: Any) -> Record:
    """Return a record from its content. Raises one of `cache.DAMAGED` for other content."""
    seconds = {Way(way["rung"], way["config"]): float(way["seconds"]) for way in found["seconds"]}
    for text in (problem, device, found["timed"], *(word for way in seconds for word in way)):
        text.encode()
    if not seconds or not all(0 < each < math.inf for each in seconds.values()):
        raise ValueError("no times")
    return Record(problem, device, found["timed"], seconds)
