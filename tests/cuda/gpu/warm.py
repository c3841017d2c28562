"""Kernels are compiled before the tests that need them, on all cores; a test then finds them on the disk."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from dualops.cuda import device as devices
from dualops.cuda.compile import binary
from dualops.cuda.device import Device
from dualops.cuda.launch import OPERATIONS
from dualops.cuda.offline import absent_problem
from dualops.cuda.step import Step
from dualops.spec import OPERATORS, Case


class Job(NamedTuple):
    """A case of an operator on a rung, or on the one that serves it."""

    operator: str
    backward: bool
    rung: str | None
    case: Case


def warm(jobs: Iterable[Job]) -> None:
    """Compile what the jobs need. What goes wrong is left to the test that needs it."""
    arch, by_name = devices.current().arch, {(job.operator, job.backward, job.rung, job.case.id): job for job in jobs}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(_compile, job, arch) for job in by_name.values()]:
            future.exception()


def _compile(job: Job, arch: str) -> None:
    device = devices.known(arch)
    for step in _steps(job, device):
        binary(step.kernel, arch, step.shared_bytes)


def _steps(job: Job, device: Device) -> Iterable[Step]:
    spec, operation = OPERATORS[job.operator], OPERATIONS[job.operator][job.backward]
    problem = absent_problem(spec, job.case, job.backward)
    for choice in operation.choices(problem, problem.outputs(operation.outputs), device):
        if job.rung in (None, choice.rung):
            return choice.steps()
    return ()
