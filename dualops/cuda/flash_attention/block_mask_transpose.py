"""A block mask's lists transposed, for dk and dv: the tiles of queries that see some keys of a tile of keys.

    states, a thread for two tiles                     lists, built from them as in `block_masks`
    1  look for the tile of keys in the list of the    3  for each tile of queries that is not empty, in order:
       tile of queries, binary search                     append 2 * number + whether all are seen; then the count
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
from .arguments import Work, sizes
from .block_masks import LISTS_TYPE, THREADS, build_lists
from .options import Having, arguments, chain_of, having
from .tile_scheduler import place_in_list

NAME = "by_keys"  # of the workspace
RANGES = ("band",)  # options that hide whole tiles, in addition to it


class TilePairs(NamedTuple):
    """Pairs of a tile of keys and a tile of queries."""

    count: Any  # of all batches and heads
    heads: Any  # heads of keys that have lists of their own
    group: Any  # heads of queries that share a head of keys
    Sq: Any
    Sk: Any
    offset: Any  # position of query 0 among the keys


@builds
def build_states_by_keys(ranges: Having) -> Kernel:
    """block_mask_states_by_keys(by_keys, lists, pairs, options): the state of each pair of tiles.

    pairs: `TilePairs`. ranges: the options that hide whole tiles; options: their arguments.
    """
    chain = chain_of(ranges, "float32")
    pairs_type = types.NamedTuple((i64, *[i32] * 5), TilePairs)

    @kernel(LISTS_TYPE, strided("int32", 3), pairs_type, ranges.argtypes, threads=THREADS)
    def block_mask_states_by_keys(by_keys, lists, pairs, options):
        number = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if number < pairs.count:
            q_tiles, kv_tiles = i32(tiles_of(pairs.Sq)), i32(tiles_of(pairs.Sk))
            place, row = i32(number % (pairs.group * q_tiles)), i32(number // (pairs.group * q_tiles))
            g, m = i32(place // q_tiles), i32(place % q_tiles)
            n, head = i32(row % kv_tiles), i32(row // kv_tiles)
            b, h_kv, state = i32(head // pairs.heads), i32(head % pairs.heads), i32(EMPTY)
            n0, n1 = i32(n * TILE), min(i32(n * TILE + TILE), pairs.Sk)
            m_first, m_end = chain.query_range(options, n0, n1, pairs.offset, pairs.Sq)
            if m * TILE < m_end and m * TILE + TILE > m_first:
                steps = lists.strides
                start = i64(b) * steps[0] + i64(h_kv * pairs.group + g) * steps[1] + i64(m) * steps[2]
                count = lists.data[start]
                found = place_in_list(lists.data, start, count, n)
                if found < count and lists.data[start + 1 + found] // 2 == n:
                    state = i32(FULL if lists.data[start + 1 + found] % 2 else MIXED)
            steps = by_keys.strides
            start = i64(b) * steps[0] + i64(h_kv) * steps[1] + i64(n) * steps[2]
            by_keys.data[start + i64(place + 1) * steps[3]] = state

    return block_mask_states_by_keys


class ListsShape(NamedTuple):
    """How many lists there are, by batch, head of keys and tile of keys, and how many tiles each can name."""

    B: Any
    heads: Any
    kv_tiles: Any
    tiles: Any


def shape_of(problem: Problem) -> ListsShape:
    p, (B, H, q_tiles, _) = problem, problem.arrays[BLOCKS.name].shape
    return ListsShape(B, 1 if H == 1 else p.H // p.group, tiles_of(p.Sk), p.group * q_tiles)


def workspace_by_keys(problem: Problem) -> dict[str, ArrayMeta]:
    """The lists, where the problem has a block mask."""
    if BLOCKS.name not in problem.arrays:
        return {}
    B, heads, kv_tiles, tiles = shape_of(problem)
    shape = (B, heads, kv_tiles, 1 + tiles)
    return {NAME: ArrayMeta(shape, "int32", contiguous_strides(shape), problem.arrays[BLOCKS.name].device, 0)}


def steps_by_keys(problem: Problem) -> Sequence[Step]:
    """The launches that make them."""
    if BLOCKS.name not in problem.arrays:
        return []
    p, (B, heads, kv_tiles, tiles), found = problem, shape_of(problem), having(problem)
    of_ranges = [i for i, (option, _) in enumerate(found.variants) if option.name in RANGES]
    ranges = Having(tuple(found.variants[i] for i in of_ranges), types.Tuple([found.argtypes[i] for i in of_ranges]))
    given, rows = arguments(p), B * heads * kv_tiles
    by_keys, lists = whole(workspace_by_keys(p), NAME, 4), given_lists(p).lists
    offset = 0 if p.causal == "top_left" else p.Sk - p.Sq
    pairs = TilePairs(rows * tiles, heads, p.group, p.Sq, p.Sk, offset)
    args = (by_keys, lists, pairs, tuple(given[i] for i in of_ranges))
    states = Step(build_states_by_keys(ranges), (cdiv(pairs.count, THREADS),), args)
    return [states, Step(build_lists(), (cdiv(rows, THREADS),), (by_keys, rows, heads, kv_tiles, tiles))]


def sizes_by_keys(problem: Problem) -> Work:
    """Return the work of a problem, with these lists in the place of a block mask's own."""
    work = sizes(problem)
    if BLOCKS.name not in problem.arrays:
        return work
    B, heads, _, _ = shape_of(problem)
    steps = workspace_by_keys(problem)[NAME].strides
    own = Args(Strided(NAME, (0 if B == 1 else steps[0], 0 if heads == 1 else steps[1], steps[2])))
    return work._replace(options=tuple(own if isinstance(given, Args) else given for given in work.options))
