"""What dbias loads: two tiles for each tile of scores, rows of queries and rows of keys, Q and K or dO and V.

Of the two one may stay for the next tile of scores: K and V for other heads of the group and, where the bias has one
row, for other queries; Q and dO for other keys where it has one column. So of a pair of pipelines one is filled for
every tile of scores, number i, the other when what stays is another, number `kept`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...backend import Namespace, i32, u32, verb
from ...tile.boxes import BoxTile, Corner
from ...tile.pipeline import Pipeline
from .bias_walk import BiasWalk


class Loaded(NamedTuple):
    """Tiles of a pair, and their pipelines."""

    queries: BoxTile
    keys: BoxTile
    query_pipe: Pipeline
    key_pipe: Pipeline


class PairBarriers(NamedTuple):
    """Those of both pipelines."""

    queries: Any
    keys: Any


class PairOfTiles(Namespace):
    """The verbs."""

    barriers: Callable[..., PairBarriers]  # (): the shared arrays; once in a kernel, by all threads
    init: Callable[..., None]  # (barriers): by one thread, before a pipeline's `start`
    bring: Callable[..., None]  # (smem, maps, barriers, extent, offset, options): all of a block's; by one thread
    # (barriers, i, kept) -> where both begin in shared memory, once they are there
    wait: Callable[..., Any]
    release: Callable[..., None]  # (barriers, i, kept, last): read by my warp; last: for the last time what stays, too


def pair_of_tiles(loaded: Loaded, walk: BiasWalk, keeps_queries: bool) -> PairOfTiles:
    """keeps_queries: what stays is the tile of queries."""
    queries, keys, query_pipe, key_pipe = loaded
    stays, passes = (query_pipe, key_pipe) if keeps_queries else (key_pipe, query_pipe)

    @verb
    def barriers():
        return PairBarriers(query_pipe.barriers(), key_pipe.barriers())

    @verb
    def init(barriers):
        query_pipe.init(barriers.queries)
        key_pipe.init(barriers.keys)

    @verb
    def load_queries(smem, maps, barriers, visit, extent, filling):
        stage = query_pipe.acquire(barriers.queries, filling)
        queries.load(smem, stage, maps[0], Corner(visit.m0, 0, (visit.h, visit.b)), barriers.queries.full)

    @verb
    def load_keys(smem, maps, barriers, visit, extent, filling):
        stage = key_pipe.acquire(barriers.keys, filling)
        h_kv = i32(u32(visit.h) // u32(extent.group))
        keys.load(smem, stage, maps[1], Corner(visit.n0, 0, (h_kv, visit.b)), barriers.keys.full)

    load_kept, load_passing = (load_queries, load_keys) if keeps_queries else (load_keys, load_queries)

    @verb
    def bring(smem, maps, barriers, extent, offset, options):
        i, kept = u32(0), u32(0)
        number, numbers = walk.first_number(), walk.numbers(extent)
        while number < numbers:
            part, there = walk.part(number, extent), i32(-1)
            visit = walk.first(part, extent, offset, options)
            while visit.v < part.end:
                wanted = walk.kept(visit, extent)
                if wanted != there:
                    load_kept(smem, maps, barriers, visit, extent, kept)
                    kept, there = stays.next(kept), wanted
                load_passing(smem, maps, barriers, visit, extent, i)
                i = passes.next(i)
                visit = walk.after(visit, part, extent, offset, options)
            number = walk.next_number(number)

    @verb
    def wait(barriers, i, kept):
        if keeps_queries:
            query_stage, key_stage = query_pipe.wait(barriers.queries, kept), key_pipe.wait(barriers.keys, i)
        else:
            query_stage, key_stage = query_pipe.wait(barriers.queries, i), key_pipe.wait(barriers.keys, kept)
        return queries.at(query_stage), keys.at(key_stage)

    @verb
    def release_kept(barriers, kept):
        stays.release(barriers.queries if keeps_queries else barriers.keys, kept)

    @verb
    def release(barriers, i, kept, last):
        passes.release(barriers.keys if keeps_queries else barriers.queries, i)
        if last:
            release_kept(barriers, kept)

    return PairOfTiles(barriers=barriers, init=init, bring=bring, wait=wait, release=release)
