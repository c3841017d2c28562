"""dk and dv on Hopper: which problems the kernel takes, its launch and its tensor maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ....spec import ArrayMeta, Problem
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.maps import Mapped
from ...launch.step import Step
from ...launch.views import boxed, how_stored
from ...tile.warpgroup import INSTRUCTION_TYPES, ROWS
from ..arguments import gradient_inputs_of, has_usual_scale, is_varlen, variant
from ..bias_tiles import bias_map, boxed_bias
from ..block_mask_transpose import sizes_by_keys
from ..options import having
from ..tile_scheduler import section_of_queries
from ..varlen_tiles import packed_count
from .arguments import keys_to, maps_of, tiled_work
from .config import BOX, padded
from .dkv import build_dkv
from .dkv_config import AnyDkvConfig, DkvConfig, DkvThirdsConfig, dkv_configs
from .dkv_split import build_dkv_split
from .dkv_split_f32 import build_dkv_split_f32

RESULTS = ("dk", "dv")
# blocks for as many keys as the longest sequence has, to those for all tokens: with more, the latter pay. One of 8192
# among 960 of 128 takes 0.42 of the gradient's time by them, but 1024 of 128 1.31, 512 of up to 512 1.11 (H200,
# 2026-11-27)
MOST_OF_LONGEST = 2


def dkv_choices(
    problem: Problem, results: Mapping[str, ArrayMeta], device: Device
) -> Iterator[tuple[AnyDkvConfig, str]]:
    """Configs that a kernel can do a problem with, best first, and what they are. delta is that of simt."""
    p, varlen = problem, is_varlen(problem)
    if p.dtype not in INSTRUCTION_TYPES or not device.has_wgmma or not has_usual_scale(p) or not results["dk"].size:
        return
    if not p.arrays["q"].size or any(boxed(p.arrays, name, varlen) is None for name in ("q", "do", "k", "v")):
        return
    D, Dv, options = padded(int(p.D)), padded(int(p.Dv)), [option.name for option, _ in having(p).variants]
    for config, reason in dkv_configs(D, Dv, options, boxed_bias(p) is not None):
        if config.shared_bytes(D, Dv) + config.slack <= device.shared_memory_per_block:
            yield config, reason


def dkv_maps(problem: Problem, metas: Mapping[str, ArrayMeta], config: AnyDkvConfig) -> dict[str, Mapped]:
    """The tensor maps of the launch, by names that are its own. metas: of the problem's arrays and the results."""
    p, varlen = problem, is_varlen(problem)
    lines = {"q": config.block_q, "do": config.block_q, "k": config.block_kv, "v": config.block_kv}
    lines |= {name: ROWS for name in RESULTS if how_stored(metas, name, varlen) == "boxes"}
    found = [each for name in lines if (each := boxed(metas, name, varlen))]
    maps = {
        f"dkv_{each.name}_map": Mapped(each.name, p.dtype, each.shape, each.strides, (1, 1, lines[each.name], BOX))
        for each in found
    }
    if isinstance(config, DkvConfig) and config.bias:
        maps["dkv_bias_map"] = bias_map(p, config.bias)
    return maps


def dkv_step(problem: Problem, metas: Mapping[str, ArrayMeta], config: AnyDkvConfig) -> Step:
    """The launch, after delta's. metas: of the problem's arrays, the results and delta."""
    p, varlen, heads_kv = problem, is_varlen(problem), problem.H // problem.group
    tiles, packed = p.B * cdiv(p.Sk, config.block_kv), False
    if varlen:
        of_tokens = packed_count(p.packed_k, config.block_kv, p.B)
        packed = tiles > MOST_OF_LONGEST * of_tokens
        tiles = of_tokens if packed else tiles
    in_parts = isinstance(config, DkvThirdsConfig) or (isinstance(config, DkvConfig) and config.thirds)
    stored = {name: "" if in_parts else how_stored(metas, name, varlen) for name in RESULTS}
    bias_maps: tuple[Any, ...] = ()
    if isinstance(config, DkvConfig):
        build = build_dkv(config, variant(p), stored["dk"], stored["dv"], packed)
        bias_maps = ((("dkv_bias_map",) if config.bias else ()),)
    elif isinstance(config, DkvThirdsConfig):
        build = build_dkv_split_f32(config, variant(p), packed)
    else:
        build = build_dkv_split(config, variant(p), stored["dk"], stored["dv"], packed)
    section = section_of_queries(p, packed=packed)
    to, x = keys_to(p, metas, stored, "dkv"), gradient_inputs_of(metas, is_varlen(p))
    args = (maps_of("dkv"), *bias_maps, to, x, tiled_work(p, section, sizes_by_keys(p)))
    return Step(build, (heads_kv * tiles,), args, config.shared_bytes(padded(p.D), padded(p.Dv)))
