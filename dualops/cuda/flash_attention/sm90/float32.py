"""Attention of float32 on Hopper, forward and gradient: which problems the rung takes, its Configs, launches and maps.

Each number is three of bfloat16 (`tile.split_bf16x3`), and each product six. The error is float32's own, and the speed
a sixth of that of 16 bits. A launch (`to_bf16x3`) writes the parts of q, k, v and do side by side, in memory of the
plan, one and a half times their own: a row has all upper parts, in whole boxes, then the middle and the lower ones. So
it is loaded and multiplied like any row of 16 bits, three times as wide, and V is read by columns, which tf32
tensor cores can't do. The kernels are those of 16 bits (`forward`, `dq`, `dkv`). The gradient of heads wider than 64
has its own (`build_dq_split_f32`, `build_dkv_split`): two warpgroups share the work for a tile, as results and the
sums to add take the registers of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ....spec import ArrayMeta, Problem
from ...launch.device import Device
from ...launch.plans import Choice
from ...launch.step import Step
from .. import simt
from ..arguments import has_usual_scale, is_varlen, variant
from ..options import having
from . import backward, forward_steps as kernel_steps
from .arguments import lines_of
from .config import BLOCK_MASK, LIGHT_OPTIONS, MOST_BYTES, SLACK, Sm90Config, are_many, widths
from .dkv_config import AnyDkvConfig, DkvApartConfig, DkvConfig
from .dq_config import AnyDqConfig, DqConfig, DqThirdsConfig
from .schedule import counter_of, is_static
from .to_bf16x3 import thirds_maps, thirds_of, thirds_steps

SPLIT = ("q", "k", "v")
LEAST_QUERIES = 65  # for which copies of K and V pay; varlen has no limit, as some sequences may be longer
MOST_WIDTH = 128  # of a head
KEYS = (64, 32, 16)  # of a tile


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for attention, best first."""
    p = problem
    if p.dtype != "float32" or not device.has_wgmma or max(p.D, p.Dv) > MOST_WIDTH or not has_usual_scale(p):
        return
    if not results["o"].size or not p.Sk or (p.Sq < LEAST_QUERIES and not is_varlen(p)):
        return
    copies, options = thirds_of(p, SPLIT), having(p).names
    D, Dv = widths(p)
    for config, reason in thirds_configs(D, Dv, options):
        if config.shared_bytes(D, Dv) + SLACK <= device.shared_memory_per_block:
            steps = partial(forward_steps, p, results, config)
            workspace = copies | counter_of(p, is_static(config, variant(p)))
            maps = thirds_maps(p, {"q": config.block_q, "k": config.block_kv, "v": config.block_kv})
            yield Choice("sm90", config, reason, steps, workspace, maps=maps)


def thirds_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[Sm90Config, str]]:
    """Yield tiles for heads of these widths, in whole boxes: as many keys as shared memory and registers have room for;
    none with many options and heads wider than 64.

    ms on an H200, graphs in turns, full and causal: S=4096 D=64, four batches of 16 heads, 2.33 and 1.33; not in turns
    2.46 and 1.40, 96 keys 2.59 and 1.54, 32 keys 3.17 and 1.86. S=2048 D=128, two of them, 0.71 and 0.43; in turns 0.74
    and 0.45, 48 keys in one stage 0.90 and 0.51.
    """
    heavy, narrow = [name for name in options if name not in (*LIGHT_OPTIONS, BLOCK_MASK)], max(D, Dv) <= 64
    if are_many(heavy) and not narrow:
        return
    most = KEYS[1 if heavy else 0] if not are_many(heavy) and narrow else KEYS[2 if heavy else 1]
    for block_kv in KEYS:
        config = Sm90Config(2, block_kv, turns=narrow and not heavy, q_stages=1, thirds=True)
        if block_kv <= most and config.shared_bytes(D, Dv) <= MOST_BYTES:
            note = ", options need registers" if heavy else ""
            yield config, f"{config.block_q} queries by {block_kv} keys, in three parts each{note}"
            return


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config) -> Sequence[Step]:
    return [*thirds_steps(problem, SPLIT), *kernel_steps(problem, results, config)]


GRADIENT_SPLIT = (*SPLIT, "do")
LEAST_KEYS = 65
NARROW = 64  # of a head


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for the gradient, best first."""
    p = problem
    if p.dtype != "float32" or not device.has_wgmma or max(p.D, p.Dv) > MOST_WIDTH or not has_usual_scale(p):
        return
    if not results["dq"].size or not p.Sk or (not is_varlen(p) and (p.Sq < LEAST_QUERIES or p.Sk < LEAST_KEYS)):
        return
    D, Dv = widths(p)
    (dq, dkv), reason = gradient_configs(D, Dv, having(p).names)
    if max(dq.shared_bytes(D, Dv) + SLACK, dkv.shared_bytes(D, Dv) + dkv.slack) > device.shared_memory_per_block:
        return
    others, _ = next(simt.backward_configs(p))
    configs = backward.BackwardConfigs(dq, dkv, others)
    maps = thirds_maps(p, lines_of(dq), "dq_") | thirds_maps(p, lines_of(dkv), "dkv_")
    workspace = {**thirds_of(p, GRADIENT_SPLIT), **backward.workspace(p)}
    steps = partial(backward_steps, p, results, configs)
    yield Choice("sm90", configs, reason, steps, workspace, maps=maps)


def gradient_configs(D: int, Dv: int, options: Sequence[str]) -> tuple[tuple[AnyDqConfig, AnyDkvConfig], str]:
    """Return tiles for dq and for dk and dv of heads of these widths, in whole boxes, and a description: of 64 columns
    as many keys, and queries, as there are registers for; of more, as fit in shared memory, or as divide a block mask's
    tiles.

    ms on an H200, graphs in turns, S=4096, four batches of 16 heads, full and causal: in turns and with 48 queries 9.12
    and 4.87, not in turns 9.04 and 4.83; in turns and with 64 queries 8.80 and 4.65, of which `overlap` is 0.25 and
    nothing, and takes registers that ranges of keys need; 32 queries 9.88 and 5.13. D=128, on an H100, 19.2 and 9.4; a
    draft with 64 queries, Q in one stage, took 1.03 of the time of one with these tiles.
    """
    heavy = [name for name in options if name not in (*LIGHT_OPTIONS, BLOCK_MASK)]
    keys, queries = (32, 16 if are_many(heavy) else 32) if heavy else (64, 64)
    dq: AnyDqConfig = DqConfig(2, keys, turns=False, thirds=True)
    dkv: AnyDkvConfig = DkvConfig(2, queries, overlap=not options or queries < 64, thirds=True)
    note = ", options need registers" if heavy else ""
    if max(D, Dv) > NARROW:
        keys = queries = 32 if BLOCK_MASK in options else 48
        dq, note = DqThirdsConfig(keys), ""
        dkv = DkvApartConfig(queries, 2, 1, overlap=False, exact=True, thirds=True)
    return (dq, dkv), (
        f"dq: {dq.block_q} queries by {keys} keys; dk and dv: {dkv.block_kv} keys by {queries} queries; in three parts "
        f"each{note}"
    )


def backward_steps(
    problem: Problem, results: Mapping[str, ArrayMeta], configs: backward.BackwardConfigs
) -> Sequence[Step]:
    return [*thirds_steps(problem, GRADIENT_SPLIT), *backward.backward_steps(problem, results, configs)]
