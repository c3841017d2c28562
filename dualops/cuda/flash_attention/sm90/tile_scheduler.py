"""What a block of attention's sm90 rung has next: queries of a head (`..tile_scheduler`), or a part of few queries'
keys; and how it is handed on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import i32, u32, verb
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ..arguments import Variant, spans
from ..options import OptionChain
from ..tile_scheduler import Task, Walk, walk_by_queries
from .config import Sm90Config
from .kv_tiles import KvTiles
from .split_kv import splits_of

SIZE = len(Task._fields) + 1  # numbers of what is handed on
M0 = Task._fields.index("m0")


@verb
def put(numbers, at, task, column):
    """A task, and the first of V's columns."""
    numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3] = task.b, task.h, task.h_kv, task.m0
    numbers[at + 4], numbers[at + 5], numbers[at + 6] = task.Sq, task.Sk, task.offset
    numbers[at + 7], numbers[at + 8], numbers[at + 9] = task.q_first, task.k_first, task.first
    numbers[at + 10], numbers[at + 11], numbers[at + 12] = i32(task.count), task.split, column


@verb
def put_end(numbers, at):
    """There is none."""
    numbers[at + M0] = i32(-1)


@verb
def get_one(numbers, at):
    return shfl_idx_i32(numbers[at], 0, FULL_WARP)


def get_of(*, varlen: bool = True, split: bool = True, sliced: bool = True) -> Callable[..., Any]:
    """The verb (numbers, at, extent) -> task and column, known to the assembler as the same for all lanes; m0 is below
    0 where there is none. What all pieces of a kernel have alike need not be read, and takes no register then: lengths,
    unless it is of varlen, parts of keys, unless these are split, columns, unless V's are sliced.
    """
    VARLEN, SPLIT, SLICED = varlen, split, sliced

    @verb
    def get(numbers, at, extent):
        b, h = get_one(numbers, at), get_one(numbers, at + 1)
        h_kv, m0 = get_one(numbers, at + 2), get_one(numbers, at + 3)
        Sq, Sk, offset = extent.Sq, extent.Sk, i32(extent.aligned * (extent.Sk - extent.Sq))
        q_first, k_first, split, column = i32(0), i32(0), i32(0), i32(0)
        if VARLEN:
            Sq, Sk, offset = get_one(numbers, at + 4), get_one(numbers, at + 5), get_one(numbers, at + 6)
            q_first, k_first = get_one(numbers, at + 7), get_one(numbers, at + 8)
        first, count = get_one(numbers, at + 9), u32(get_one(numbers, at + 10))
        if SPLIT:
            split = get_one(numbers, at + 11)
        if SLICED:
            column = get_one(numbers, at + 12)
        return Task(b, h, h_kv, m0, Sq, Sk, offset, q_first, k_first, first, count, split), column

    return get


def walk_of(config: Sm90Config, variant: Variant, chain: OptionChain, visits: KvTiles) -> Walk:
    """The verbs of a kernel."""
    if config.split:
        return _by_splits(config, variant, chain)
    return walk_by_queries(config.block_q, visits.between, variant.varlen, chain)


def _by_splits(config: Sm90Config, variant: Variant, chain: OptionChain) -> Walk:
    """Pieces are numbered so that neighbours have the same keys, as heads of a group have, then keys that follow.

    A sequence has as many splits as its own keys make: those beyond begin behind its last query.
    """
    QUERIES, HEADS, BLOCK_KV = config.queries, u32(config.heads), config.block_kv
    SERIAL = config.serial  # a piece has all splits, which follow the first
    span, split, tiles_of = spans(variant.varlen), splits_of(BLOCK_KV), _tiles_of_split(config, chain)

    @verb
    def parts(extent):
        return u32(1) if SERIAL else u32(split.most(extent.Sk))

    @verb
    def q_blocks(extent):
        return u32((extent.Sq + (QUERIES - 1)) // QUERIES)

    @verb
    def total(extent):
        return i32(u32(extent.heads) // HEADS * q_blocks(extent) * parts(extent))

    @verb
    def task(number, extent, lengths, options):
        blocks, most = q_blocks(extent), parts(extent)
        m0 = i32(u32(number) % blocks * u32(QUERIES))
        part, head = i32(u32(number) // blocks % most), i32(u32(number) // blocks // most * HEADS)
        b, h = i32(u32(head) // u32(extent.H)), i32(u32(head) % u32(extent.H))
        q_first, k_first, Sq, Sk = span.of_batch(lengths, b, extent.Sq, extent.Sk)
        if part >= split.count(Sk):
            m0 = i32(Sq)
        offset = i32(extent.aligned * (Sk - Sq))
        first, count = tiles_of(options, m0, Sq, Sk, offset, part)
        h_kv = i32(u32(h) // u32(extent.group))
        return Task(b, h, h_kv, m0, Sq, Sk, offset, q_first, k_first, first, count, part)

    return Walk.from_locals(locals())


def following_of(config: Sm90Config, chain: OptionChain) -> Callable[..., Any]:
    """The verb (task, options) -> what a block has next of the same queries: of a serial Config the next split of the
    keys. m0 is Sq where there is nothing.
    """
    if not config.serial:
        return _nothing_more
    split, tiles_of = splits_of(config.block_kv), _tiles_of_split(config, chain)

    @verb
    def following(task, options):
        part, m0 = i32(task.split + 1), task.m0
        first, count = tiles_of(options, m0, task.Sq, task.Sk, task.offset, part)
        if part >= split.count(task.Sk):
            m0 = i32(task.Sq)
        b, h, h_kv, offset = task.b, task.h, task.h_kv, task.offset
        return Task(b, h, h_kv, m0, task.Sq, task.Sk, offset, task.q_first, task.k_first, first, count, part)

    return following


@verb
def _nothing_more(task, options):
    b, h, h_kv, m0, offset, first = task.b, task.h, task.h_kv, i32(task.Sq), task.offset, task.first
    return Task(b, h, h_kv, m0, task.Sq, task.Sk, offset, task.q_first, task.k_first, first, task.count, task.split)


def _tiles_of_split(config: Sm90Config, chain: OptionChain) -> Callable[..., Any]:
    """The verb (options, m0, Sq, Sk, offset, part) -> first, count: tiles of the part that some queries see."""
    QUERIES, BLOCK_KV, split = config.queries, config.block_kv, splits_of(config.block_kv)

    @verb
    def tiles_of(options, m0, Sq, Sk, offset, part):
        n_first, n_end = chain.key_range(options, m0, min(m0 + QUERIES, Sq), offset, Sk)
        tiles = split.tiles(Sk)
        first = max(i32(n_first // BLOCK_KV), i32(part * tiles))
        end = min(i32((n_end + (BLOCK_KV - 1)) // BLOCK_KV), i32(part * tiles + tiles))
        return first, u32(max(i32(end - first), i32(0)))

    return tiles_of
