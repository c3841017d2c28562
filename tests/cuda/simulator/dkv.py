"""dk and dv of attention's sm90 rung, beside what simt makes of the rest of the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from dualops.cuda.device import Device
from dualops.cuda.flash_attention import simt
from dualops.cuda.flash_attention.sm90.dkv_launch import dkv_choices, dkv_maps, dkv_step
from dualops.cuda.launch import OPERATIONS
from dualops.cuda.plans import Choice
from dualops.cuda.step import Step
from dualops.spec import ArrayMeta, Problem


def _choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device, config: Any) -> Iterator[Choice]:
    simt_configs, _ = next(simt.backward_configs(problem))
    for found, reason in dkv_choices(problem, results, device):
        chosen, workspace = config or found, simt.backward_workspace(problem)
        metas = {**problem.arrays, **results, **workspace}
        steps = partial(_steps, problem, results, simt_configs, metas, chosen)
        yield Choice("sm90", chosen, reason, steps, workspace, maps=dkv_maps(problem, metas, chosen))


def _steps(problem: Problem, results: Any, simt_configs: Any, metas: Any, config: Any) -> list[Step]:
    made = simt.backward_steps(problem, results, simt_configs)
    return [dkv_step(problem, metas, config) if step.kernel.name == "flash_attention_dkv" else step for step in made]


@contextmanager
def served(config: Any = None) -> Iterator[None]:
    """Inside the with statement the gradient's first rung is this, by a Config instead of its own if one is given."""
    operations = [OPERATIONS[name][True] for name in ("flash_attention", "flash_attention_varlen")]
    before = [operation.rungs for operation in operations]
    for operation in operations:
        operation.rungs = (partial(_choices, config=config), *operation.rungs)
        operation.forget()
    try:
        yield
    finally:
        for operation, rungs in zip(operations, before):
            operation.rungs = rungs
            operation.forget()
