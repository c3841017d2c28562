"""What the kernels that own keys load: K and V once; then, for each tile of queries that see some of the keys, one head
of the group after the other, Q, dO, lse, delta, and the bias's tile if it is copied as boxes.

K and V have an mbarrier of their own, `load_once`: it counts the thread that copies, and the bytes.

    producer                                    readers
    once.expect(full)                           once.wait(full)
    tile.load(smem, 0, ..., full)               ...

A pipeline's `start` makes it visible to all threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ...compiler.backend import Members, Noun, cuda, i32, noun, u32, u64, verb
from ...ptx.mbarrier import mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_cta
from ...tile.boxes import BoxTile, Corner
from ...tile.pipeline import Pipeline
from ...tile.second_barrier import Companion
from ..lse_delta_smem import Columns
from .bias import BiasDkv, BiasPlace
from .visible_tiles import QTiles

Once = Noun  # of `load_once`


@cache
@noun
def load_once(nbytes: int) -> Members:
    """The verbs for something of `nbytes` that a block copies to shared memory once."""

    @verb
    def barrier():
        """Return full, in shared memory; once in a kernel, by all threads."""
        return cuda.shared.array(1, u64)

    @verb
    def init(full):
        """Initialize the barrier; by one thread, before a pipeline's `start`."""
        mbarrier_init(full, 0, 1)

    @verb
    def expect(full):
        """Expect the bytes; by the thread that copies."""
        mbarrier_arrive_expect_tx(full, 0, nbytes)

    @verb
    def wait(full):
        """Wait until the bytes have arrived."""
        mbarrier_wait_cta(full, 0, 0)

    return locals()


class LoadedTiles(NamedTuple):
    """Where boxes go."""

    k: BoxTile
    v: BoxTile
    q: BoxTile
    do: BoxTile


class LoadTo(NamedTuple):
    """Where loads go, and the bias's map."""

    smem: Any
    slots: Any  # of lse and delta
    bias_maps: Any


class LoadBarriers(NamedTuple):
    """Barriers of what is loaded."""

    kv: Any  # K and V, once
    q: Any  # tiles of Q
    do: Any  # tiles of dO, with the bias and, of 16 bits, lse and delta


def loads_of(
    tiles: LoadedTiles,
    bias: BiasDkv,
    once: Once,
    pipe: Pipeline,
    part: Companion,
    columns: Columns,
    visits: QTiles,
    varlen: bool,
) -> Callable[..., None]:
    """Return the verb (to, maps, bars, x, work, task, end), for the warpgroup that loads `end` tiles of queries. to:
    `LoadTo`. bars: `LoadBarriers` of `once`, `pipe` and `part`.
    """
    k_tile, v_tile, q_tile, do_tile = tiles

    @verb
    def load(to, maps, bars, x, work, task, end):
        i, tid, b = u32(0), u32(cuda.threadIdx.x) % u32(128), i32(0) if varlen else task.b
        tile = visits.first(task, work)
        if tid == u32(0) and end != u32(0):
            token = i32(task.k_first + task.n0)
            once.expect(bars.kv)
            k_tile.load(to.smem, 0, maps.k, Corner(token, 0, (task.h_kv, b)), bars.kv)
            v_tile.load(to.smem, 0, maps.v, Corner(token, 0, (task.h_kv, b)), bars.kv)
            while i != end:
                corner = Corner(i32(task.q_first + tile.m0), 0, (tile.h, b))
                stage = pipe.acquire(bars.q, i)
                q_tile.load(to.smem, stage, maps.q, corner, bars.q.full)
                part.expect(bars.do, i)
                do_tile.load(to.smem, stage, maps.do, corner, bars.do)
                place = BiasPlace(task.b, tile.h, tile.m0, task.n0)
                bias.bring(to.smem, stage, to.bias_maps, work.options, place, bars.do)
                tile = visits.after(tile, i, end, task, work)
                i = pipe.next(i)
        elif tid // u32(32) == u32(1):
            own = columns.own()
            while i != end:
                columns.fetch(own, x, task, tile.h, tile.m0)
                columns.put(to.slots, pipe.claim(bars.q, i), own)
                part.hand(bars.do, i)
                tile = visits.after(tile, i, end, task, work)
                i = pipe.next(i)

    return load


def loads_f32_of(
    tiles: LoadedTiles, once: Once, q_pipe: Pipeline, do_pipe: Pipeline, visits: QTiles, varlen: bool
) -> Callable[..., None]:
    """Return the verb (smem, maps, bars, work, task, end), for one thread: it loads K and V, and Q and dO of `end`
    tiles of queries. bars: `LoadBarriers` of `once`, `q_pipe` and `do_pipe`.
    """
    k_tile, v_tile, q_tile, do_tile = tiles

    @verb
    def load(smem, maps, bars, work, task, end):
        tile, i, b = visits.first(task, work), u32(0), i32(0) if varlen else task.b
        if end != u32(0):
            token = i32(task.k_first + task.n0)
            once.expect(bars.kv)
            k_tile.load(smem, 0, maps.k, Corner(token, 0, (task.h_kv, b)), bars.kv)
            v_tile.load(smem, 0, maps.v, Corner(token, 0, (task.h_kv, b)), bars.kv)
            while i != end:
                corner = Corner(i32(task.q_first + tile.m0), 0, (tile.h, b))
                q_tile.load(smem, q_pipe.acquire(bars.q, i), maps.q, corner, bars.q.full)
                do_tile.load(smem, do_pipe.acquire(bars.do, i), maps.do, corner, bars.do.full)
                tile = visits.after(tile, i, end, task, work)
                i = q_pipe.next(i)

    return load


def statistics_of(q_pipe: Pipeline, part: Companion, columns: Columns, visits: QTiles) -> Callable[..., None]:
    """Return the verb (slots, q_bars, known, x, work, task, end), for a warp: it loads lse and delta of `end` tiles of
    queries.
    """

    @verb
    def bring(slots, q_bars, known, x, work, task, end):
        tile, i, own = visits.first(task, work), u32(0), columns.own()
        while i != end:
            columns.fetch(own, x, task, tile.h, tile.m0)
            columns.put(slots, q_pipe.claim(q_bars, i), own)
            part.hand(known, i)
            tile = visits.after(tile, i, end, task, work)
            i = q_pipe.next(i)

    return bring
