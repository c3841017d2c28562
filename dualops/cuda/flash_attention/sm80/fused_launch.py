"""Attention's whole gradient in one kernel on the sm80 rung: which problems it takes, and its launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ....spec import ArrayMeta, Problem
from ...arrays import cdiv
from ...device import Device
from ...plans import Choice
from ...step import Step
from ...tile.warp_mma import MMA_TYPES
from ...tile.warp_rows import WarpRowsLayout
from ...views import by_token, is_stored_whole
from ...words import CLEARED, build_clear
from .. import simt
from ..arguments import is_varlen, sizes, variant
from ..options import having
from .config import ROWS, pitch
from .dq_config import ITEMSIZE
from .dq_finish import build_dq_finish
from .fused import build_fused
from .fused_config import Sm80FusedConfig, fused_configs
from .reading import gradient_vectors_of

LEAST_TILES = 4
HEADS = 16


class FusedConfigs(NamedTuple):
    """A Config for the kernel, and for what simt does beside it."""

    fused: Sm80FusedConfig
    others: simt.BackwardConfigs


def fused_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for its gradient, best first."""
    p = problem
    if p.dtype not in MMA_TYPES or not device.has_mma_bf16 or is_varlen(p) or not p.scale > 0:
        return
    if not results["dq"].size or not results["dk"].size:
        return
    others, _ = next(simt.backward_configs(p))
    for config, reason in fused_configs(int(p.D), int(p.Dv), [option.name for option, _ in having(p).variants]):
        if p.Sq > (LEAST_TILES - 1) * config.block_q:
            configs = FusedConfigs(config, others)
            steps, needed = partial(fused_steps, p, results, configs), config.shared_bytes(p.D, p.Dv) + config.statistics_bytes
            told = f"dq, dk and dv: {reason}, dq added in float32"
            yield Choice("sm80", configs, told, steps, workspace(p, config), shared_bytes=needed)


def tiles_of(problem: Problem, config: Sm80FusedConfig) -> Any:
    """Tiles of queries of a head."""
    return cdiv(problem.Sq, config.block_q)


def workspace(problem: Problem, config: Sm80FusedConfig) -> dict[str, ArrayMeta]:
    """delta; dq in float32, in whole tiles; a counter, and a flag a tile."""
    p, place = problem, problem.arrays["q"].device
    tiles = p.B * p.H * tiles_of(p, config)
    sums = ArrayMeta((tiles * (config.block_q * p.D),), "float32", (1,), place, 0)
    return {**simt.backward_workspace(p), "sums": sums, "flags": ArrayMeta((1 + tiles,), "int64", (1,), place, 0)}


def fused_steps(problem: Problem, results: Mapping[str, ArrayMeta], configs: FusedConfigs) -> Sequence[Step]:
    """delta, zeros for the flags, the kernel, and what makes rows of dq."""
    p, config, found = problem, configs.fused, variant(problem)
    delta, *others = simt.backward_steps(p, results, configs.others, elsewhere=("dq", "dk"))
    metas = {**p.arrays, **results, **workspace(p, config)}
    heads, tiles, count = p.B * p.H, tiles_of(p, config), 1 + p.B * p.H * tiles_of(p, config)
    clear = Step(build_clear(), (cdiv(count, CLEARED),), ("flags", count))
    whole = (is_stored_whole(metas[name]) for name in ("dk", "dv"))
    arrays = [by_token(metas, name, False) for name in ("q", "k", "v", "do", "lse", "delta")]
    own = (by_token(metas, name, False) for name in ("dk", "dv"))
    fused = build_fused(config, found, gradient_vectors_of(metas), *whole)
    blocks = heads // p.group * cdiv(p.Sk, config.block_kv)
    section = min(config.heads, heads)
    finish = build_dq_finish(config, found, is_stored_whole(metas["dq"]))
    rows = 4 * 4 * WarpRowsLayout(pitch(int(p.D), ITEMSIZE)).size
    return [
        delta,
        clear,
        Step(fused, (blocks,), ("sums", "flags", tiles, heads, section, *own, *arrays, *sizes(p)), config.shared_bytes(p.D, p.Dv)),
        Step(finish, (heads * cdiv(p.Sq, ROWS),), ("sums", tiles, heads, section, by_token(metas, "dq", False), *arrays, *sizes(p)), rows),
        *others,
    ]
