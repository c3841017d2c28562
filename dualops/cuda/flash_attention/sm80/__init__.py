"""Attention by mma.sync: which problems the rung serves, and its launches. delta, dbias and dsinks are simt's.

forward.py, dq.py, dkv.py   the kernels
config.py                   their tiles
rows.py                     how rows are copied and stored
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ....spec import ArrayMeta, Problem
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.plans import Choice
from ...launch.step import Step
from ...launch.views import by_token, is_stored_whole
from ...tile.warp_mma import MMA_TYPES
from .. import simt
from ..arguments import gradient_inputs_of, has_usual_scale, inputs_of, is_varlen, sizes, variant
from ..options import having
from ..tile_scheduler import section_of, section_of_queries, tiled_work
from .config import Sm80Config, Sm80DkvConfig, Sm80DqConfig, configs, dkv_configs, dq_configs
from .dkv import build_dkv
from .dq import build_dq
from .forward import build_forward
from .rows import gradient_vectors_of, vectors_of

WIDEST = 256


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for attention in 16 bits, best first."""
    p = problem
    if p.dtype not in MMA_TYPES or not device.has_mma_bf16 or max(p.D, p.Dv) > WIDEST or not has_usual_scale(p):
        return
    if not results["o"].size:
        return
    for config, reason in configs(p.D, p.Dv, having(p).names):
        shared_bytes = config.min_blocks * config.shared_bytes(p.D, p.Dv)
        yield Choice("sm80", config, reason, partial(forward_steps, p, results, config), shared_bytes=shared_bytes)


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm80Config) -> Sequence[Step]:
    p, metas, varlen, heads = problem, {**problem.arrays, **results}, is_varlen(problem), problem.B * problem.H
    build = build_forward(config, variant(p), p.return_lse, vectors_of(metas))
    o, lse = (by_token(metas, name, varlen) for name in ("o", "lse"))
    args = (o, lse, inputs_of(metas, varlen), tiled_work(p, section_of(p), sizes(p)))
    return [Step(build, (heads * cdiv(p.Sq, config.block_q),), args, config.shared_bytes(p.D, p.Dv))]


class BackwardConfigs(NamedTuple):
    """A Config for each kernel."""

    dq: Sm80DqConfig
    dkv: Sm80DkvConfig
    others: simt.BackwardConfigs


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for the gradient, best first."""
    p = problem
    if p.dtype not in MMA_TYPES or not device.has_mma_bf16 or not has_usual_scale(p):
        return
    if not results["dq"].size or not results["dk"].size:
        return
    D, Dv, options = int(p.D), int(p.Dv), having(p).names
    others, _ = next(simt.backward_configs(p))
    for config, reason in dq_configs(D, Dv, options):
        dq_bytes = config.min_blocks * config.shared_bytes(D, Dv)
        for dkv_config, dkv_reason in dkv_configs(D, Dv, options):
            dkv_bytes = dkv_config.shared_bytes(D, Dv) + dkv_config.statistics_bytes
            configs = BackwardConfigs(config, dkv_config, others)
            steps, needed = partial(backward_steps, p, results, configs), max(dq_bytes, dkv_bytes)
            found = simt.backward_workspace(p)
            yield Choice("sm80", configs, f"{reason}; dk and dv: {dkv_reason}", steps, found, shared_bytes=needed)


def backward_steps(problem: Problem, results: Mapping[str, ArrayMeta], configs: BackwardConfigs) -> Sequence[Step]:
    delta, *others = simt.backward_steps(problem, results, configs.others, elsewhere=("dq", "dk"))
    metas = {**problem.arrays, **results, **simt.backward_workspace(problem)}
    return [delta, dq_step(problem, metas, configs.dq), dkv_step(problem, metas, configs.dkv), *others]


def dq_step(problem: Problem, metas: Mapping[str, ArrayMeta], config: Sm80DqConfig) -> Step:
    """Return the launch for dq, after delta's. metas: of the problem's arrays, the results and delta."""
    p, varlen, heads = problem, is_varlen(problem), problem.B * problem.H
    build = build_dq(config, variant(p), gradient_vectors_of(metas), is_stored_whole(metas["dq"]))
    work = tiled_work(p, section_of(p), sizes(p))
    args = (by_token(metas, "dq", varlen), gradient_inputs_of(metas, varlen), work)
    return Step(build, (heads * cdiv(p.Sq, config.block_q),), args, config.shared_bytes(p.D, p.Dv))


def dkv_step(problem: Problem, metas: Mapping[str, ArrayMeta], config: Sm80DkvConfig) -> Step:
    """Return the launch for dk and dv."""
    p, varlen, heads = problem, is_varlen(problem), problem.B * problem.H
    whole = (is_stored_whole(metas[name]) for name in ("dk", "dv"))
    build = build_dkv(config, variant(p), gradient_vectors_of(metas), *whole)
    dk, dv = (by_token(metas, name, varlen) for name in ("dk", "dv"))
    args = (dk, dv, gradient_inputs_of(metas, varlen), tiled_work(p, section_of_queries(p), sizes(p)))
    blocks = heads // p.group * cdiv(p.Sk, config.block_kv)
    return Step(build, (blocks,), args, config.shared_bytes(p.D, p.Dv))
