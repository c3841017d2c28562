"""Attention's gradient on Hopper: which problems the rung takes, its launches and their tensor maps.

dq.py                     dq, and dq of float32's wide heads
dkv.py, dkv_split.py      dk and dv; those of wide heads;  dkv_config.py: their tiles;  loads.py: what producers load
fused.py, fused_launch.py dq, dk and dv in one kernel;  dq_sums.py: how it adds dq, and rows of dq from the sums
dbias.py                  dbias;  bias_tile_scheduler.py: which scores a tile of the bias was added to;
                          dbias_sums.py: dS, and how its sums are stored
All else, such as delta, is the simt rung's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ....spec import ArrayMeta, Problem
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.plans import Choice
from ...launch.step import Step
from ...launch.views import boxed, how_stored
from ...tile.warpgroup import INSTRUCTION_TYPES
from .. import simt
from ..arguments import Served, fewest_queries, gradient_inputs_of, has_usual_scale, is_varlen, serving, sizes, variant
from ..block_masks import sizes_by_keys, steps_by_keys, workspace_by_keys
from ..options import having
from ..tile_scheduler import packed_count, section_of, section_of_queries, tiled_work
from .arguments import gradient_maps, keys_to, maps_of, queries_to
from .bias import boxed_bias
from .config import SLACK, AnyDqConfig, DqThirdsConfig, dq_configs, padded
from .dbias import DbiasConfig, dbias_choice, dbias_maps, dbias_steps, dbias_workspace
from .dkv import build_dkv
from .dkv_config import AnyDkvConfig, DkvConfig, DkvThirdsConfig, dkv_configs
from .dkv_split import build_dkv_split, build_dkv_split_f32
from .dq import build_dq, build_dq_split_f32
from .fused_launch import FusedConfigs, fused_choices, fused_steps, most_by_two_kernels
from .schedule import after_counter

RESULTS = ("dk", "dv")
# A grid for the longest sequence is used if it has at most this many times the blocks of a grid for all tokens. The
# latter takes 0.42 of the gradient's time for a sequence of 8192 among 960 of 128, but 1.31 for 1024 of 128, and 1.11
# for 512 of up to 512 (H200, 2026-11-27)
MOST_OF_LONGEST = 2


def dkv_choices(
    problem: Problem, results: Mapping[str, ArrayMeta], device: Device
) -> Iterator[tuple[AnyDkvConfig, str]]:
    """Yield Configs for dk and dv, best first, with a description. delta is simt's."""
    p, varlen = problem, is_varlen(problem)
    if p.dtype not in INSTRUCTION_TYPES or not device.has_wgmma or not has_usual_scale(p) or not results["dk"].size:
        return
    if not p.arrays["q"].size or any(boxed(p.arrays, name, varlen) is None for name in ("q", "do", "k", "v")):
        return
    D, Dv, options = padded(int(p.D)), padded(int(p.Dv)), [option.name for option, _ in having(p).variants]
    for config, reason in dkv_configs(D, Dv, options, boxed_bias(p) is not None):
        if config.shared_bytes(D, Dv) + config.slack <= device.shared_memory_per_block:
            yield config, reason


def dkv_step(problem: Problem, metas: Mapping[str, ArrayMeta], config: AnyDkvConfig) -> Step:
    """Return the launch, after delta's. metas: of the problem's arrays, the results and delta."""
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


LOADED = ("q", "k", "v", "do")
MOST_WIDTH = 256  # of a head


class ByLength(NamedTuple):
    """Configs for sequences of varlen, chosen by length in `by_length`."""

    fused: FusedConfigs
    few: BackwardConfigs  # for sequences with few queries


class BackwardConfigs(NamedTuple):
    """A Config for each kernel. dbias is None if there is none, or if simt computes it."""

    dq: AnyDqConfig
    dkv: AnyDkvConfig
    others: simt.BackwardConfigs
    dbias: DbiasConfig | None = None


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for the gradient, best first."""
    for choice in fused_choices(problem, results, device):
        mixed = is_varlen(problem) and fewest_queries(problem) <= most_by_two_kernels(choice.config.fused)
        two = next(two_kernels(problem, results, device), None) if mixed else None
        yield choice if two is None else by_length(problem, results, choice, two)
    yield from two_kernels(problem, results, device)


def two_kernels(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for two kernels, of dq and of dk and dv, best first."""
    p, varlen, room = problem, is_varlen(problem), device.shared_memory_per_block
    if (
        p.dtype not in INSTRUCTION_TYPES
        or not device.has_wgmma
        or max(p.D, p.Dv) > MOST_WIDTH
        or not has_usual_scale(p)
    ):
        return
    if not results["dq"].size or any(boxed(p.arrays, name, varlen) is None for name in LOADED):
        return
    D, Dv = padded(int(p.D)), padded(int(p.Dv))  # numbers, as a kernel is built for them
    names, in_boxes = [option.name for option, _ in having(p).variants], boxed_bias(p) is not None
    for config, reason in dq_configs(D, Dv, names, in_boxes, varlen):
        if config.shared_bytes(D, Dv) + SLACK > room:
            continue
        for dkv_config, dkv_reason in dkv_choices(p, results, device):
            others, _ = next(simt.backward_configs(p))
            dbias, of_dbias = dbias_choice(p, results, device)
            configs = BackwardConfigs(config, dkv_config, others, dbias)
            found, metas = workspace(p), {**p.arrays, **results}
            maps = gradient_maps(p, metas, config, "dq", ("dq",)) | gradient_maps(p, metas, dkv_config, "dkv", RESULTS)
            if dbias is not None:
                found, maps = found | dbias_workspace(p, dbias), maps | dbias_maps(p, dbias)
            steps = partial(backward_steps, p, results, configs)
            yield Choice("sm90", configs, f"dq: {reason}; dk and dv: {dkv_reason}{of_dbias}", steps, found, maps=maps)


def workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return delta, the counter of drawn work items, and a transposed block mask."""
    counter = ArrayMeta((1,), "int64", (1,), problem.arrays["q"].device, 0)
    return {**simt.backward_workspace(problem), "counter": counter, **workspace_by_keys(problem)}


def backward_steps(problem: Problem, results: Mapping[str, ArrayMeta], configs: BackwardConfigs) -> Sequence[Step]:
    elsewhere = ("dq", "dk", "dbias") if configs.dbias else ("dq", "dk")
    delta, *others = simt.backward_steps(problem, results, configs.others, elsewhere)
    metas = {**problem.arrays, **results, **workspace(problem)}
    of_dkv = [*steps_by_keys(problem), dkv_step(problem, metas, configs.dkv)]
    steps = [delta, *dq_steps(problem, metas, configs.dq), *of_dkv, *others]
    return [*steps, *dbias_steps(problem, results, configs.dbias)] if configs.dbias else steps


def by_length(problem: Problem, results: Mapping[str, ArrayMeta], fused: Choice, two: Choice) -> Choice:
    """Return the choice for a varlen call with short and long sequences: those with few queries use two kernels, others
    one.
    """
    configs, most = ByLength(fused.config, two.config), most_by_two_kernels(fused.config.fused)
    few, longer = (serving(problem, Served(which, most)) for which in (1, 0))

    def steps() -> Sequence[Step]:
        metas = {**problem.arrays, **results, **two.workspace}
        delta, *rest = fused_steps(longer, results, configs.fused)
        of_few = [*dq_steps(few, metas, configs.few.dq), dkv_step(few, metas, configs.few.dkv)]
        return [delta, *of_few, *rest]

    why = f"{fused.reason}; of sequences to {most} queries {two.reason}"
    return Choice("sm90", configs, why, steps, {**fused.workspace, **two.workspace}, maps={**fused.maps, **two.maps})


def dq_steps(problem: Problem, metas: Mapping[str, ArrayMeta], config: AnyDqConfig) -> Sequence[Step]:
    """Return the launches, after delta's. metas: of the problem's arrays, the results and workspaces."""
    p, varlen, heads = problem, is_varlen(problem), problem.B * problem.H
    stored, bias_maps = "", ()
    if isinstance(config, DqThirdsConfig):
        build = build_dq_split_f32(config, variant(p))
    else:
        stored = "" if config.thirds else how_stored(metas, "dq", varlen)
        bias_maps = ((("dq_bias_map",) if config.bias_stages else ()),)
        build = build_dq(config, variant(p), stored)
    to, x = queries_to(p, metas, stored, "dq"), gradient_inputs_of(metas, is_varlen(p))
    args = (maps_of("dq"), *bias_maps, "counter", to, x, tiled_work(p, section_of(p), sizes(p)))
    blocks, shared_bytes = heads * cdiv(p.Sq, config.block_q), config.shared_bytes(padded(p.D), padded(p.Dv))
    step = Step(build, (blocks,), args, shared_bytes, resident=True)
    return after_counter(step, alike=False)
