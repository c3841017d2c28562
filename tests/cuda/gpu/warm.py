"""Kernels are compiled before the tests that need them, on all cores; a test then finds them on the disk."""

import multiprocessing
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest

from dualops.cuda.compiler import sources
from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.compiler.binaries import binary
from dualops.cuda.launch import device as devices
from dualops.cuda.launch.device import Device
from tests.cuda.calls import Call, call_of, calls_of_case, steps_of
from tests.cuda.gpu.cover import Facts, choose
from tests.cuda.kinds import batch

MOST_KERNELS = 700  # of cases and random problems; all other tests build some 870 more
SAMPLE = 300  # of those that did not change


class Warmed(NamedTuple):
    """What was compiled, or was there already."""

    kernels: int
    seconds: float
    failures: list[str]  # what Python said of a kernel that could not be built; the test that needs it says more

    def __str__(self) -> str:
        summary = f"{self.kernels} kernels on the disk after {self.seconds:.0f} s"
        return f"{summary}, {len(self.failures)} not, the first: {self.failures[0]}" if self.failures else summary


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


def calls_of_tests(items: Iterable[pytest.Item]) -> dict[str, tuple[Call, ...]]:
    """What collected tests call, by their names: cases of an operator, and random problems; of others it is unknown."""
    found, known = dict[str, tuple[Call, ...]](), dict[Any, tuple[Call, ...]]()
    for item in items:
        params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        if {"direction", "case"} <= params.keys():
            odd = "odd" in item.name.partition("[")[0]
            direction, rung, case = params["direction"], params.get("rung"), params["case"]
            if (key := (direction.name, rung, case.id, odd)) not in known:
                known[key] = tuple(calls_of_case(direction, rung, case, odd))
            found[item.nodeid] = known[key]
        elif {"direction", "number"} <= params.keys():
            problems = batch(params["direction"], params["number"], devices.current(), same=False)
            found[item.nodeid] = tuple(call_of(trial) for trial, served in problems if served)
    return found


def kernels_of_tests(calls: Mapping[str, tuple[Call, ...]]) -> tuple[dict[str, frozenset[str]], dict[str, Kernel]]:
    """The names of the kernels that tests need, by the tests' names; and the kernels."""
    kernels, known, device = dict[str, Kernel](), dict[int, frozenset[str]](), devices.current()
    for each in calls.values():
        if id(each) not in known:  # tests of one case have one tuple
            steps = [step for call in each for step in steps_of(call, device) or ()]
            found = {f"{step.kernel.identity} {step.shared_bytes}": step.kernel for step in steps}
            known[id(each)] = frozenset(found)
            kernels |= found
    return {name: known[id(each)] for name, each in calls.items()}, kernels


def facts_of_tests(calls: Mapping[str, tuple[Call, ...]]) -> dict[str, Facts]:
    """What tests' calls have on rungs other than naive: each array, and how many of its axes are longer than 1."""
    return {
        name: frozenset(
            (call.operator, call.backward, call.rung, array, sum(size > 1 for size in meta.shape))
            for call in each
            if call.rung != "naive"
            for array, meta in call.arrays.items()
        )
        for name, each in calls.items()
    }


class Selection(NamedTuple):
    """The tests that run, by their names, of those whose calls are known."""

    kept: set[str]
    left_out: set[str]
    summary: str


def select(calls: Mapping[str, tuple[Call, ...]], most: int, changed: frozenset[str] | None) -> Selection:
    """Tests that need no more than `most` kernels together (`cover`).

    changed: modules that were edited, if that is known: then every test runs whose kernels are made of them, and of the
    others SAMPLE kernels' tests.
    """
    needs, kernels = kernels_of_tests(calls)
    given = set[str]()
    if changed is not None:
        given = {name for name, kernel in kernels.items() if changed & sources.made_of(kernel.modules)}
        most = len(given) + SAMPLE
    chosen = choose(needs, kernels, given, most, facts_of_tests(calls))
    kept = {name for name, wanted in needs.items() if wanted <= chosen.kernels}
    summary = (
        f"{len(kept)} of {len(needs)} tests of cases and random problems; they need "
        f"{len(chosen.kernels)} of {len(kernels)} kernels, with {chosen.share:.1%} of all pairs of values"
    )
    return Selection(kept, needs.keys() - kept, summary)
