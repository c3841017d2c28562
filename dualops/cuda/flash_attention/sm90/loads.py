"""What kernels load as boxes, and the barriers that report it: the work of their producer warpgroup.

`loaded`: an operand of products in the stages of a pipeline of its own.

    producer, one thread                            readers
    k.load(smem, k_map, corner, bars.k, i)          k_at = k.wait(bars.k, i)
                                                    ...
                                                    k.release(bars.k, i)

`kv_loads`, for forward and dq: for each work item that the schedule draws the rows of its queries, then K and V of each
tile of keys that they see.

`q_loads`, for kernels that own keys: K and V once; then, for each tile of queries that see some of the keys, one head
of the group after the other, Q, dO, lse, delta, and the bias's tile if it is copied as boxes. K and V have an mbarrier
of their own, the only stage of `second_barrier`.

`ring_of_lines`, for dbias: Q and dO in turn in one ring of stages, or K and V, which stay while tiles of scores need
them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Members, Noun, cuda, i32, members, noun, u32, verb
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.pipeline import pipeline, second_barrier
from ...tile.swizzle import Operand
from ..arguments import Variant
from ..options import chain_of
from ..saved_lse import lse_delta_of
from .bias import NO_BARRIERS, BiasPlace, bias_dkv, bias_stages
from .bias_tile_scheduler import BiasWalk
from .config import Sm90Config, widths
from .dkv_config import AnyDkvConfig, FusedConfig
from .dq_config import AnyDqConfig
from .schedule import WorkItems
from .visible_tiles import KvTiles, QTiles, q_tiles_of

KvLoads = Noun  # of `kv_loads`
QLoads = Noun  # of `q_loads`


@noun
def loaded(tile: Operand, at: int, stages: int, warps: int, room: int = 0) -> Members:
    """The verbs of a tile that is loaded as boxes and read by `warps` warps. Its first stage begins at byte `at`. room:
    bytes of a stage, if not the tile's own.
    """
    box, pipe = box_tile(tile, at, 2, room=room), pipeline(stages, tile.nbytes, warps)

    @verb
    def load(smem, tensor_map, corner, bars, filling):
        """Start to load a filling, once its stage is free."""
        box.load(smem, pipe.acquire(bars, filling), tensor_map, corner, bars.full)

    @verb
    def wait(bars, filling):
        """Return the byte where a filling begins, once it has arrived."""
        return box.at(pipe.wait(bars, filling))

    @verb
    def at_(filling):
        """Return the byte where a filling begins, which has arrived."""
        return box.at(pipe.stage(filling))

    of_pipe = {"barriers": pipe.barriers, "init": pipe.init, "start": pipe.start}
    return members(locals(), **of_pipe, release=pipe.release, next=pipe.next)


class KvBarriers(NamedTuple):
    """The barriers of a kernel, in shared memory."""

    q: Any  # rows of queries
    k: Any
    v: Any
    others: Any  # of the bias's stages, or of an exchange
    items: Any  # and the numbers of work items


@noun
def kv_loads(
    config: Sm90Config | AnyDqConfig,
    variant: Variant,
    queries: Noun,
    items: WorkItems,
    visits: KvTiles,
    others: Noun | None = None,
) -> Members:
    """The verbs. queries: a noun with the `nbytes` of a work item's rows, and the verb `load`. others: a noun with
    barriers, of an exchange between consumers, if there is no bias in boxes.
    """
    tiles = config.tiles(*widths(variant))
    bias = bias_stages(variant, config.bias, tiles.bias_at, config.bias_stages, config.consumers)
    q = pipeline(config.q_stages, queries.nbytes, config.warps)
    k = loaded(tiles.k, tiles.k_at, config.stages, config.warps)
    v = loaded(tiles.v, tiles.v_at, config.v_stages, config.v_warps)
    VARLEN, BY_COLUMNS, V_FIRST, others = variant.varlen, tiles.v.major == "mn", config.v_first, others or bias

    @verb
    def barriers():
        """Return `KvBarriers`; once in a kernel, by all threads."""
        q_bars, k_bars, v_bars, slots = q.barriers(), k.barriers(), v.barriers(), items.slots()
        return KvBarriers(q_bars, k_bars, v_bars, others.barriers(), slots)

    @verb
    def start(bars, maps, bias_maps):
        """Prefetch the maps, and make the barriers ready; by all threads."""
        bias.prefetch(bias_maps)
        if cuda.threadIdx.x == 0:
            q.init(bars.q)
            k.init(bars.k)
            v.init(bars.v)
            others.init(bars.others)
            items.init(bars.items)
        prefetch_maps(maps, 1)
        q.start()

    @verb
    def produce(smem, maps, bias_maps, bars, counter, work):
        """Draw work items, pass them on and load what they need; by one thread."""
        options, i, piece = work.options, u32(0), u32(0)  # numbers of K's and V's tiles, and of work items
        total, number = items.total(work.extent), i32(cuda.blockIdx.x)
        while number < total:
            task, column = items.task(number, work)
            while task.m0 < task.Sq:
                items.hand(bars.items, piece, task, column)
                b = i32(0) if VARLEN else task.b
                queries.load(smem, q.acquire(bars.q, piece), maps, task, b, bars.q.full)
                tile, end = visits.last(task, options), u32(i + task.count)
                while i != end:
                    token, heads = i32(task.k_first + tile.n0), (task.h_kv, b)
                    v_corner = Corner(column, token, heads) if BY_COLUMNS else Corner(token, column, heads)
                    if V_FIRST:
                        v.load(smem, maps.v, v_corner, bars.v, i)
                    k.load(smem, maps.k, Corner(token, 0, heads), bars.k, i)
                    bias.bring(smem, bias_maps, bars.others, options, task, tile.n0, i)
                    if not V_FIRST:
                        v.load(smem, maps.v, v_corner, bars.v, i)
                    i = k.next(i)
                    tile = visits.before(tile, task, options)
                piece = u32(piece + 1)
                task = items.following(task, options)
            number = items.draw(counter, number)
        items.end(bars.items, piece)

    return members(locals(), q=q, k=k, v=v, items=items, visits=visits, queries=queries, bias=bias)


class KeyBarriers(NamedTuple):
    """The barriers of a kernel that owns keys, in shared memory."""

    kv: Any  # K and V, once
    q: Any  # tiles of Q
    do: Any  # tiles of dO
    known: Any  # lse and delta
    others: Any
    slots: Any  # of lse and delta


@noun
def q_loads(
    config: AnyDkvConfig | FusedConfig, variant: Variant, visits: QTiles | None = None, others: Noun | None = None
) -> Members:
    """The verbs. visits: if not all tiles in order. others: a noun with barriers, of an exchange between consumers.

    dO has a second barrier of Q's stages, which counts lse and delta, too. With stages of its own (`do_stages`),
    lse and delta have the second barrier.
    """
    tiles, warps = config.tiles(*widths(variant)), config.warps
    visits, others = visits or q_tiles_of(config.block_q, variant), others or NO_BARRIERS
    bias, VARLEN = bias_dkv(variant, config.bias, tiles.bias_at, warps), variant.varlen
    DO_APART = config.do_stages != config.stages
    chain = chain_of(variant.having, variant.dtype, gradient=True)
    columns = lse_delta_of(config.block_q, config.stages, chain)
    k_tile, v_tile = box_tile(tiles.k, 0, 2), box_tile(tiles.v, tiles.v_at, 2)
    q_tile, do_tile = box_tile(tiles.q, tiles.q_at, 2), box_tile(tiles.do, tiles.do_at, 2)
    kv, q = second_barrier(1, tiles.k.nbytes + tiles.v.nbytes), pipeline(config.stages, tiles.q.nbytes, warps)
    if DO_APART:
        do, part = pipeline(config.do_stages, tiles.do.nbytes, warps), second_barrier(config.stages, 0, writers=1)

        @verb
        def _load_do(smem, bars, do_map, corner, q_stage, filling):
            do_tile.load(smem, do.acquire(bars.do, filling), do_map, corner, bars.do.full)

    else:
        do = part = second_barrier(config.stages, tiles.do.nbytes + bias.nbytes, writers=1)

        @verb
        def _load_do(smem, bars, do_map, corner, q_stage, filling):
            part.expect(bars.do, filling)
            do_tile.load(smem, q_stage, do_map, corner, bars.do)

    @verb
    def barriers():
        """Return `KeyBarriers`; once in a kernel, by all threads."""
        kv_bars, q_bars, do_bars = kv.barriers(), q.barriers(), do.barriers()
        known = part.barriers() if DO_APART else do_bars
        return KeyBarriers(kv_bars, q_bars, do_bars, known, others.barriers(), columns.slots())

    @verb
    def start(bars, maps, bias_maps):
        """Prefetch the maps, and make the barriers ready; by all threads."""
        bias.prefetch(bias_maps)
        if cuda.threadIdx.x == 0:
            kv.init(bars.kv)
            q.init(bars.q)
            do.init(bars.do)
            if DO_APART:
                part.init(bars.known)
            others.init(bars.others)
        prefetch_maps(maps, 1)
        q.start()

    @verb
    def copy(smem, bars, maps, bias_maps, work, task):
        """Load K and V of a task that has tiles, and its tiles of Q, dO and the bias; by one thread."""
        i, end, tile = u32(0), visits.count(task, work), visits.first(task, work)
        token, b = i32(task.k_first + task.n0), i32(0) if VARLEN else task.b
        kv.expect(bars.kv, 0)
        k_tile.load(smem, 0, maps.k, Corner(token, 0, (task.h_kv, b)), bars.kv)
        v_tile.load(smem, 0, maps.v, Corner(token, 0, (task.h_kv, b)), bars.kv)
        while i != end:
            corner, stage = Corner(i32(task.q_first + tile.m0), 0, (tile.h, b)), q.acquire(bars.q, i)
            q_tile.load(smem, stage, maps.q, corner, bars.q.full)
            _load_do(smem, bars, maps.do, corner, stage, i)
            place = BiasPlace(task.b, tile.h, tile.m0, task.n0)
            bias.bring(smem, stage, bias_maps, work.options, place, bars.do)
            tile = visits.after(tile, i, end, task, work)
            i = q.next(i)

    @verb
    def fetch(bars, x, work, task):
        """Load lse and delta of a task's tiles; by one warp."""
        i, end, tile, own = u32(0), visits.count(task, work), visits.first(task, work), columns.own()
        while i != end:
            columns.fetch(own, x, task, tile.h, tile.m0)
            columns.put(bars.slots, q.claim(bars.q, i), own)
            part.hand(bars.known, i)
            tile = visits.after(tile, i, end, task, work)
            i = q.next(i)

    @verb
    def produce(smem, bars, maps, bias_maps, x, work, task):
        """Load all tiles of a task; by the producer warpgroup."""
        tid, end = u32(cuda.threadIdx.x) % u32(128), visits.count(task, work)
        if tid == u32(0) and end != u32(0):
            copy(smem, bars, maps, bias_maps, work, task)
        elif tid // u32(32) == u32(1):
            fetch(bars, x, work, task)

    @verb
    def wait_kv(bars):
        """Wait for K and V. Return the bytes where they begin."""
        kv.wait(bars.kv, 0)
        return k_tile.at(0), v_tile.at(0)

    @verb
    def release(bars, filling):
        """Release Q, and dO and all that shares its stages; my warp has read lse and delta."""
        part.leave()
        q.release(bars.q, filling)

    @verb
    def lse(bars, stage):
        """Return the place of lse: an array, and where my columns begin."""
        return bars.slots, columns.lse(stage)

    @verb
    def delta(bars, stage):
        return bars.slots, columns.delta(stage)

    places = {"k_at": k_tile.at, "v_at": v_tile.at, "q_at": q_tile.at, "do_at": do_tile.at}
    return members(locals(), q=q, do=do, part=part, bias=bias, visits=visits, **places)


@noun
def ring_of_lines(
    tiles: tuple[Operand, Operand],
    at: int,
    room: int,
    stages: int,
    warps: int,
    walk: BiasWalk,
    *,
    of_keys: bool,
    stays: bool,
) -> Members:
    """The verbs of a ring that two arrays share. number: of a pair of fillings.

    at: byte of the first stage. room: bytes of a stage. warps: that read. of_keys: lines are keys. stays: they may stay
    for the next tile of scores.
    """
    one, other = (loaded(tile, at, stages, warps, room) for tile in tiles)

    @verb
    def _load(smem, maps, barriers, visit, number):
        corner = Corner(visit.m0, 0, (visit.h, visit.b))
        if of_keys:
            corner = Corner(visit.n0, 0, (visit.h_kv, visit.b))
        one.load(smem, maps[0], corner, barriers, u32(2 * number))
        other.load(smem, maps[1], corner, barriers, u32(2 * number + 1))

    @verb
    def bring(smem, maps, barriers, extent, offset, options):
        """Load all lines of a block; by one thread."""
        filling = u32(0)
        number, numbers = walk.first_number(), walk.numbers(extent)
        while number < numbers:
            part, there = walk.part(number, extent), False
            visit = walk.first(part, extent, offset, options)
            while visit.v < part.end:
                if not there:
                    _load(smem, maps, barriers, visit, filling)
                    filling = one.next(filling)
                following = walk.after(visit, part, extent, offset, options)
                if stays:
                    there = walk.stays(visit, following)
                visit = following
            number = walk.next_number(number)

    @verb
    def first(barriers, number):
        """Wait for the first array's lines. Return where they begin in shared memory."""
        return one.wait(barriers, u32(2 * number))

    @verb
    def second(barriers, number):
        """Wait for the second array's lines. Return where they begin in shared memory."""
        return other.wait(barriers, u32(2 * number + 1))

    @verb
    def release_first(barriers, number, last):
        """Release what my warp has read. last: lines that stayed are read for the last time."""
        if not stays or last:
            one.release(barriers, u32(2 * number))

    @verb
    def release_second(barriers, number, last):
        if not stays or last:
            other.release(barriers, u32(2 * number + 1))

    return members(locals(), barriers=one.barriers, init=one.init, start=one.start, next=one.next)
