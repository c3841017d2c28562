"""Retention's Configs on both rungs, and its gradient's."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from ..cuda.launch.plans import Choice
from ..cuda.retention import sm80, sm90
from ..cuda.retention.sm80.config import Sm80Config
from ..cuda.retention.sm90.config import SLACK, Config
from ..spec import Problem
from .architectures import Architecture
from .candidates import Candidate, Kernel, Part, without_idle_stages
from .retention_passes import passes_of, sm80_estimate, sm90_estimate


def refuse_unknown(p: Problem, backward: bool) -> None:
    """Raises NotImplementedError for what the model does not know."""
    op = p.spec.name
    if not (p.B and p.H and p.Sk):
        raise NotImplementedError(f"{op}: no estimates of an empty problem")
    if p.form != "chunk":
        raise NotImplementedError(f"{op}: no estimates for form={p.form!r}, expected 'chunk'")
    if p.Sk <= sm80.FEW:
        raise NotImplementedError(f"{op}: no estimates for S={p.Sk}, expected more than {sm80.FEW} tokens")
    if p.normalize is not None:
        raise NotImplementedError(f"{op}: no estimates with normalize={p.normalize!r}, expected None")
    if backward and "log_decay" in p.arrays:
        raise NotImplementedError(f"{op}: no estimates of the gradient with log_decay")


def candidates(p: Problem, backward: bool, gpu: Architecture, rungs: Container[str]) -> Iterator[Candidate]:
    """Every Config that the GPU has room for, of the rungs that do the problem."""
    results = p.outputs(p.spec.gradients) if backward else p.outputs()
    makes = ", ".join(f"d{name}" for name in "qvk") if backward else "o"
    if "sm90" in rungs:
        roles = sm90.BACKWARD if backward else sm90.FORWARD
        for own in _choices(sm90, p, results, backward, gpu):
            kernels = (
                _sm90_kernel(makes, config, p, backward, gpu) for config in sm90_grid(own.config, p, backward, gpu)
            )
            for kernel in without_idle_stages(kernels, [own.config]):
                steps = partial(sm90.steps_of, p, results, kernel.part.config, roles)
                yield Candidate("sm90", (kernel.part,), kernel.estimate, kernel.shared_bytes, steps)
    for choice in _choices(sm80, p, results, backward, gpu) if "sm80" in rungs else ():
        config: Sm80Config = choice.config
        if choice.shared_bytes <= gpu.shared_per_block:
            parts = Part(makes, config.rows), Part(f"states between {config.chunk} tokens", config.states)
            estimate = sm80_estimate(config, p, backward, gpu)
            yield Candidate("sm80", parts, estimate, choice.shared_bytes, choice.steps)


def kernels_of(taken: Iterable[Any]) -> tuple[Any, ...]:
    """Return the kernels' Configs of a call, as they are in parts: without the tokens of a chunk."""
    return tuple(each for each in taken if is_dataclass(each))


def _choices(rung: Any, p: Problem, results: Any, backward: bool, gpu: Architecture) -> Iterable[Choice]:
    """A rung's own, be there many sequences or few."""
    many, few = (
        (rung.backward_choices, rung.few_backward_choices) if backward else (rung.forward_choices, rung.few_choices)
    )
    return chain(many(p, results, gpu.device), few(p, results, gpu.device))


def sm90_grid(own: Config, p: Problem, backward: bool, gpu: Architecture) -> Iterator[Config]:
    """The operator's own first; segments of two chunks or more, as long as fewer would leave SMs without a block."""
    yield own
    blocks = min(p.B * p.H * own.slices(each.D, each.Dv) for each in passes_of(p, backward))
    segments = 1
    while segments == 1 or (segments * sm90.LEAST_CHUNKS * own.chunk <= p.Sk and blocks * segments < 2 * gpu.sms):
        for stages in (1, 2, 3):
            config = replace(own, segments=segments, stages=stages)
            if config != own and _sm90_bytes(config, p, backward) + SLACK <= gpu.shared_per_block:
                yield config
        segments *= 2


def _sm90_bytes(config: Config, p: Problem, backward: bool) -> int:
    return max(config.shared_bytes(each.D, each.Dv) for each in passes_of(p, backward))


def _sm90_kernel(makes: str, config: Config, p: Problem, backward: bool, gpu: Architecture) -> Kernel:
    shared_bytes = _sm90_bytes(config, p, backward)
    return Kernel(Part(makes, config), sm90_estimate(config, p, backward, gpu), shared_bytes)
