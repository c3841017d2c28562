"""What is copied to shared memory once in a block: an mbarrier that counts the thread that copies, and its bytes.

    producer                                    readers
    once.expect(full)                           once.wait(full)
    tile.load(smem, 0, ..., full)               ...

Its mbarrier is told to all by a pipeline's `start`.

What the kernels of dk and dv load: K and V once; of the tiles of queries that see some of the keys, one head of the
group after the other, Q and dO, and beside them lse and delta, and the bias's tile where it comes as boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ...compiler.backend import Members, Noun, cuda, i32, noun, u32, u64, verb
from ...ptx.mbarrier import mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_cta
from ...tile.boxes import BoxTile, Corner
from ...tile.pipeline import Pipeline
from ...tile.second_barrier import Companion
from ..lse_delta_smem import Columns
from .bias import BiasDkv
from .visible_tiles import QTiles

Once = Noun  # what `load_once` makes


@cache
@noun
def load_once(nbytes: int) -> Members:
    """The verbs for so many bytes."""

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
        """Wait until the bytes are there."""
        mbarrier_wait_cta(full, 0, 0)

    return locals()


class LoadedTiles(NamedTuple):
    """Where boxes go."""

    k: BoxTile
    v: BoxTile
    q: BoxTile
    do: BoxTile


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
    """The verb (smem, maps, barriers, statistics, more, task, first, end), by the warpgroup that loads, of `end` tiles
    from the first one on, whose head and query are `first`. maps: `Maps`; barriers: those of `once`, `pipe`
    and `part`, which has dO and the bias; statistics: lse, delta, and their slots in shared memory; more: the bias's
    maps, how many heads share the keys, and options.
    """
    k_tile, v_tile, q_tile, do_tile = tiles

    @verb
    def load(smem, maps, barriers, statistics, more, task, first, end):
        kv_full, q_bars, do_full = barriers
        lse, delta, slots = statistics
        bias_maps, group, options = more
        h, first_query = first
        i, m0, tid, b = u32(0), i32(first_query), u32(cuda.threadIdx.x) % u32(128), i32(0) if varlen else task.b
        if tid == u32(0) and end != u32(0):
            token = i32(task.k_first + task.n0)
            once.expect(kv_full)
            k_tile.load(smem, 0, maps.k, Corner(token, 0, (task.h_kv, b)), kv_full)
            v_tile.load(smem, 0, maps.v, Corner(token, 0, (task.h_kv, b)), kv_full)
            while i != end:
                token = i32(task.q_first + m0)
                stage = pipe.acquire(q_bars, i)
                q_tile.load(smem, stage, maps.q, Corner(token, 0, (h, b)), q_bars.full)
                part.expect(do_full, i)
                do_tile.load(smem, stage, maps.do, Corner(token, 0, (h, b)), do_full)
                bias.bring(smem, stage, bias_maps, options, task, h, m0, do_full)
                h, m0, _ = visits.after(h, m0, i, end, task, group, options)
                i = pipe.next(i)
        elif tid // u32(32) == u32(1):
            own = columns.own()
            while i != end:
                columns.fetch(own, lse, delta, task, h, m0)
                columns.put(slots, pipe.claim(q_bars, i), own)
                part.hand(do_full, i)
                h, m0, _ = visits.after(h, m0, i, end, task, group, options)
                i = pipe.next(i)

    return load


def loads_f32_of(
    tiles: LoadedTiles, once: Once, q_pipe: Pipeline, do_pipe: Pipeline, visits: QTiles, varlen: bool
) -> Callable[..., None]:
    """The verb (smem, maps, barriers, more, task, first, end), by one thread: K and V once, and of `end` tiles of
    queries from the first one on, whose head and query are `first`, Q and dO. more: group and options.
    """
    k_tile, v_tile, q_tile, do_tile = tiles

    @verb
    def load(smem, maps, barriers, more, task, first, end):
        kv_full, q_bars, do_bars = barriers
        group, options = more
        h, first_query = first
        i, m0, b = u32(0), i32(first_query), i32(0) if varlen else task.b
        if end != u32(0):
            token = i32(task.k_first + task.n0)
            once.expect(kv_full)
            k_tile.load(smem, 0, maps.k, Corner(token, 0, (task.h_kv, b)), kv_full)
            v_tile.load(smem, 0, maps.v, Corner(token, 0, (task.h_kv, b)), kv_full)
            while i != end:
                corner = Corner(i32(task.q_first + m0), 0, (h, b))
                q_tile.load(smem, q_pipe.acquire(q_bars, i), maps.q, corner, q_bars.full)
                do_tile.load(smem, do_pipe.acquire(do_bars, i), maps.do, corner, do_bars.full)
                h, m0, _ = visits.after(h, m0, i, end, task, group, options)
                i = q_pipe.next(i)

    return load


def statistics_of(q_pipe: Pipeline, part: Companion, columns: Columns, visits: QTiles) -> Callable[..., None]:
    """The verb (slots, barriers, statistics, more, task, first, end), by a warp: lse and delta of these tiles."""

    @verb
    def bring(slots, barriers, statistics, more, task, first, end):
        q_bars, known = barriers
        lse, delta = statistics
        group, options = more
        h, m0 = first
        i, own = u32(0), columns.own()
        while i != end:
            columns.fetch(own, lse, delta, task, h, m0)
            columns.put(slots, q_pipe.claim(q_bars, i), own)
            part.hand(known, i)
            h, m0, _ = visits.after(h, m0, i, end, task, group, options)
            i = q_pipe.next(i)

    return bring
