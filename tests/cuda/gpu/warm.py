"""Kernels are compiled before the tests that need them, on all cores; a test then finds them on the disk."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dualops.cuda import device as devices
from dualops.cuda.binaries import binary
from dualops.cuda.device import Device
from tests.cuda.calls import Call, call_of, calls_of_case, steps_of
from tests.cuda.kinds import batch


class Warmed(NamedTuple):
    """What was compiled, or was there already."""

    kernels: int
    seconds: float
    failures: list[str]  # what Python said of a kernel that could not be built; the test that needs it says more

    def __str__(self) -> str:
        told = f"{self.kernels} kernels on the disk after {self.seconds:.0f} s"
        return f"{told}, {len(self.failures)} not, the first: {self.failures[0]}" if self.failures else told


def warm(calls: Iterable[Call]) -> Warmed:
    """Compile what the calls need on the current GPU, each kernel once, as soon as it is known."""
    began, device = time.perf_counter(), devices.current()
    futures = {}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for call in calls:
            for place, step in enumerate(steps_of(call, device) or ()):
                key = step.kernel.identity, step.shared_bytes
                if key not in futures:
                    futures[key] = pool.submit(_compile, call, place, device)
        found = [(kernel, future.exception()) for (kernel, _), future in futures.items()]
    failures = [f"{kernel}: {type(error).__name__}: {error}" for kernel, error in found if error is not None]
    return Warmed(len(futures) - len(failures), time.perf_counter() - began, failures)


def _compile(call: Call, place: int, device: Device) -> None:
    step = (steps_of(call, device) or ())[place]
    binary(step.kernel, device.arch, step.shared_bytes)


def calls_of_tests(items: Iterable[pytest.Item]) -> Iterator[Call]:
    """What collected tests call: cases of an operator, and random problems."""
    known = set()
    for item in items:
        params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        if {"direction", "case"} <= params.keys():
            odd = "odd" in item.name.partition("[")[0]
            direction, rung, case = params["direction"], params.get("rung"), params["case"]
            if (key := (direction.name, rung, case.id, odd)) not in known:
                known.add(key)
                yield from calls_of_case(direction, rung, case, odd)
        elif {"direction", "number"} <= params.keys():
            for trial, served in batch(params["direction"], params["number"], devices.current(), alike=False):
                if served:
                    yield call_of(trial)


def recorded_calls(folder: Path) -> Iterator[Call]:
    """What tests/torch_bridge/record.py kept of tests that ran on the CPU."""
    for path in sorted(folder.glob("*.calls")):
        yield from pickle.loads(path.read_bytes())
