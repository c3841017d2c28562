"""Attention's Configs: those that the operator has for a problem, and on Hopper other tile sizes that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from heapq import nsmallest
from itertools import product
from operator import add
from typing import Any

from ..cuda.flash_attention import sm90
from ..cuda.flash_attention.options import having
from ..cuda.flash_attention.sm90 import backward as sm90_backward
from ..cuda.flash_attention.sm90.backward import FusedConfigs, dkv_step
from ..cuda.flash_attention.sm90.config import SLACK, Sm90Config, padded
from ..cuda.flash_attention.sm90.dkv_config import AnyDkvConfig, DkvApartConfig, DkvConfig
from ..cuda.flash_attention.sm90.dq_config import DqConfig
from ..cuda.launch.plans import Choice
from ..cuda.launch.step import Step
from ..cuda.tile.roles import MOST_REGISTERS, REGISTERS
from ..spec import Problem
from .architectures import Architecture
from .attention_work import dkv_work, dq_work, forward_work, sums_bytes
from .candidates import Candidate, Part
from .model import Estimate, copying, estimate_of

KNOWN_OPTIONS = ("band", "sinks")  # their cost is known: they change only the number of tiles
FORWARD_REGISTERS, GRADIENT_REGISTERS = 32, 40  # per thread, besides scores, probabilities and sums
KEYS = range(48, 129, 16)  # at most 64 pairs of scores per thread, as many as `dropout_mask` has bits
DQ_KEYS, DKV_QUERIES = range(32, 129, 16), range(16, 113, 16)
BEST = 8  # Configs of each of the two kernels; every pair is one candidate


def refuse_unknown(p: Problem, backward: bool) -> None:
    """Raise NotImplementedError for a problem whose cost the model does not know."""
    op = p.spec.name
    if p.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"{op}: no estimates for {p.dtype}, expected bfloat16 or float16")
    if others := [option.name for option, _ in having(p).variants if option.name not in KNOWN_OPTIONS]:
        raise NotImplementedError(f"{op}: no estimates with {', '.join(others)}, expected causal, window and sinks")
    if p.Sq <= sm90.SHORT:
        raise NotImplementedError(f"{op}: no estimates for Sq={p.Sq}, expected more than {sm90.SHORT} queries")


def candidates(p: Problem, backward: bool, gpu: Architecture, choices: Sequence[Choice]) -> Iterator[Candidate]:
    """Yield the operator's own Configs, then those on Hopper that the operator does not have."""
    for choice in choices:
        yield _candidate(choice.rung, [_part(*each, p, gpu) for each in _kernels(choice.config)], p, gpu, choice.steps)
    if choices[0].rung != "sm90":
        return
    own = [[config for _, config in _kernels(choice.config)] for choice in choices]
    if backward:
        dq = (_part("dq", config, p, gpu) for config in dq_grid(p, gpu))
        dkv = (_part("dk, dv", config, p, gpu) for config in dkv_grid(p, gpu))
        found = product(*(nsmallest(BEST, kernels, key=lambda each: each[1].seconds) for kernels in (dq, dkv)))
    else:
        found = ([_part("o", config, p, gpu)] for config in forward_grid(choices[0].config, p, gpu))
    for kernels in found:
        configs = [part.config for part, _ in kernels]
        if configs not in own:
            yield _candidate("sm90", kernels, p, gpu, partial(_steps, p, *configs))


def _kernels(config: Any) -> list[tuple[str, Any]]:
    """Return the results of each kernel, and its Config."""
    if isinstance(config, FusedConfigs):
        return [("dq, dk, dv", config.fused)]
    return [("dq", config.dq), ("dk, dv", config.dkv)] if hasattr(config, "dkv") else [("o", config)]


def _part(makes: str, config: Any, p: Problem, gpu: Architecture) -> tuple[Part, Estimate]:
    work = {"o": forward_work, "dq": dq_work}.get(makes, dkv_work)
    return Part(makes, config), estimate_of(work(config, p, gpu), gpu)


def _candidate(
    rung: str, kernels: Iterable[tuple[Part, Estimate]], p: Problem, gpu: Architecture, steps: Any
) -> Candidate:
    """Add the passes before and after these kernels: delta; and, if dq is summed in memory, clearing flags and rounding
    dq.
    """
    parts, estimates = zip(*kernels, strict=True)
    if parts[0].makes != "o":
        estimates = copying(p.nbytes("o", "do", "lse"), gpu), *estimates
    if len(parts) == 1 and len(estimates) == 2:
        estimates = *estimates, copying(sums_bytes(p) + p.nbytes("q"), gpu, 2)
    return Candidate(rung, parts, reduce(add, estimates), steps)


def _steps(p: Problem, *configs: Any) -> Sequence[Step]:
    """Return the launches of Hopper's kernels."""
    if len(configs) == 1:
        return sm90.forward_steps(p, p.outputs(), *configs)
    metas = {**p.arrays, **p.outputs(p.spec.gradients), **sm90_backward.workspace(p)}
    return [*sm90_backward.dq_steps(p, metas, configs[0]), dkv_step(p, metas, configs[1])]


# --- Hopper's tiles ------------------------------------------------------------------------------


def forward_grid(own: Sm90Config, p: Problem, gpu: Architecture) -> Iterator[Sm90Config]:
    """Yield Configs with two stages of Q if they fit, else with one, else with o stored over Q."""
    D, Dv, columns = padded(p.D), padded(p.Dv), own.columns(padded(p.Dv))
    for consumers, keys, turns in product((2, 3), KEYS, (True, False)):
        if 3 * keys / 4 + columns / 2 + FORWARD_REGISTERS > REGISTERS[consumers][1]:
            continue
        for q_stages, over in ((2, False), (1, False), *([(1, True)] if columns <= D else [])):
            config = Sm90Config(consumers, keys, own.stages, turns, q_stages, o_over_q=over, slices=own.slices)
            if config.shared_bytes(D, Dv) + SLACK <= gpu.device.shared_memory_per_block:
                yield config
                break


def dq_grid(p: Problem, gpu: Architecture) -> Iterator[DqConfig]:
    """Yield the Configs for dq that fit."""
    D, Dv, wide = padded(p.D), padded(p.Dv), max(p.D, p.Dv) > 128
    for keys, turns in product(DQ_KEYS, (True, False)):
        config = DqConfig(2, keys, turns=turns, dq_over_q=wide, zeroed=wide)
        fits = config.shared_bytes(D, Dv) + SLACK <= gpu.device.shared_memory_per_block
        if fits and keys + D / 2 + GRADIENT_REGISTERS <= MOST_REGISTERS[2][1]:
            yield config


def dkv_grid(p: Problem, gpu: Architecture) -> Iterator[AnyDkvConfig]:
    """Yield the Configs for dk and dv: with three stages if they fit, else with two."""
    D, Dv, wide = padded(p.D), padded(p.Dv), max(p.D, p.Dv) > 128
    for queries, overlap in product(DKV_QUERIES, (True, False)):
        for stages in (3, 2):
            if wide:
                config: AnyDkvConfig = DkvApartConfig(queries, stages, overlap=overlap)
                registers = queries / (1 if overlap else 2) + max(D, Dv) / 2
            else:
                config = DkvConfig(2, queries, stages, overlap)
                registers = queries + (D + Dv) / 2 + overlap * queries / 4
            fits = config.shared_bytes(D, Dv) + config.slack <= gpu.device.shared_memory_per_block
            if fits and registers + GRADIENT_REGISTERS <= MOST_REGISTERS[2][1]:
                yield config
                break
