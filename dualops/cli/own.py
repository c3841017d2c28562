"""The demo's built-in problems, taken from the cases of the specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..spec import ArrayMeta, Case, Spec, Tag
from ..spec.meta import contiguous_strides
from .errors import CommandError
from .problems import Arrays, Job, Task

SHOWN_DTYPES = ("float32", "bfloat16")
_TAGS = {"gpu": Tag.DEMO, "simulator": Tag.SIM, "reference": Tag.TEST}


def own_jobs(task: Task, place: str, params: Mapping[str, Any], dtype: str | None) -> list[Job]:
    """Choose the problems that the demo shows for a function, from the cases for this place.

    The last one is the case with the most optional inputs. Before it comes, for each other dtype (or for the requested
    one), the largest case without optional inputs. An operator that is a variant of another has only one problem.
    `params` replace those of a case; cases that refuse them are left out. Raises CommandError if no case is left.
    """
    wanted = (dtype,) if dtype else SHOWN_DTYPES
    cases = [case for case in task.spec.tagged(_TAGS[place]) if case.dtype in wanted]
    found, refused = [], []
    for case in cases:
        try:
            if case.backward or not task.backward:
                found.append(job_of_case(task, replace(case, params={**case.params, **params})))
        except (TypeError, ValueError) as error:
            refused.append(str(error))
    found = [job for job in found if job.flops]  # empty arrays are only for tests
    optional = _largest(
        [job for job in found if job.optional_inputs], lambda job: (len(job.optional_inputs), job.flops)
    )
    jobs: list[Job] = []
    for name in wanted:
        if dtype or not optional or optional[0].problem.dtype != name:
            plain = [job for job in found if job.problem.dtype == name and not job.optional_inputs]
            jobs += _largest(plain, lambda job: job.flops)
    jobs += optional
    if not jobs:
        none = f"{task.name} has no {_TAGS[place]} case in {' or '.join(wanted)}; bring arrays with --input"
        raise CommandError(refused[0] if refused else none)
    return (optional or jobs)[:1] if task.spec.parent else jobs


def _largest(jobs: Sequence[Job], size: Callable[[Job], Any]) -> list[Job]:
    """Return the first of the largest jobs, if there is one."""
    return [max(jobs, key=size)] if jobs else []


def job_of_case(task: Task, case: Case) -> Job:
    shapes = dict(case.shapes)
    if task.backward:
        asked, everything = (
            task.spec.bind(_metas(task.spec.inputs, shapes, case), _forward_params(task.spec, case, everything=wanted))
            for wanted in (False, True)
        )
        shapes |= {name: meta.shape for name, meta in everything.outputs().items()}
        shapes |= {f"d{name}": meta.shape for name, meta in asked.outputs().items()}
    problem = task.bind(_metas(task.inputs, shapes, case), case.params)
    return Job(task, case.id, problem, case.params, lambda: case_arrays(task, case))


def _metas(inputs: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], case: Case) -> dict[str, ArrayMeta]:
    dtypes = {given.name: case.dtype_of(given) for given in inputs if given.name in shapes}
    return {
        name: ArrayMeta(shapes[name], wanted, contiguous_strides(shapes[name]), "cpu", 0)
        for name, wanted in dtypes.items()
    }


def _forward_params(spec: Spec, case: Case, *, everything: bool = False) -> dict[str, Any]:
    """Return the case's parameters for forward, including those that request the results that backward needs."""
    names = [param.name for param in spec.params]
    asked = spec.requests if everything else {}
    return {name: value for name, value in case.params.items() if name in names} | asked


def case_arrays(task: Task, case: Case, run: Callable[[Job, Arrays], Arrays] | None = None) -> Arrays:
    """Make the inputs of a case. Those of a gradient are what forward saved, and normal random numbers for incoming
    gradients.

    run: makes the forward call, with results by name; the reference, if it is None.
    """
    rng = np.random.default_rng(case.seed)
    arrays = task.spec.generate(task.spec, case, rng)
    if task.backward:
        arrays |= _saved_and_incoming(task.spec, case, arrays, rng, run or _by_reference)
    return {given.name: arrays[given.name] for given in task.inputs if given.name in arrays}


def _by_reference(job: Job, arrays: Arrays) -> Arrays:
    return job.named(job.task.reference(**arrays, **job.params))


def _saved_and_incoming(
    spec: Spec, case: Case, arrays: Arrays, rng: np.random.Generator, run: Callable[[Job, Arrays], Arrays]
) -> Arrays:
    forward = Task(spec, backward=False)
    asked, everything = (_forward_params(spec, case, everything=wanted) for wanted in (False, True))
    metas = {name: ArrayMeta.of_numpy(x) for name, x in arrays.items()}
    whole = Job(forward, case.id, spec.bind(metas, everything), everything, dict)
    results = run(whole, arrays)
    gradients = {}
    for name in spec.bind(metas, asked).outputs():
        x = results[name]
        incoming = rng.standard_normal(x.shape, dtype=np.float64 if x.dtype == np.float64 else np.float32)
        # a constant result, such as the lse of a query that sees no key, has no gradient
        gradients[f"d{name}"] = np.where(x == -np.inf, 0, incoming).astype(x.dtype)
    return results | {x: results[y] for x, y in spec.saved_instead.items() if y in results} | gradients
