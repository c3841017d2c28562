"""Run one problem once: results on the host, the rung that made them, time and memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any

from .. import spec
from ..testing.terms import terms_of
from ..testing.truth import held_first_without_terms, truth
from .errors import CommandError
from .gpu import Bench
from .problems import Arrays, Job


@dataclass(frozen=True)
class Measurement:
    """Results of one run. seconds: on a GPU the median of several bursts, elsewhere the time of the only run."""

    results: Arrays
    rung: str
    seconds: float
    extra_bytes: int  # peak memory beyond inputs and results
    flops: int = 0  # 0 if speed is not shown
    roof_seconds: float | None = None  # the time that memory traffic alone needs; None if arithmetic is the limit


def on_reference(job: Job, arrays: Arrays, kernel: str | None) -> Measurement:
    """Run the plain NumPy form in the storage dtype. Peak memory is what NumPy allocated."""
    if kernel:
        raise CommandError(f"--kernel {kernel}: the reference has no rungs")
    tracemalloc.start()
    try:
        start = time.perf_counter()
        results = job.named(job.task.reference(**arrays, **job.params))
        seconds = time.perf_counter() - start
        extra = tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in results.values())
    finally:
        tracemalloc.stop()
    return Measurement(results, "NumPy", seconds, max(extra, 0))


def on_simulator(job: Job, arrays: Arrays, kernel: str | None) -> Measurement:
    """Run the kernels in Python. Memory is what they request, without the simulator's own."""
    call = getattr(import_module("dualops.cuda"), job.task.name)
    plan = plan_of(job, arrays, kernel)
    overwritten = job.task.spec.updates.values()
    own = {name: x.copy() if name in overwritten else x for name, x in arrays.items()}
    start = time.perf_counter()
    results = job.named(call(**own, **job.params, kernel=kernel))
    seconds = time.perf_counter() - start
    return Measurement(results, plan.choice.rung, seconds, workspace_bytes(plan))


def on_gpu(job: Job, arrays: Arrays, kernel: str | None) -> Measurement:
    """Run the kernels on the current GPU."""
    bench = Bench(job, arrays, kernel)
    plan = plan_of(job, bench.inputs[0], kernel)
    counted = bench.extra_bytes()
    extra = workspace_bytes(plan) if counted is None else counted
    times = bench.seconds(), extra, job.flops_of(arrays), bench.roof_seconds()
    return Measurement(bench.results(), plan.choice.rung, *times)


def plan_of(job: Job, arrays: Mapping[str, Any], kernel: str | None) -> Any:
    """Return the plan of `dualops.cuda` for these arrays; launches nothing."""
    task, plan = job.task, import_module("dualops.cuda").plan
    return plan(task.spec.name, kernel=kernel, backward=task.backward, **arrays, **job.params)


def workspace_bytes(plan: Any) -> int:
    """Return the bytes that a plan's kernels need beyond inputs and results."""
    return sum(meta.nbytes for meta in plan.choice.workspace.values())


@dataclass(frozen=True)
class Verdict:
    """A run compared with the truth: its worst result, and messages about the results that fail."""

    worst: spec.Accuracy
    failures: list[str]


class Judge:
    """Compares results of a problem with the reference, which runs once for all rungs."""

    def __init__(self, job: Job, arrays: Arrays):
        self.job, self.arrays = job, arrays

    @cached_property
    def truth(self) -> Arrays:
        task = self.job.task
        return self.job.named(truth(task.spec, task.lean_reference, self.arrays, self.job.params))

    @cached_property
    def baseline(self) -> Arrays:
        return self.job.named(self.job.task.lean_reference(**self.arrays, **self.job.params))

    def verdict(self, results: Arrays) -> Verdict:
        """Compare every result with the float64 truth by the rule of `spec.compare`."""
        task, problem = self.job.task, self.job.problem
        terms = partial(terms_of(task.spec, task.backward), self.arrays, problem)
        both = self.truth, self.baseline
        found = [*held_first_without_terms(task.spec, problem.dtype, results, *both, terms).values()]
        return Verdict(max(found, key=lambda one: one.ratio), [one.message for one in found if not one.passed])
