"""Attention on Hopper: which problems the rung takes, its Configs, its launches and their tensor maps.

forward.py   the kernel
walk.py      which piece of work comes next (alike.py: whether it is known beforehand);  output.py: how o gets to memory
queries.py   what the rows of a tile of queries are
slices.py    V's columns in slices, where they are many
splits.py    how keys are split among blocks where queries are few;  merge.py: what becomes of the parts
config.py    tiles
backward.py  the gradient
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ....spec import ArrayMeta, Problem
from ....spec.meta import Strided, contiguous_strides
from ...arrays import cdiv
from ...device import Device
from ...maps import Mapped
from ...plans import Choice
from ...step import Step
from ...tile.warpgroup import INSTRUCTION_TYPES, ROWS
from ...views import boxed, by_token, how_stored
from ..arguments import is_varlen, sizes, variant
from ..bias_tiles import bias_map, bias_operand, boxed_bias
from ..options import having
from ..walk import section_of
from .alike import after_counter, are_alike, counter_of
from .config import BOX, SLACK, Sm90Config, configs, padded, short_config
from .forward import build_forward
from .merge import WARPS, build_merge
from .queries import box_of_group
from .splits import LEAST_TILES, split_count

SHORT = 64  # queries at most, where keys are split
MOST_D, MOST_DV = 256, 512


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for attention, best first."""
    p, metas, varlen = problem, {**problem.arrays, **results}, is_varlen(problem)
    if p.dtype not in INSTRUCTION_TYPES or not device.has_wgmma or p.D > MOST_D or p.Dv > MOST_DV or not p.scale > 0:
        return
    if not results["o"].size or any(boxed(metas, name, varlen) is None for name in ("q", "k", "v")):
        return
    options = [option.name for option, _ in having(p).variants]
    for config, reason in _configs(p, options):
        if config.shared_bytes(padded(p.D), p.Dv) + SLACK <= device.shared_memory_per_block:
            steps = partial(split_steps if config.split else forward_steps, p, results, config)
            yield Choice("sm90", config, reason, steps, workspace(p, config), maps=forward_maps(p, metas, config))


def _configs(p: Problem, options: Sequence[str]) -> Iterator[tuple[Sm90Config, str]]:
    D, Dv = padded(int(p.D)), padded(int(p.Dv))  # numbers, as a kernel is built for them
    if p.Sq <= SHORT:
        config, reason = short_config(D, Dv, options, p.group)
        if p.Sk > LEAST_TILES * config.block_kv:
            yield config, reason
    yield from configs(D, Dv, options, boxed_bias(p) is not None)


def forward_maps(problem: Problem, metas: Mapping[str, ArrayMeta], config: Sm90Config) -> dict[str, Mapped]:
    """The tensor maps of the launch."""
    p, varlen = problem, is_varlen(problem)
    lines = {"q": config.block_q, "k": config.block_kv, "v": config.block_kv, "o": ROWS}
    names = ("q", "k", "v", "o") if how_stored(metas, "o", varlen) == "boxes" and not config.split else ("q", "k", "v")
    found = [boxed(metas, name, varlen) for name in names]
    maps = {
        f"{each.name}_map": Mapped(each.name, p.dtype, each.shape, each.strides, (1, 1, lines[each.name], BOX))
        for each in found
        if each
    }
    q = found[0]
    if q and config.heads > 1:
        (B, H, S, D), (batch, head, token, element) = q.shape, q.strides
        shape, strides = (B, H // config.heads, S, config.heads, D), (batch, head * config.heads, token, head, element)
        maps["q_map"] = Mapped("q", p.dtype, shape, strides, box_of_group(config))
    if config.bias_stages:
        maps["bias_map"] = bias_map(p, bias_operand(ROWS, config.block_kv))
    return maps


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config) -> Sequence[Step]:
    p, metas, varlen = problem, {**problem.arrays, **results}, is_varlen(problem)
    stored, heads = how_stored(metas, "o", varlen), p.B * p.H
    found = variant(p)
    build, alike = build_forward(config, found, p.return_lse, stored), are_alike(config, found)
    maps = ("q_map", "k_map", "v_map", "o_map" if stored == "boxes" else 0)
    arrays = (by_token(metas, name, varlen) for name in ("o", "lse", "q", "k", "v"))
    bias_maps = ("bias_map",) if config.bias_stages else ()
    args = (*maps, bias_maps, "counter", heads, section_of(p, alike), *arrays, *sizes(p))
    blocks = heads * cdiv(p.Sq, config.block_q) * config.slices
    step = Step(build, (blocks,), args, config.shared_bytes(padded(p.D), p.Dv), resident=True)
    return after_counter(step, alike)


def split_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config) -> Sequence[Step]:
    """Few queries: what each split of the keys finds, and all of it merged."""
    p, metas, varlen = problem, {**problem.arrays, **results}, is_varlen(problem)
    build, found = build_forward(config, variant(p), True, ""), workspace(p, config)
    parts = tuple(_by_split(name, found[name].strides, varlen) for name in ("o_parts", "lse_parts"))
    arrays, heads = (by_token(metas, name, varlen) for name in ("q", "k", "v")), p.B * p.H
    args = ("q_map", "k_map", "v_map", 0, (), "counter", heads, 0, *parts, *arrays, *sizes(p))
    blocks = heads // config.heads * cdiv(p.Sq, config.queries) * split_count(p.Sk, config.block_kv) * config.slices
    results_by_token = (by_token(metas, name, varlen) for name in ("o", "lse"))
    merge = build_merge(variant(p), config.block_kv, p.return_lse)
    rows = heads * p.Sq
    step = Step(build, (blocks,), args, config.shared_bytes(padded(p.D), p.Dv), resident=True)
    return [
        *after_counter(step, alike=False),
        Step(merge, (cdiv(rows, WARPS),), (*results_by_token, *parts, rows, *sizes(p))),
    ]


def _by_split(name: str, strides: tuple[int, ...], varlen: bool) -> Strided:
    """What splits find, along split, batch, head and token."""
    split, batch, head, token = strides[:4]
    return Strided(name, (split, 0 if varlen else batch, head, token))


def workspace(problem: Problem, config: Sm90Config) -> dict[str, ArrayMeta]:
    """Of pieces of work that are not alike, how many were drawn; and what splits find, as float32."""
    p, q = problem, problem.arrays["q"]
    made = counter_of(p, are_alike(config, variant(p)))
    if config.split:
        rows = (1, p.H, q.shape[0]) if is_varlen(p) else (p.B, p.H, p.Sq)
        for name, width in (("o_parts", (p.Dv,)), ("lse_parts", ())):
            shape = (split_count(p.Sk, config.block_kv), *rows, *width)
            made[name] = ArrayMeta(shape, "float32", contiguous_strides(shape), q.device, 0)
    return made
