"""Attention of float32 on Hopper: which problems the rung takes, its Configs, launches and tensor maps.

Each number is three of bfloat16 (`tile.split_bf16x3`), and each product six: the error is float32's own, the speed a
sixth of 16 bits' and not simt's. The kernel is that of 16 bits (`forward`), whose tiles of Q, K and V are three times
as wide; a pass before it makes copies of these (`to_bf16x3`), for which the plan has memory, one and a half times their
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ....spec import ArrayMeta, Problem
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.plans import Choice
from ...launch.step import Step
from ...launch.views import by_token
from ..arguments import Inputs, has_usual_scale, is_varlen, sizes, variant
from ..options import having
from ..tile_scheduler import section_of
from .arguments import ForwardMaps, OutputTo, tiled_work
from .config import BLOCK_MASK, LIGHT_OPTIONS, MOST_BYTES, SLACK, Sm90Config, are_many, padded
from .forward import build_forward
from .static_schedule import after_counter, counter_of, is_static
from .to_bf16x3 import thirds_maps, thirds_of, thirds_steps

SPLIT = ("q", "k", "v")
LEAST_QUERIES = 65  # which copies of K and V are worth their while for; of varlen any, as others may be longer
MOST_WIDTH = 128  # of a head
KEYS = (64, 32, 16)  # of a tile


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for attention, best first."""
    p = problem
    if p.dtype != "float32" or not device.has_wgmma or max(p.D, p.Dv) > MOST_WIDTH or not has_usual_scale(p):
        return
    if not results["o"].size or not p.Sk or (p.Sq < LEAST_QUERIES and not is_varlen(p)):
        return
    copies, options = thirds_of(p, SPLIT), [option.name for option, _ in having(p).variants]
    D, Dv = padded(int(p.D)), padded(int(p.Dv))  # numbers, as a kernel is built for them
    for config, reason in thirds_configs(D, Dv, options):
        if config.shared_bytes(D, Dv) + SLACK <= device.shared_memory_per_block:
            steps = partial(forward_steps, p, results, config)
            workspace = copies | counter_of(p, is_static(config, variant(p)))
            maps = thirds_maps(p, {"q": config.block_q, "k": config.block_kv, "v": config.block_kv})
            yield Choice("sm90", config, reason, steps, workspace, maps=maps)


def thirds_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[Sm90Config, str]]:
    """Tiles for heads of these widths, in whole boxes: as many keys as there is room for, and registers; none beside
    many options where heads are wider than 64.

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
            told = ", options need registers" if heavy else ""
            yield config, f"{config.block_q} queries by {block_kv} keys, in three parts each{told}"
            return


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config) -> Sequence[Step]:
    p, metas, varlen, heads = problem, {**problem.arrays, **results}, is_varlen(problem), problem.B * problem.H
    found = variant(p)
    build, alike = build_forward(config, found, p.return_lse, ""), is_static(config, found)
    o, lse, *arrays = (by_token(metas, name, varlen) for name in ("o", "lse", *SPLIT))
    maps, to = ForwardMaps("q_map", "k_map", "v_map"), OutputTo(0, o, lse, ())
    args = (maps, (), "counter", to, Inputs(*arrays), tiled_work(p, section_of(p, alike), sizes(p)))
    shared_bytes = config.shared_bytes(padded(p.D), padded(p.Dv))
    step = Step(build, (heads * cdiv(p.Sq, config.block_q),), args, shared_bytes, resident=True)
    return [*thirds_steps(p, SPLIT), *after_counter(step, alike)]
