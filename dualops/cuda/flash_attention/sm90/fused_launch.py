"""Attention's whole gradient in one kernel on Hopper: which problems it takes, its launches and their tensor maps."""

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
from ...launch.views import boxed, how_stored
from ...tile.warpgroup import INSTRUCTION_TYPES, ROWS
from .. import simt
from ..arguments import gradient_inputs_of, has_usual_scale, is_varlen, sizes, variant
from ..options import having
from ..tile_scheduler import LEAST_HEADS, MOST_HEADS, packed_count, tiled_work
from .arguments import Sums, gradient_maps, keys_to, maps_of, queries_to
from .bias import boxed_bias
from .config import padded
from .dbias import DbiasConfig, dbias_choice, dbias_maps, dbias_steps, dbias_workspace
from .dkv_config import FusedConfig, fused_configs
from .dq_sums import build_dq_convert
from .fused import build_fused

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
LOADED, RESULTS = ("q", "do", "k", "v"), ("dk", "dv", "dq")


class FusedConfigs(NamedTuple):
    """A Config for the kernel, for simt's part, and for dbias, None if that is simt's."""

    fused: FusedConfig
    others: simt.BackwardConfigs
    dbias: DbiasConfig | None = None


def fused_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for the gradient, best first. Each key must be seen from some query on to the last."""
    p = problem
    if p.dtype not in INSTRUCTION_TYPES or not device.has_wgmma or p.window is not None:
        return
    if not has_usual_scale(p) or not results["dq"].size or not results["dk"].size:
        return
    if any(boxed(p.arrays, name, is_varlen(p)) is None for name in LOADED):
        return
    D, Dv = padded(int(p.D)), padded(int(p.Dv))
    names = [option.name for option, _ in having(p).variants]
    for config, reason in fused_configs(D, Dv, names, boxed_bias(p) is not None, p.group, is_varlen(p)):
        fits = config.shared_bytes(D, Dv) + config.slack <= device.shared_memory_per_block
        if fits and p.Sq > most_by_two_kernels(config):
            others, _ = next(simt.backward_configs(p))
            dbias, of_dbias = dbias_choice(p, results, device)
            configs = FusedConfigs(config, others, dbias)
            found, maps = workspace(p, config), gradient_maps(p, {**p.arrays, **results}, config, "fused", RESULTS)
            if dbias is not None:
                found, maps = found | dbias_workspace(p, dbias), maps | dbias_maps(p, dbias)
            note = f"dq, dk and dv: {reason}, dq added in float32{of_dbias}"
            steps = partial(fused_steps, p, results, configs)
            yield Choice("sm90", configs, note, steps, found, maps=maps)


def most_by_two_kernels(config: FusedConfig) -> int:
    """Return up to how many queries of a sequence two kernels are faster."""
    return (LEAST_TILES - 1) * config.block_q


def section_of(problem: Problem, config: FusedConfig) -> Any:
    """Return how many heads of keys form a section: few, so that their inputs and sums stay in L2, but enough that not
    all keys of a head run at once, each block waiting for the one before. In a group, blocks with few tiles of each
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


def tiles_of(problem: Problem, config: FusedConfig) -> Tiles:
    """Return how many tiles a problem has."""
    p, heads_kv = problem, problem.H // problem.group
    if is_varlen(p):
        of_head = packed_count(p.total_q, config.block_q, p.B)
        return Tiles(of_head, p.H * of_head, heads_kv * packed_count(p.packed_k, config.block_kv, p.B))
    of_head = cdiv(p.Sq, config.block_q)
    return Tiles(of_head, p.B * p.H * of_head, p.B * heads_kv * cdiv(p.Sk, config.block_kv))


def workspace(problem: Problem, config: FusedConfig) -> dict[str, ArrayMeta]:
    """Return delta; dq in float32, in whole tiles; a counter, and a flag for each tile."""
    p, place, tiles = problem, problem.arrays["q"].device, tiles_of(problem, config).queries
    size = tiles * (config.block_q * padded(p.D))
    sums = ArrayMeta((size,), "float32", (1,), place, 0)
    return {**simt.backward_workspace(p), "sums": sums, "flags": ArrayMeta((1 + tiles,), "int64", (1,), place, 0)}


def fused_steps(problem: Problem, results: Mapping[str, ArrayMeta], configs: FusedConfigs) -> Sequence[Step]:
    """Return the launches: delta, zeros for the flags, the kernel, and the conversion of dq."""
    p, config, found, varlen = problem, configs.fused, variant(problem), is_varlen(problem)
    elsewhere = ("dq", "dk", "dbias") if configs.dbias else ("dq", "dk")
    delta, *others = simt.backward_steps(p, results, configs.others, elsewhere)
    metas = {**p.arrays, **results, **workspace(p, config)}
    tiles, D = tiles_of(p, config), padded(p.D)
    stored = {name: how_stored(metas, name, varlen) for name in RESULTS}
    count = 1 + tiles.queries
    clear = Step(build_clear(), (cdiv(count, CLEARED),), ("flags", count))
    sums = Sums("sums", "flags", tiles.of_head)
    x = gradient_inputs_of(metas, is_varlen(p))
    section = section_of(p, config)
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
        *(dbias_steps(p, results, configs.dbias) if configs.dbias else ()),
    ]
