"""Attention on Hopper: which problems the rung takes, its launches and their tensor maps.

forward.py          the kernel;  config.py: its tiles;  output.py: how o is stored;  products.py: products with Q
schedule.py         which work item a block takes next, and when a warpgroup starts its products
loads.py            what producers load, and the barriers that report it
visible_tiles.py    what the rows of a tile of queries are, and which tiles of keys or of queries an item visits
tile_scores.py      the scores of a tile: what options read before there are any, and how products become scores
split_kv.py         how keys are split if there are few queries, and how the splits are merged
bias.py             the tiles of a bias
float32.py          float32, forward and gradient;  to_bf16x3.py: the launch that splits it
backward.py         the gradient
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ....spec import ArrayMeta, Problem
from ....spec.meta import Strided, contiguous_strides
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.plans import Choice
from ...launch.step import Step
from ...launch.tensor_map import Mapped
from ...launch.views import boxed, by_token, how_stored
from ...tile.warpgroup import ROWS
from ..arguments import Inputs, Served, fewest_queries, is_varlen, serving, sizes, variant
from ..options import having
from ..tile_scheduler import section_of, tiled_work
from .arguments import ForwardMaps, OutputTo, boxed_maps, serves
from .bias import bias_map, boxed_bias
from .config import SLACK, Sm90Config, configs, padded, short_config, widths
from .forward import build_forward
from .schedule import after_counter, cleared, counter_of, is_static
from .split_kv import LEAST_TILES, MOST_BLOCKS, WARPS, build_merge, kept_shape, most_splits
from .visible_tiles import box_of_group

SHORT = 64  # keys are split only up to this many queries
MOST_D, MOST_DV = 256, 512


class ByLength(NamedTuple):
    """Configs for sequences of varlen, chosen by length in `by_length`."""

    others: Sm90Config
    few: Sm90Config  # for sequences with few queries and many keys


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for attention, best first."""
    p, metas, varlen = problem, {**problem.arrays, **results}, is_varlen(problem)
    if p.D > MOST_D or p.Dv > MOST_DV or not results["o"].size or not serves(p, device, metas, Inputs._fields):
        return
    options, room = having(p).names, device.shared_memory_per_block - SLACK
    D, Dv = widths(p)
    short = _short_config(p, options, room)
    if short and not varlen:
        yield _choice(p, results, *short)
    for config, reason in configs(D, Dv, options, boxed_bias(p) is not None):
        if config.shared_bytes(D, Dv) <= room:
            choice = _choice(p, results, config, reason)
            yield by_length(p, results, choice, *short) if short and varlen else choice


def _short_config(p: Problem, options: Sequence[str], room: int) -> tuple[Sm90Config, str] | None:
    """Return tiles that split keys, if sequences have few queries."""
    if (fewest_queries(p) if is_varlen(p) else p.Sq) > SHORT:
        return None
    D, Dv = widths(p)
    config, reason = short_config(D, Dv, options, p.group)
    return (config, reason) if p.Sk > LEAST_TILES * config.block_kv and config.shared_bytes(D, Dv) <= room else None


def _choice(p: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config, reason: str) -> Choice:
    steps = partial(forward_steps, p, results, config)
    maps = forward_maps(p, {**p.arrays, **results}, config)
    return Choice("sm90", config, reason, steps, workspace(p, config), maps=maps)


def by_length(
    problem: Problem, results: Mapping[str, ArrayMeta], others: Choice, short: Sm90Config, reason: str
) -> Choice:
    """Return the choice for a varlen call with short and long sequences: each is computed as it would be alone.

    Sequences with few queries, and more keys than one split has, use splits: of several blocks if all sequences have
    few queries, otherwise of one block, in turn. reason: of `short`.
    """
    p, metas, least = problem, {**problem.arrays, **results}, LEAST_TILES * short.block_kv + 1
    few, rest = (serving(p, Served(which, SHORT, least)) for which in (1, 0))
    config = short if p.Sq <= SHORT else replace(short, serial=True)

    def steps() -> Sequence[Step]:
        return [cleared(2), forward_step(rest, results, others.config), *split_launches(few, results, config)]

    found, maps = {**others.workspace, **workspace(p, config)}, {**others.maps, **forward_maps(p, metas, config)}
    why = f"{others.reason}; of sequences to {SHORT} queries with {least} keys or more: {reason}"
    why += ", a row's splits for one block" * config.serial
    return Choice("sm90", ByLength(others.config, config), why, steps, found, maps=maps)


def forward_maps(problem: Problem, metas: Mapping[str, ArrayMeta], config: Sm90Config) -> dict[str, Mapped]:
    """Return the tensor maps of the launch. Those of a Config that splits keys have their own names."""
    p, varlen = problem, is_varlen(problem)
    lines = {"q": config.block_q, "k": config.block_kv, "v": config.block_kv}
    if how_stored(metas, "o", varlen) == "boxes" and not config.split:
        lines["o"] = ROWS
    prefix = "split_" if config.split else ""
    maps, q = boxed_maps(p, metas, lines, prefix), boxed(metas, "q", varlen)
    if q and config.heads > 1:
        (B, H, S, D), (batch, head, token, element) = q.shape, q.strides
        shape, strides = (B, H // config.heads, S, config.heads, D), (batch, head * config.heads, token, head, element)
        maps[f"{prefix}q_map"] = Mapped("q", p.dtype, shape, strides, box_of_group(config))
    if config.bias:
        maps["bias_map"] = bias_map(p, config.bias)
    return maps


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config) -> Sequence[Step]:
    if config.split:
        return [cleared(1), *split_launches(problem, results, config)]
    return after_counter(forward_step(problem, results, config), is_static(config, variant(problem)))


def forward_step(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config) -> Step:
    p, metas, varlen = problem, {**problem.arrays, **results}, is_varlen(problem)
    stored, heads = "" if config.thirds else how_stored(metas, "o", varlen), p.B * p.H
    found = variant(p)
    build, static = build_forward(config, found, p.return_lse, stored), is_static(config, found)
    o, lse, *arrays = (by_token(metas, name, varlen) for name in ("o", "lse", *Inputs._fields))
    to, maps = OutputTo("o_map" if stored == "boxes" else 0, o, lse, ()), ForwardMaps("q_map", "k_map", "v_map")
    bias_maps = ("bias_map",) if config.bias_stages else ()
    args = (maps, bias_maps, "counter", to, Inputs(*arrays), tiled_work(p, section_of(p, static), sizes(p)))
    blocks = heads * cdiv(p.Sq, config.block_q) * config.slices
    return Step(build, (blocks,), args, config.shared_bytes(padded(p.D), p.Dv), resident=True)


def split_launches(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config) -> Sequence[Step]:
    """Return the launches for few queries: results of each split, then the merge; or both in the same blocks."""
    p, metas, varlen, serial = problem, {**problem.arrays, **results}, is_varlen(problem), config.serial
    maps, heads = ForwardMaps("split_q_map", "split_k_map", "split_v_map"), p.B * p.H
    o, lse, *arrays = (by_token(metas, name, varlen) for name in ("o", "lse", *Inputs._fields))
    x, sized = Inputs(*arrays), tiled_work(p, 0, sizes(p))
    blocks = heads // config.heads * cdiv(p.Sq, config.queries) * config.slices
    build = build_forward(config, variant(p), p.return_lse or not serial, "")
    shared = config.shared_bytes(padded(p.D), p.Dv)
    if serial:
        args = (maps, (), "counter", OutputTo(0, o, lse, ("kept",)), x, sized)
        return [Step(build, (min(blocks, MOST_BLOCKS),), args, shared, resident=True)]
    found, count = workspace(p, config), most_splits(p.Sk, config.block_kv)
    o_parts, lse_parts = (_by_split(name, found[name].strides, varlen) for name in ("o_parts", "lse_parts"))
    args = (maps, (), "counter", OutputTo(0, o_parts, lse_parts, ()), x, sized)
    step = Step(build, (blocks * count,), args, shared, resident=True)
    merge, rows = build_merge(variant(p), config.block_kv, p.return_lse), heads * p.Sq
    return [step, Step(merge, (cdiv(rows, WARPS),), (o, lse, o_parts, lse_parts, rows, sized))]


def _by_split(name: str, strides: tuple[int, ...], varlen: bool) -> Strided:
    """Return an array of the splits' results, along split, batch, head and token."""
    split, batch, head, token = strides[:4]
    return Strided(name, (split, 0 if varlen else batch, head, token))


def workspace(problem: Problem, config: Sm90Config) -> dict[str, ArrayMeta]:
    """Return the counter of drawn work items, if the schedule is not static; and in float32 the results of splits, with
    lse in two parts, or what a block keeps if it has all splits.
    """
    p, q = problem, problem.arrays["q"]
    made = counter_of(p, is_static(config, variant(p)))
    if config.serial:
        shape = kept_shape(config, p.Dv)
        made["kept"] = ArrayMeta(shape, "float32", contiguous_strides(shape), q.device, 0)
    elif config.split:
        rows = (1, p.H, q.shape[0]) if is_varlen(p) else (p.B, p.H, p.Sq)
        for name, width in (("o_parts", (p.Dv,)), ("lse_parts", (2,))):
            shape = (most_splits(p.Sk, config.block_kv), *rows, *width)
            made[name] = ArrayMeta(shape, "float32", contiguous_strides(shape), q.device, 0)
    return made
