"""What was measured of the ways to do a problem, kept on the disk beside kernels: `tuning` writes it, calls read it.

A record is of an operator's direction, its arrays' shapes, each axis to the next power of two, their dtypes, the
parameters, those that are fractions whatever they are, and the GPU; and of the sources and the compiler that the
kernels were of, so that a change to either begins anew. It is a file of its own, written whole and renamed into place:
a reader sees all of it or none, and of two processes that measure the same problem the later one adds to what the
earlier one kept.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..spec import ArrayMeta, Problem
from .compile import built_of, cache_dir, write_whole
from .device import Device
from .plans import Choice

MARGIN = 0.01  # of the first way's time: who is not so much faster is not taken for it


class Way(NamedTuple):
    """A rung and its Config, as text."""

    rung: str
    config: str


def way_of(choice: Choice) -> Way:
    """What a choice is known by."""
    return Way(choice.rung, str(choice.config))


@dataclass(frozen=True)
class Record:
    """What is known of a problem's ways. seconds: of a call, by each that was measured, the operator's own first."""

    problem: str
    device: str
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
        first = next(iter(self.seconds))
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        return fastest if self.seconds[fastest] < (1 - MARGIN) * self.seconds[first] else first


def recorded(op: str, problem: Problem, device: Device, lengths: Iterable[str]) -> Record | None:
    """What was kept of a problem; None if nothing was. lengths: the parameters that are sizes.

    Where nothing was kept of an operation at all, sizes are not looked at.
    """
    return _read(_path(op, title(op, problem, lengths), device)) if _folder(op).is_dir() else None


def keep(op: str, problem: Problem, device: Device, lengths: Iterable[str], seconds: Mapping[Way, float]) -> Record:
    """Add what was measured to the record, and write it. Raises OSError where it can't be written."""
    told = title(op, problem, lengths)
    path = _path(op, told, device)
    before = _read(path)
    made = Record(told, device.name, {**(before.seconds if before else {}), **seconds})
    ways = [{**way._asdict(), "seconds": each} for way, each in made.seconds.items()]
    write_whole(path, json.dumps({"problem": told, "device": device.name, "seconds": ways}, indent=1).encode())
    return made


def clear(op: str | None = None) -> int:
    """Forget what was kept of an operation, or of all; how many records that were."""
    folder = _root() if op is None else _folder(op)
    count = sum(1 for _ in folder.rglob("*.json"))
    if folder.is_dir():
        shutil.rmtree(folder)
    return count


def title(op: str, problem: Problem, lengths: Iterable[str] = ()) -> str:
    """A problem and its like, as one line: "matmul a=4096x1024:bfloat16 b=1024x4096:bfloat16 transpose_b=True"."""
    words = [f"{name}={_array(meta)}" for name, meta in problem.arrays.items()]
    defaults = {param.name: param.default for param in (*problem.spec.params, *problem.spec.gradient_params)}
    for name, value in problem.params.items():
        if name in problem.spec.requests or (type(value) is type(defaults.get(name)) and value == defaults.get(name)):
            continue
        if name in lengths and value is not None:
            value = bucket(value)
        words.append(f"{name}={'float' if type(value) is float else repr(value)}")
    return " ".join([op, *words])


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


def _read(path: Path) -> Record | None:
    """None where the file is missing, or is no record."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(path.read_text())
        seconds = {Way(each["rung"], each["config"]): float(each["seconds"]) for each in found["seconds"]}
        return Record(found["problem"], found["device"], seconds) if seconds else None
    return None
