"""Attention's gradient on Hopper: which problems the rung takes, its launches and their tensor maps.

dq.py, dq_split.py    dq; that of float32's wide heads;  dq_config.py: their tiles, and dbias's
dkv.py, dkv_split.py  dk and dv; those of wide heads;  dkv_config.py: their tiles;  loads.py: what producers load
fused.py              dq, dk and dv in one kernel;  dq_sums.py: how it adds dq, and rows of dq from the sums
dbias.py              dbias;  bias_tile_scheduler.py: which scores a tile of the bias was added to;
                      dbias_sums.py: dS, and how its sums are stored
All else, such as delta, is the simt rung's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ....spec import ArrayMeta, Problem
from ....spec.meta import itemsize
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.device_words import CLEARED, build_clear
from ...launch.plans import Choice
from ...launch.step import Step
from ...launch.views import how_stored
from ...tile.warpgroup import ROWS
from .. import simt
from ..arguments import Served, fewest_queries, gradient_inputs_of, is_varlen, serving, sizes, variant
from ..block_masks import sizes_by_keys, steps_by_keys, workspace_by_keys
from ..options import having
from ..tile_scheduler import LEAST_HEADS, MOST_HEADS, packed_count, section_of, section_of_queries, tiled_work
from .arguments import Sums, gradient_maps, keys_to, maps_of, queries_to, serves
from .bias import boxed_bias
from .config import SLACK, padded, widths
from .dbias import dbias_choice, dbias_maps, dbias_steps, dbias_workspace
from .dkv import build_dkv
from .dkv_config import AnyDkvConfig, DkvConfig, FusedConfig, dkv_configs, fused_configs
from .dkv_split import build_dkv_split
from .dq import build_dq
from .dq_config import AnyDqConfig, DbiasConfig, DqThirdsConfig, dq_configs
from .dq_split import build_dq_split_f32
from .dq_sums import build_dq_convert
from .fused import build_fused
from .schedule import after_counter

# With 64 MB instead of 16 the kernel takes 1.05 of the time (full, S = 2048 and 8192), causal 1.00 and 1.02. If heads
# share a key head, less than 16 MB took up to 1.42 (S = 4096, causal; H200, 2026-11-25). Causal, from the first keys
# on, 32 MB take 0.98 of the time with 16 (S = 4096 and 8192, H100, 2026-11-26), as fewer blocks of a head wait for each
# other; from the last keys on, 16 are as fast
BYTES_IN_L2, BYTES_CAUSAL, BYTES_OF_GROUPS = 16 << 20, 32 << 20, 64 << 20
# tiles of queries of a head, or of each sequence of varlen: blocks add to each tile one after another. The number of
# heads does not matter, so that a head has the same bits alone: B = H = 1, S = 16384 takes 1.14 of the time of two
# kernels. If sequences with fewer tiles used this kernel, 32 sequences of 128 to 8192 would take 0.78 to 0.87 of the
# time of two kernels, but 512 of up to 512 1.09, with D = 64 1.15 (H100)
LEAST_TILES = 4
# queries, up to which the conversion of dq overlaps the end of the kernel: then the gradient takes 0.98 of the time at
# S = 2048, B = 8, but 1.01 at S = 8192, B = 2 (H200, 2026-11-25)
MOST_BESIDE = 4096
LOADED, ALL_RESULTS = ("q", "do", "k", "v"), ("dk", "dv", "dq")


class FusedConfigs(NamedTuple):
    """A Config for the kernel, for simt's part, and for dbias, None if that is simt's."""

    fused: FusedConfig
    others: simt.BackwardConfigs
    dbias: DbiasConfig | None = None


def fused_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for the gradient, best first."""
    p = problem
    if not _has_both(results) or not serves(p, device, p.arrays, LOADED):
        return
    (D, Dv), names = widths(p), having(p).names
    for config, reason in fused_configs(D, Dv, names, boxed_bias(p) is not None, p.group, is_varlen(p)):
        fits = config.shared_bytes(D, Dv) + config.slack <= device.shared_memory_per_block
        if fits and p.Sq > most_by_two_kernels(config):
            others, _ = next(simt.backward_configs(p))
            dbias, of_dbias = dbias_choice(p, results, device)
            configs = FusedConfigs(config, others, dbias)
            found = fused_workspace(p, config) | dbias_workspace(p, dbias)
            maps = gradient_maps(p, {**p.arrays, **results}, config, "fused", ALL_RESULTS) | dbias_maps(p, dbias)
            note = f"dq, dk and dv: {reason}, dq added in float32{of_dbias}"
            steps = partial(fused_steps, p, results, configs)
            yield Choice("sm90", configs, note, steps, found, maps=maps)


def most_by_two_kernels(config: FusedConfig) -> int:
    """Return up to how many queries of a sequence two kernels are faster."""
    return (LEAST_TILES - 1) * config.block_q


def fused_section_of(problem: Problem, config: FusedConfig) -> Any:
    """Return how many heads of keys form a section: few, so that their inputs and sums stay in L2, but enough that not
    all keys of a head run at once, each block waiting for the previous one. In a group, blocks with few tiles of each
    head would wait, head by head, for those with many. Varlen: return the queries of such heads, as sequences differ in
    length.
    """
    p = problem
    each = itemsize(p.dtype) * (p.D + p.Dv) + 4 * p.D  # Q, dO and dq of a query
    room = BYTES_CAUSAL if p.causal and not config.ascends else BYTES_IN_L2
    if p.group > 1:
        room = BYTES_OF_GROUPS
    if is_varlen(p):
        return room // each
    return min(max(LEAST_HEADS, room // (max(1, p.Sq) * each)), MOST_HEADS)


class Tiles(NamedTuple):
    """Numbers of tiles."""

    of_head: Any  # tiles of queries of a head, in a batch or, for varlen, in all sequences
    queries: Any  # of all heads
    keys: Any  # of all heads of keys


def fused_tiles_of(problem: Problem, config: FusedConfig) -> Tiles:
    """Return how many tiles a problem has."""
    p, heads_kv = problem, problem.H // problem.group
    if is_varlen(p):
        of_head = packed_count(p.total_q, config.block_q, p.B)
        return Tiles(of_head, p.H * of_head, heads_kv * packed_count(p.packed_k, config.block_kv, p.B))
    of_head = cdiv(p.Sq, config.block_q)
    return Tiles(of_head, p.B * p.H * of_head, p.B * heads_kv * cdiv(p.Sk, config.block_kv))


def fused_workspace(problem: Problem, config: FusedConfig) -> dict[str, ArrayMeta]:
    """Return delta; dq in float32, in whole tiles; a counter, and a flag for each tile."""
    p, place, tiles = problem, problem.arrays["q"].device, fused_tiles_of(problem, config).queries
    size = tiles * (config.block_q * padded(p.D))
    sums = ArrayMeta((size,), "float32", (1,), place, 0)
    return {**simt.backward_workspace(p), "sums": sums, "flags": ArrayMeta((1 + tiles,), "int64", (1,), place, 0)}


def fused_steps(problem: Problem, results: Mapping[str, ArrayMeta], configs: FusedConfigs) -> Sequence[Step]:
    """Return the launches: delta, zeros for the flags, the kernel, and the conversion of dq."""
    p, config, found, varlen = problem, configs.fused, variant(problem), is_varlen(problem)
    elsewhere = ("dq", "dk", "dbias") if configs.dbias else ("dq", "dk")
    delta, *others = simt.backward_steps(p, results, configs.others, elsewhere)
    metas = {**p.arrays, **results, **fused_workspace(p, config)}
    tiles, D = fused_tiles_of(p, config), padded(p.D)
    stored = {name: how_stored(metas, name, varlen) for name in ALL_RESULTS}
    count = 1 + tiles.queries
    clear = Step(build_clear(), (cdiv(count, CLEARED),), ("flags", count))
    sums = Sums("sums", "flags", tiles.of_head)
    x = gradient_inputs_of(metas, is_varlen(p))
    section = fused_section_of(p, config)
    bias_maps = ("fused_bias_map",) if config.bias else ()
    to = keys_to(p, metas, stored, "fused")
    args = (maps_of("fused"), bias_maps, sums, to, x, tiled_work(p, section, sizes(p)))
    shared_bytes = config.shared_bytes(D, padded(p.Dv))
    fused = build_fused(config, found, stored["dk"], stored["dv"])
    to_dq = queries_to(p, metas, stored["dq"], "fused")
    rest = (sums, to_dq, x, tiled_work(p, section if varlen else section * p.group, sizes(p)))
    finish = build_dq_convert(config, found, stored["dq"])
    return [
        delta,
        clear,
        Step(fused, (tiles.keys,), args, shared_bytes),
        Step(finish, (tiles.queries * config.parts,), rest, 2 * ROWS * D, overlaps=p.Sq <= MOST_BESIDE),
        *others,
        *dbias_steps(p, results, configs.dbias),
    ]


RESULTS = ("dk", "dv")
# A grid for the longest sequence is used if it has at most this many times the blocks of a grid for all tokens. The
# latter takes 0.42 of the gradient's time for a sequence of 8192 among 960 of 128, but 1.31 for 1024 of 128, and 1.11
# for 512 of up to 512 (H200, 2026-11-27)
MOST_OF_LONGEST = 2


def dkv_step(problem: Problem, metas: Mapping[str, ArrayMeta], config: AnyDkvConfig) -> Step:
    """Return the launch, after delta's. metas: of the problem's arrays, the results and delta."""
    p, varlen, heads_kv = problem, is_varlen(problem), problem.H // problem.group
    tiles, packed = p.B * cdiv(p.Sk, config.block_kv), False
    if varlen:
        of_tokens = packed_count(p.packed_k, config.block_kv, p.B)
        packed = tiles > MOST_OF_LONGEST * of_tokens
        tiles = of_tokens if packed else tiles
    stored = {name: "" if config.thirds else how_stored(metas, name, varlen) for name in RESULTS}
    bias_maps: tuple[Any, ...] = ()
    if isinstance(config, DkvConfig):
        build = build_dkv(config, variant(p), stored["dk"], stored["dv"], packed)
        bias_maps = ((("dkv_bias_map",) if config.bias else ()),)
    else:
        build = build_dkv_split(config, variant(p), stored["dk"], stored["dv"], packed)
    section = section_of_queries(p, packed=packed)
    to, x = keys_to(p, metas, stored, "dkv"), gradient_inputs_of(metas, is_varlen(p))
    args = (maps_of("dkv"), *bias_maps, to, x, tiled_work(p, section, sizes_by_keys(p)))
    return Step(build, (heads_kv * tiles,), args, config.shared_bytes(padded(p.D), padded(p.Dv)))


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
    if max(p.D, p.Dv) > MOST_WIDTH or not _has_both(results) or not serves(p, device, p.arrays, LOADED):
        return
    (D, Dv), metas = widths(p), {**p.arrays, **results}
    names, in_boxes = having(p).names, boxed_bias(p) is not None
    (others, _), (dbias, of_dbias) = next(simt.backward_configs(p)), dbias_choice(p, results, device)
    for dq, reason in dq_configs(D, Dv, names, in_boxes, varlen):
        for dkv, dkv_reason in dkv_configs(D, Dv, names, in_boxes):
            if max(dq.shared_bytes(D, Dv) + SLACK, dkv.shared_bytes(D, Dv) + dkv.slack) > room:
                continue
            configs, found = BackwardConfigs(dq, dkv, others, dbias), workspace(p) | dbias_workspace(p, dbias)
            maps = gradient_maps(p, metas, dq, "dq", ("dq",)) | gradient_maps(p, metas, dkv, "dkv", RESULTS)
            maps |= dbias_maps(p, dbias)
            steps = partial(backward_steps, p, results, configs)
            yield Choice("sm90", configs, f"dq: {reason}; dk and dv: {dkv_reason}{of_dbias}", steps, found, maps=maps)


def _has_both(results: Mapping[str, ArrayMeta]) -> bool:
    return bool(results["dq"].size and results["dk"].size)


def workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return delta, the counter of drawn work items, and a transposed block mask."""
    counter = ArrayMeta((1,), "int64", (1,), problem.arrays["q"].device, 0)
    return {**simt.backward_workspace(problem), "counter": counter, **workspace_by_keys(problem)}


def backward_steps(problem: Problem, results: Mapping[str, ArrayMeta], configs: BackwardConfigs) -> Sequence[Step]:
    elsewhere = ("dq", "dk", "dbias") if configs.dbias else ("dq", "dk")
    delta, *others = simt.backward_steps(problem, results, configs.others, elsewhere)
    metas = {**problem.arrays, **results, **workspace(problem)}
    of_dkv = [*steps_by_keys(problem), dkv_step(problem, metas, configs.dkv)]
    of_dbias = dbias_steps(problem, results, configs.dbias)
    return [delta, *dq_steps(problem, metas, configs.dq), *of_dkv, *others, *of_dbias]


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
    return after_counter(step, static=False)
