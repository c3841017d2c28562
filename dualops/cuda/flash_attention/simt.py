"""The simt rung: its Configs, best first, and its launches, forward and backward."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.attention import broadcast_strides
from ...spec.meta import Strided, compute_dtype, contiguous_strides
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..launch.views import by_token, how_stored, whole
from .arguments import GradientInputs, general, gradient_inputs_of, inputs_of, is_varlen, sizes, variant
from .options import having
from .simt_forward import ForwardConfig, build_forward
from .simt_gradient import BackwardConfig, build_dkv, build_dq
from .simt_sums import ROWS, BiasSizes, build_dbias, build_delta, build_dsinks

LIGHT_OPTIONS = ("band", "block_mask", "key_padding_mask", "mask_mod", "sinks")


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for attention, best first."""
    p = problem
    for config, reason in forward_configs(p):
        steps = partial(forward_steps, p, results, config)
        yield Choice("simt", config, reason, steps, shared_bytes=config.shared_bytes(p.D, p.Dv, p.dtype))


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for its gradient, best first."""
    p = problem
    for configs, reason in backward_configs(p):
        steps = partial(backward_steps, p, results, configs)
        yield Choice("simt", configs, reason, steps, backward_workspace(p), configs.shared_bytes(p.D, p.Dv, p.dtype))


def forward_configs(problem: Problem) -> Iterator[tuple[ForwardConfig, str]]:
    """Yield tiles for forward, best first. Varlen gets those of many queries, since some sequences may have many."""
    p, varlen = problem, is_varlen(problem)
    if (p.Sq > 32 or varlen) and p.dtype != "float64":
        # share of torch's memory-efficient attention, float32, S=4096 D=64 and S=2048 D=128, H200, 2026-11-21
        if p.Dv <= 128:  # 0.63, 0.48; 64 x 64 scores 0.44, 0.34, two blocks an SM 0.56, 0.44; 64 x 128 0.49, 0.36
            yield ForwardConfig(8, 4), "128 x 64 scores a block"
        if p.Dv <= 256:
            yield ForwardConfig(4, 4), "64 x 64 scores a block: wide heads leave registers for no more"
    if p.Sq > 16 or varlen:
        yield ForwardConfig(2, 2), "32 x 32 scores a block: few queries, double precision, or the widest heads"
    yield ForwardConfig(1, 1), "16 x 16 scores a block: few queries, or little shared memory"


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: ForwardConfig) -> Sequence[Step]:
    p, metas, varlen = problem, {**problem.arrays, **results}, is_varlen(problem)
    build = build_forward(config, variant(p), p.return_lse)
    blocks = p.B * p.H * cdiv(p.Sq, config.block_q)
    o, lse = (by_token(metas, name, varlen) for name in ("o", "lse"))
    args = (o, lse, inputs_of(metas, varlen), sizes(p))
    return [Step(build, (blocks,), args, config.shared_bytes(p.D, p.Dv, p.dtype))]


class BackwardConfigs(NamedTuple):
    """A Config for each kernel that works on tiles."""

    dkv: BackwardConfig
    dq: BackwardConfig
    dbias: BackwardConfig

    def shared_bytes(self, D: int, Dv: int, dtype: str) -> int:
        """Return the most bytes that a kernel needs for all blocks that an SM should hold."""
        parts = ((self.dkv, 2), (self.dq, 1), (self.dbias, 1))
        return max(each.min_blocks * each.shared_bytes(D, Dv, dtype, count) for each, count in parts)


def backward_configs(problem: Problem) -> Iterator[tuple[BackwardConfigs, str]]:
    """Yield tiles for backward, best first. Varlen gets those of many queries and keys."""
    p = problem
    small, medium = BackwardConfig(1, 1, share=True), BackwardConfig(2, 2)
    medium_dbias = BackwardConfig(2, 2, share=True)
    if p.dtype != "float64" and (min(p.Sq, p.Sk) > 32 or is_varlen(p)):
        # ms of dkv and dq, float32, S=4096 D=64 and S=2048 D=128, H200, 2026-11-21
        if max(p.D, p.Dv) <= 64 and not rich(p):
            # dkv 22.8; 64 x 64 one block an SM 28.4, 128 x 64 22.1 in 254 registers. dq 15.5; 64 x 64 21.1
            dkv, dq = BackwardConfig(4, 4, min_blocks=2), BackwardConfig(8, 4)
            yield BackwardConfigs(dkv, dq, medium_dbias), "64 x 64 scores a block for dkv, 128 x 64 for dq"
        if max(p.D, p.Dv) <= 64:
            tile, why = BackwardConfig(4, 4), "options need registers, or two blocks do not fit"
            yield BackwardConfigs(tile, tile, medium_dbias), f"64 x 64 scores a block: {why}"
        if max(p.D, p.Dv) <= 128:
            # dkv 10.2; 64 x 64 6.8 and 128 x 32 5.9, both in more than 250 registers. dq 5.3; 64 x 32 5.1
            dkv = BackwardConfig(2, 4) if rich(p) else BackwardConfig(8, 2)
            yield BackwardConfigs(dkv, BackwardConfig(4, 4), medium_dbias), f"{dkv.rows} x {dkv.columns} scores for dkv"
    if p.dtype != "float64" and max(p.D, p.Dv) <= 256:
        yield BackwardConfigs(medium, medium, medium_dbias), "32 x 32 scores a block"
    tile = BackwardConfig(1, 1)
    yield BackwardConfigs(tile, tile, small), "16 x 16 scores a block: double precision, or wide heads"
    yield BackwardConfigs(small, small, small), "16 x 16 scores a block, operands by turns: little shared memory"


def rich(problem: Problem) -> bool:
    """Return whether options other than masks and sinks change scores, which takes registers."""
    return any(option.name not in LIGHT_OPTIONS for option, _ in having(problem).variants)


def backward_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return delta, of the shape of lse."""
    lse = problem.arrays["lse"]
    return {"delta": ArrayMeta(lse.shape, compute_dtype(problem.dtype), contiguous_strides(lse.shape), lse.device, 0)}


def backward_steps(
    problem: Problem, results: Mapping[str, ArrayMeta], configs: BackwardConfigs, elsewhere: Container[str] = ()
) -> Sequence[Step]:
    """Return the launches, delta first. elsewhere: results that other kernels compute, of "dk" (with dv), "dq" and
    "dbias".
    """
    p, varlen, found = problem, is_varlen(problem), variant(problem)
    metas = {**p.arrays, **results, **backward_workspace(p)}
    steps, inputs, work = delta_steps(p), gradient_inputs_of(metas, varlen), sizes(p)
    if "dk" not in elsewhere and results["dk"].size:
        dkv, blocks = build_dkv(configs.dkv, found), p.B * (p.H // p.group) * cdiv(p.Sk, configs.dkv.rows)
        args = (*(by_token(metas, name, varlen) for name in ("dk", "dv")), inputs, work)
        steps.append(Step(dkv, (blocks,), args, configs.dkv.shared_bytes(p.D, p.Dv, p.dtype, 2)))
    if "dq" not in elsewhere and results["dq"].size:
        dq, blocks = build_dq(configs.dq, found), p.B * p.H * cdiv(p.Sq, configs.dq.rows)
        args = (by_token(metas, "dq", varlen), inputs, work)
        steps.append(Step(dq, (blocks,), args, configs.dq.shared_bytes(p.D, p.Dv, p.dtype, 1)))
    if "dbias" not in elsewhere and "dbias" in results and results["dbias"].size:
        steps.append(_dbias_step(problem, results["dbias"], configs.dbias, inputs))
    if "dsinks" in results:
        steps.append(dsinks_step(p, results))
    return steps


def delta_steps(problem: Problem) -> list[Step]:
    """Return the launch for delta, or none if there are no rows."""
    p, varlen, metas = problem, is_varlen(problem), {**problem.arrays, **backward_workspace(problem)}
    if not metas["delta"].size:
        return []
    batches, tokens = (1, p.total_q) if varlen else (p.B, p.Sq)
    aligned = all(how_stored(metas, name, varlen) != "elements" for name in ("o", "do"))
    build = build_delta(general(variant(p)), "dlse" in p.arrays, aligned)
    arrays = (by_token(metas, name, varlen) for name in ("delta", "o", "do", "dlse"))
    return [Step(build, (batches * p.H * cdiv(tokens, ROWS),), (*arrays, p.H, tokens, p.Dv))]


def dsinks_step(problem: Problem, results: Mapping[str, ArrayMeta]) -> Step:
    """Return the launch for dsinks, after delta's."""
    p, varlen, metas = problem, is_varlen(problem), {**problem.arrays, **results, **backward_workspace(problem)}
    build = build_dsinks(general(variant(p)), results["dsinks"].dtype)
    arrays = (
        *(whole(metas, name, 1) for name in ("dsinks", "sinks")),
        *(by_token(metas, name, varlen) for name in ("lse", "delta")),
    )
    return Step(build, (p.H,), (*arrays, whole(metas, "cu_seqlens_q", 1), p.B, p.total_q if varlen else p.Sq))


def _dbias_step(problem: Problem, dbias: ArrayMeta, config: BackwardConfig, inputs: GradientInputs) -> Step:
    p = problem
    bias = BiasSizes(*(1 for _ in range(4 - len(dbias.shape))), *dbias.shape)
    blocks = bias.B * bias.H * cdiv(bias.Sq, config.rows) * cdiv(bias.Sk, config.columns)
    args = (Strided("dbias", broadcast_strides(dbias)), bias, p.B, inputs, sizes(p))
    return Step(build_dbias(config, variant(p)), (blocks,), args, config.shared_bytes(p.D, p.Dv, p.dtype, 1))
