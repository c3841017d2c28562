"""A block mask's lists the other way round, for dk and dv: which tiles of queries see some keys of a tile.

    states, a thread for two tiles                     lists, made of them as in `block_masks`
    1  look for the tile of keys in the list of the    3  for each tile of queries that is not empty, in order:
       tile of queries, by halves                         append 2 * number + whether all are seen; then the count
    2  none, some or all of their pairs are seen

    lists [B or 1, Hkv or 1, tiles of keys, 1 + group * tiles of queries]

A row has the tiles of all heads that share the keys, one head after the other: tile m of the group's head g is number
g * (tiles of queries) + m. Tiles that a window hides are left out. It is a workspace of the gradient: 4 bytes for
TILE * TILE pairs of each head, or of a group's heads where all heads have the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.attention import BLOCKS
from ...spec.attention.blocks import EMPTY, FULL, MIXED, TILE, Args, args as given_lists, tiles_of
from ...spec.meta import Strided, contiguous_strides
from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, types
from ..launch.arrays import cdiv
from ..launch.step import Step
from ..launch.views import strided, whole
from .arguments import sizes
from .block_masks import LISTS_TYPE, THREADS, build_lists
from .options import Having, arguments, chain_of, having
from .tile_scheduler import place_in_list

NAME = "by_keys"  # of the workspace
RANGES = ("band",)  # options that hide whole tiles beside it


@builds
def build_states_by_keys(ranges: Having) -> Kernel:
    """block_mask_states_by_keys(by_keys, lists, pairs, heads, group, Sq, Sk, offset, options): the states of so many
    pairs of tiles. heads: of keys, that by_keys tells apart. ranges, options: those that have ranges.
    """
    chain = chain_of(ranges, "float32")

    @kernel(LISTS_TYPE, strided("int32", 3), i64, *[i32] * 5, ranges.argtypes, threads=THREADS)
    def block_mask_states_by_keys(by_keys, lists, pairs, heads, group, Sq, Sk, offset, options):
        number = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if number < pairs:
            q_tiles, kv_tiles = i32(tiles_of(Sq)), i32(tiles_of(Sk))
            place, row = i32(number % (group * q_tiles)), i32(number // (group * q_tiles))
            g, m = i32(place // q_tiles), i32(place % q_tiles)
            n, head = i32(row % kv_tiles), i32(row // kv_tiles)
            b, h_kv, state = i32(head // heads), i32(head % heads), i32(EMPTY)
            m_first, m_end = chain.query_range(options, i32(n * TILE), min(i32(n * TILE + TILE), Sk), offset, Sq)
            if m * TILE < m_end and m * TILE + TILE > m_first:
                steps = lists.strides
                start = i64(b) * steps[0] + i64(h_kv * group + g) * steps[1] + i64(m) * steps[2]
                count = lists.data[start]
                found = place_in_list(lists.data, start, count, n)
                if found < count and lists.data[start + 1 + found] // 2 == n:
                    state = i32(FULL if lists.data[start + 1 + found] % 2 else MIXED)
            steps = by_keys.strides
            start = i64(b) * steps[0] + i64(h_kv) * steps[1] + i64(n) * steps[2]
            by_keys.data[start + i64(place + 1) * steps[3]] = state

    return block_mask_states_by_keys


class Extent(NamedTuple):
    """How much there is of what is told apart: batches and heads of keys; of a row's tiles."""

    B: Any
    heads: Any
    kv_tiles: Any
    tiles: Any


def extent_of(problem: Problem) -> Extent:
    p, (B, H, q_tiles, _) = problem, problem.arrays[BLOCKS.name].shape
    return Extent(B, 1 if H == 1 else p.H // p.group, tiles_of(p.Sk), p.group * q_tiles)


def workspace_by_keys(problem: Problem) -> dict[str, ArrayMeta]:
    """The lists, where the problem has a block mask."""
    if BLOCKS.name not in problem.arrays:
        return {}
    B, heads, kv_tiles, tiles = extent_of(problem)
    shape = (B, heads, kv_tiles, 1 + tiles)
    return {NAME: ArrayMeta(shape, "int32", contiguous_strides(shape), problem.arrays[BLOCKS.name].device, 0)}


def steps_by_keys(problem: Problem) -> Sequence[Step]:
    """The launches that make them."""
    if BLOCKS.name not in problem.arrays:
        return []
    p, (B, heads, kv_tiles, tiles), found = problem, extent_of(problem), having(problem)
    of_ranges = [i for i, (option, _) in enumerate(found.variants) if option.name in RANGES]
    ranges = Having(tuple(found.variants[i] for i in of_ranges), types.Tuple([found.argtypes[i] for i in of_ranges]))
    given, rows = arguments(p), B * heads * kv_tiles
    by_keys, lists = whole(workspace_by_keys(p), NAME, 4), given_lists(p).lists
    offset = 0 if p.causal == "top_left" else p.Sk - p.Sq
    args = (by_keys, lists, rows * tiles, heads, p.group, p.Sq, p.Sk, offset, tuple(given[i] for i in of_ranges))
    states = Step(build_states_by_keys(ranges), (cdiv(rows * tiles, THREADS),), args)
    return [states, Step(build_lists(), (cdiv(rows, THREADS),), (by_keys, rows, heads, kv_tiles, tiles))]


def sizes_by_keys(problem: Problem) -> tuple[Any, ...]:
    """`sizes`, with these lists in the place of a block mask's own."""
    *others, options = sizes(problem)
    if BLOCKS.name not in problem.arrays:
        return (*others, options)
    B, heads, _, _ = extent_of(problem)
    steps = workspace_by_keys(problem)[NAME].strides
    own = Args(Strided(NAME, (0 if B == 1 else steps[0], 0 if heads == 1 else steps[1], steps[2])))
    return (*others, tuple(own if isinstance(given, Args) else given for given in options))
