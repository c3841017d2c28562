"""One run of one problem: results on the host, which rung made them, time and memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .. import spec
from .errors import CommandError
from .gpu import Bench
from .problems import Arrays, Job, as_float64


@dataclass(frozen=True)
class Measurement:
    """What one run gave. seconds: on a GPU the median of several bursts, elsewhere of the only run."""

    results: Arrays
    rung: str
    seconds: float
    extra_bytes: int  # peak memory beyond inputs and results
    roof_seconds: float | None = None  # the time that the memory alone would need, where that is what counts


def on_reference(job: Job, arrays: Arrays, kernel: str | None) -> Measurement:
    """The plain NumPy form, in the storage dtype. Peak memory is what NumPy allocated."""
    if kernel:
        raise CommandError(f"--kernel {kernel}: the reference has no rungs")
    tracemalloc.start()
    try:
        start = time.perf_counter()
        results = job.task.named(job.task.reference(**arrays, **job.params))
        seconds = time.perf_counter() - start
        extra = tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in results.values())
    finally:
        tracemalloc.stop()
    return Measurement(results, "NumPy", seconds, max(extra, 0))


def on_simulator(job: Job, arrays: Arrays, kernel: str | None) -> Measurement:
    """The kernel, in Python. Memory is what the spec says: the simulator's own is not the kernel's."""
    cuda = import_module("dualops.cuda")
    call = getattr(cuda, job.task.name)
    rung = plan_of(job, arrays, kernel).choice.rung
    start = time.perf_counter()
    results = job.task.named(call(**arrays, **job.params, kernel=kernel))
    seconds = time.perf_counter() - start
    return Measurement(results, rung, seconds, job.task.cost.extra_memory(job.problem))


def on_gpu(job: Job, arrays: Arrays, kernel: str | None) -> Measurement:
    """The kernel on the current GPU."""
    bench = Bench(job, arrays, kernel)
    rung = plan_of(job, bench.inputs[0], kernel).choice.rung
    return Measurement(bench.results(), rung, bench.seconds(), bench.extra_bytes(), bench.roof_seconds())


def plan_of(job: Job, arrays: Mapping[str, Any], kernel: str | None) -> Any:
    """What `dualops.cuda` would do with these arrays: nothing is launched."""
    task, plan = job.task, import_module("dualops.cuda").plan
    return plan(task.spec.name, *arrays.values(), kernel=kernel, backward=task.backward, **job.params)


@dataclass(frozen=True)
class Verdict:
    """A run held against the truth: the result that came worst, and what to say of those that fail."""

    worst: spec.Accuracy
    failures: list[str]


def verdict(job: Job, arrays: Arrays, results: Arrays) -> Verdict:
    """Hold every result against the float64 reference by the rule of `spec.compare`."""
    truth = job.task.named(job.task.lean_reference(**as_float64(arrays), **job.params))
    baseline = job.task.named(job.task.lean_reference(**arrays, **job.params))
    found = [
        spec.compare(x, truth[name], baseline[name], dtype=job.problem.dtype, floor=job.task.spec.floor, name=name)
        for name, x in results.items()
    ]
    return Verdict(max(found, key=lambda one: one.ratio), [one.message for one in found if not one.passed])
