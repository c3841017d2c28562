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
from ..arguments import has_usual_scale, is_varlen, sizes, variant
from ..options import having
from .config import ROWS, pitch
from .dq_config import ITEMSIZE
from .dq_finish import THREADS, build_dq_finish
from .fused import build_fused
from .fused_config import Sm80FusedConfig, fused_configs
from .reading import gradient_vectors_of

# of queries of a head: each is added to by one block after the other. That heads are few does not count, so that one
# has the same bits alone
LEAST_TILES = 4
# heads of keys that blocks share at a time: few, so that what they read and add stays in L2; but under a causal mask,
# where who comes later has less to do than who it waits for, 32 take 0.97 and 0.92 of the time of 16 (S = 8192 and
# 2048), and full 1.03 and 1.00 (H100, 2026-11-27)
HEADS, HEADS_CAUSAL = 16, 32


class FusedConfigs(NamedTuple):
    """A Config for the kernel, and for what simt does beside it."""

    fused: Sm80FusedConfig
    others: simt.BackwardConfigs


def fused_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for its gradient, best first: where each key is seen from some query on to the last. On Hopper, where it is
    measured; of other GPUs' assemblers some take a register more than there are.
    """
    p = problem
    if p.dtype not in MMA_TYPES or not device.has_wgmma or is_varlen(p) or p.window is not None:
        return
    if not has_usual_scale(p) or not results["dq"].size or not results["dk"].size:
        return
    D, Dv = int(p.D), int(p.Dv)
    others, _ = next(simt.backward_configs(p))
    for config, reason in fused_configs(D, Dv, [option.name for option, _ in having(p).variants], p.group):
        if p.Sq > (LEAST_TILES - 1) * config.block_q:
            configs, needed = FusedConfigs(config, others), config.shared_bytes(D, Dv) + config.statistics_bytes
            steps, found = partial(fused_steps, p, results, configs), workspace(p, config)
            told = f"dq, dk and dv: {reason}, dq added in float32"
            yield Choice("sm80", configs, told, steps, found, shared_bytes=needed)


def tiles_of(problem: Problem, config: Sm80FusedConfig) -> Any:
    """Tiles of queries of a head."""
    return cdiv(problem.Sq, config.block_q)


def workspace(problem: Problem, config: Sm80FusedConfig) -> dict[str, ArrayMeta]:
    """delta; dq in float32, in whole tiles; a counter, and a flag a tile."""
    p, place = problem, problem.arrays["q"].device
    tiles = p.B * p.H * tiles_of(p, config)
    sums = ArrayMeta((tiles * (config.block_q * p.D),), "float32", (1,), place, 0)
    return {**simt.backward_workspace(p), "sums": sums, "flags": ArrayMeta((1 + tiles,), "int64", (1,), place, 0)}


def finish_bytes(D: int) -> int:
    """Shared memory of what makes rows of dq."""
    return 4 * THREADS // 32 * WarpRowsLayout(pitch(D, ITEMSIZE)).size


def fused_steps(problem: Problem, results: Mapping[str, ArrayMeta], configs: FusedConfigs) -> Sequence[Step]:
    """delta, zeros for the flags, the kernel, and what makes rows of dq."""
    p, config, found, D = problem, configs.fused, variant(problem), int(problem.D)
    delta, *others = simt.backward_steps(p, results, configs.others, elsewhere=("dq", "dk"))
    metas = {**p.arrays, **results, **workspace(p, config)}
    heads, tiles = p.B * p.H, tiles_of(p, config)
    count, shared = 1 + heads * tiles, (tiles, heads, HEADS_CAUSAL if p.causal else HEADS)
    arrays = [by_token(metas, name, False) for name in ("q", "k", "v", "do", "lse", "delta")]
    dq, dk, dv = (by_token(metas, name, False) for name in ("dq", "dk", "dv"))
    dq_whole, *whole = (is_stored_whole(metas[name]) for name in ("dq", "dk", "dv"))
    fused = build_fused(config, found, gradient_vectors_of(metas), *whole)
    blocks, shared_bytes = heads // p.group * cdiv(p.Sk, config.block_kv), config.shared_bytes(D, int(p.Dv))
    finish = build_dq_finish(config, found, dq_whole)
    return [
        delta,
        Step(build_clear(), (cdiv(count, CLEARED),), ("flags", count)),
        Step(fused, (blocks,), ("sums", "flags", *shared, dk, dv, *arrays, *sizes(p)), shared_bytes),
        Step(finish, (heads * cdiv(p.Sq, ROWS),), ("sums", *shared, dq, *arrays, *sizes(p)), finish_bytes(D)),
        *others,
    ]
