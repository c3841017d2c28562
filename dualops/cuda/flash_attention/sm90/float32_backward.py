"""The gradient of attention of float32 on Hopper: which problems the rung takes, its Configs and launches.

Each number is three of bfloat16, each product six, as in forward (`float32`). The kernels of heads to 64 columns are
those of 16 bits (`dq`, `dkv`). Wider ones have their own (`dq_split_f32`, `dkv_split_f32`), where two warpgroups share
the work for a tile, as the results, and what is added to them, take the registers of both. The copies that a pass makes
of q, k, v and do are the plan's, one and a half times their own memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ....spec import ArrayMeta, Problem
from ...launch.device import Device
from ...launch.maps import Mapped
from ...launch.plans import Choice
from ...launch.step import Step
from .. import simt
from ..arguments import has_usual_scale, is_varlen
from ..options import having
from . import backward
from .config import BLOCK_MASK, LIGHT_OPTIONS, SLACK, are_many, padded
from .dkv_config import AnyDkvConfig, DkvConfig, DkvThirdsConfig
from .dq_config import AnyDqConfig, DqConfig, DqThirdsConfig
from .float32 import LEAST_QUERIES
from .to_bf16x3 import thirds_maps, thirds_of, thirds_steps

SPLIT = ("q", "k", "v", "do")
LEAST_KEYS = 65
NARROW, MOST_WIDTH = 64, 128  # of a head


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for its gradient, best first."""
    p = problem
    if p.dtype != "float32" or not device.has_wgmma or max(p.D, p.Dv) > MOST_WIDTH or not has_usual_scale(p):
        return
    if not results["dq"].size or not p.Sk or (not is_varlen(p) and (p.Sq < LEAST_QUERIES or p.Sk < LEAST_KEYS)):
        return
    D, Dv = padded(int(p.D)), padded(int(p.Dv))  # numbers, as a kernel is built for them
    (dq, dkv), reason = thirds_configs(D, Dv, [option.name for option, _ in having(p).variants])
    if max(dq.shared_bytes(D, Dv) + SLACK, dkv.shared_bytes(D, Dv) + dkv.slack) > device.shared_memory_per_block:
        return
    others, _ = next(simt.backward_configs(p))
    configs = backward.BackwardConfigs(dq, dkv, others)
    maps = {**_maps(p, "dq", dq.block_q, dq.block_kv), **_maps(p, "dkv", dkv.block_q, dkv.block_kv)}
    workspace, steps = {**thirds_of(p, SPLIT), **backward.workspace(p)}, partial(backward_steps, p, results, configs)
    yield Choice("sm90", configs, reason, steps, workspace, maps=maps)


def thirds_configs(D: int, Dv: int, options: Sequence[str]) -> tuple[tuple[AnyDqConfig, AnyDkvConfig], str]:
    """Tiles for dq and for dk and dv of heads of these widths, in whole boxes: of 64 columns as many keys, and queries,
    as registers are left for; of more as there is room for, or as divide a block mask's tiles where there is one.

    ms on an H200, graphs in turns, S=4096, four batches of 16 heads, full and causal: in turns and with 48 queries 9.12
    and 4.87, not in turns 9.04 and 4.83; in turns and with 64 queries 8.80 and 4.65, of which `overlap` is 0.25 and
    nothing, and costs registers that ranges of keys need; 32 queries 9.88 and 5.13. D=128, on an H100, 19.2 and 9.4; a
    draft with 64 queries, Q in one stage, took 1.03 of the time of one with these tiles.
    """
    heavy = [name for name in options if name not in (*LIGHT_OPTIONS, BLOCK_MASK)]
    keys, queries = (32, 16 if are_many(heavy) else 32) if heavy else (64, 64)
    dq: AnyDqConfig = DqConfig(2, keys, turns=False, thirds=True)
    dkv: AnyDkvConfig = DkvConfig(2, queries, overlap=not options or queries < 64, thirds=True)
    told = ", options need registers" if heavy else ""
    if max(D, Dv) > NARROW:
        keys = queries = 32 if BLOCK_MASK in options else 48
        dq, dkv, told = DqThirdsConfig(keys), DkvThirdsConfig(queries), ""
    return (dq, dkv), (
        f"dq: {dq.block_q} queries by {keys} keys; dk and dv: {dkv.block_kv} keys by {queries} queries; in three parts "
        f"each{told}"
    )


def _maps(problem: Problem, kernel: str, queries: int, keys: int) -> dict[str, Mapped]:
    return thirds_maps(problem, {"q": queries, "do": queries, "k": keys, "v": keys}, f"{kernel}_")


def backward_steps(
    problem: Problem, results: Mapping[str, ArrayMeta], configs: backward.BackwardConfigs
) -> Sequence[Step]:
    return [*thirds_steps(problem, SPLIT), *backward.backward_steps(problem, results, configs)]
