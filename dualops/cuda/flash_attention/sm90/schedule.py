"""What a block of attention's sm90 rung computes next, and when its warpgroups start products.

`work_items`: one thread draws work items and passes them to the others.

    producer                                    consumers
    task, column = items.task(number, work)
    items.hand(slots, n, task, column)          task, column = items.take(slots, n, extent)
    number = items.draw(counter, number)

A block begins with the item of its own number, and draws later ones from a counter in global memory that was 0, so that
faster blocks do more. If all items cost the same, the schedule is static: each block has its share, and no launch
clears a counter (attention of 512 and 2048 keys is 2 to 4 % faster so). Producer and consumers count items by `n`; each
has SIZE numbers, in one of `places`. No barrier says that a place was read: before it passes item n on, the producer
has waited until all consumers released something of item n - places, as when it fills one of places - 1 stages for n -
1.

If registers can't hold a result of all of V's columns, slices of them are items of their own, with the same queries.
Each computes the scores again. They follow one another, and find Q and K in L2.

`turns`: while one warpgroup starts its products, the others do arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ....spec import ArrayMeta, Problem
from ...compiler.backend import Members, Noun, cuda, i32, i64, kept_noun, members, noun, u32, u64, verb
from ...launch.device_words import build_writer
from ...launch.step import Step
from ...ptx.mbarrier import mbarrier_arrive, mbarrier_init, mbarrier_wait_cta
from ...ptx.memory import atom_add_i64
from ...ptx.warp import bar_arrive, bar_sync
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ..arguments import Variant, is_varlen, spans
from ..options import chain_of
from ..tile_scheduler import Task, walk_by_queries
from .config import BLOCK_MASK, Sm90Config
from .split_kv import splits_of
from .visible_tiles import KvTiles


class Slots(NamedTuple):
    """Numbers in flight, in shared memory, and the mbarriers that report their arrival."""

    numbers: Any  # [places * SIZE]
    full: Any


SIZE = len(Task._fields) + 1  # numbers of an item
M0 = Task._fields.index("m0")
WorkItems = Noun  # of `work_items`


@verb
def _get_one(numbers, at):
    return shfl_idx_i32(numbers[at], 0, FULL_WARP)


@verb
def _nothing_more(task, options):
    b, h, h_kv, m0, offset, first = task.b, task.h, task.h_kv, i32(task.Sq), task.offset, task.first
    return Task(b, h, h_kv, m0, task.Sq, task.Sk, offset, task.q_first, task.k_first, first, task.count, task.split)


@noun
def work_items(
    walk: Noun,
    places: int,
    *,
    varlen: bool = True,
    split: bool = False,
    slices: int = 1,
    width: int = 0,
    following: Callable[..., Any] = _nothing_more,
    static: bool = False,
    word: int = 0,
) -> Members:
    """The verbs. Fields of a task that are the same for all items of a kernel are not read, and take no register.

    walk: with the verbs `total` and `task` (`tile_scheduler.walk_by_queries`).
    varlen: sequences have lengths of their own. split: keys are split. slices: of V's columns, each of this width.
    following: the verb (task, options) -> what a block has next for the same queries, with m0 = Sq if there is nothing.
    static: the schedule is static, and the counter unused. word: which of the counter's words is this kernel's.
    """
    COUNT, NUMBERS, WORD = u32(places), places * SIZE, i64(word)
    VARLEN, SPLIT, SLICED, SLICES = varlen, split, slices > 1, u32(slices)

    @verb
    def slots():
        """Return the shared arrays; once in a kernel, by all threads."""
        return Slots(cuda.shared.array(NUMBERS, i32), cuda.shared.array(places, u64))

    @verb
    def init(slots):
        """Initialize the barriers; by one thread, before all threads synchronize."""
        for place in range(places):
            mbarrier_init(slots.full, place, 1)

    @verb
    def total(extent):
        """Return how many items there are."""
        return i32(walk.total(extent) * slices)

    @verb
    def task(number, work):
        """Return task and column of an item."""
        column = i32(0)
        if SLICED:
            number, column = i32(u32(number) // SLICES), i32(u32(number) % SLICES * u32(width))
        return walk.task(number, work), column

    @verb
    def draw(counter, number):
        """Return the number of the block's next item."""
        if static:
            return i32(number + cuda.gridDim.x)
        return i32(cuda.gridDim.x + atom_add_i64(counter, WORD, i64(1)))

    @verb
    def _place(n):
        return i32(u32(n) % COUNT * SIZE)

    @verb
    def hand(slots, n, task, column):
        """Pass an item on; by one thread."""
        numbers, at = slots.numbers, _place(n)
        numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3] = task.b, task.h, task.h_kv, task.m0
        numbers[at + 4], numbers[at + 5], numbers[at + 6] = task.Sq, task.Sk, task.offset
        numbers[at + 7], numbers[at + 8], numbers[at + 9] = task.q_first, task.k_first, task.first
        numbers[at + 10], numbers[at + 11], numbers[at + 12] = i32(task.count), task.split, column
        mbarrier_arrive(slots.full, i32(u32(n) % COUNT))

    @verb
    def end(slots, n):
        """Say that no item follows; by one thread."""
        slots.numbers[_place(n) + M0] = i32(-1)
        mbarrier_arrive(slots.full, i32(u32(n) % COUNT))

    @verb
    def again(slots, n, extent):
        """Return task and column of an item that was taken."""
        numbers, at = slots.numbers, _place(n)
        b, h = _get_one(numbers, at), _get_one(numbers, at + 1)
        h_kv, m0 = _get_one(numbers, at + 2), _get_one(numbers, at + 3)
        Sq, Sk, offset = extent.Sq, extent.Sk, i32(extent.aligned * (extent.Sk - extent.Sq))
        q_first, k_first, split, column = i32(0), i32(0), i32(0), i32(0)
        if VARLEN:
            Sq, Sk, offset = _get_one(numbers, at + 4), _get_one(numbers, at + 5), _get_one(numbers, at + 6)
            q_first, k_first = _get_one(numbers, at + 7), _get_one(numbers, at + 8)
        first, count = _get_one(numbers, at + 9), u32(_get_one(numbers, at + 10))
        if SPLIT:
            split = _get_one(numbers, at + 11)
        if SLICED:
            column = _get_one(numbers, at + 12)
        return Task(b, h, h_kv, m0, Sq, Sk, offset, q_first, k_first, first, count, split), column

    @verb
    def take(slots, n, extent):
        """Return task and column of an item, once it is there. After the last, m0 is negative."""
        mbarrier_wait_cta(slots.full, i32(u32(n) % COUNT), u32(n) // COUNT & 1)
        return again(slots, n, extent)

    return members(locals(), following=following)


FIRST_BARRIER = 4  # of the named barriers; the first ones are `epilogue`'s


@kept_noun
def turns(count: int) -> Members:
    """The verbs by which `count` warpgroups take turns, number 0 first. For one warpgroup they do nothing. All threads
    of a warpgroup call them, and each warpgroup equally often.
    """

    @verb
    def begin(warpgroup):
        """Begin before the first turn, once."""
        if count > 1 and warpgroup == count - 1:
            bar_arrive(FIRST_BARRIER, 256)

    @verb
    def take(warpgroup):
        """Wait for my turn."""
        if count > 1:
            bar_sync(i32(FIRST_BARRIER + warpgroup), 256)

    @verb
    def give(warpgroup):
        """Begin the next one's turn."""
        if count > 1:
            bar_arrive(i32(FIRST_BARRIER + u32(warpgroup + 1) % u32(count)), 256)

    return locals()


def is_static(config: Sm90Config, variant: Variant) -> bool:
    """Return whether all items cost the same: each has all keys of a sequence, and all sequences have the same
    length.
    """
    limits = {"band", BLOCK_MASK} & {*variant.having.names}
    return not (config.split or variant.varlen or limits)


def counter_of(problem: Problem, static: bool) -> dict[str, ArrayMeta]:
    """Return the array that counts drawn items, unless the schedule is static; varlen has two launches."""
    count = 1 + is_varlen(problem)
    return {} if static else {"counter": ArrayMeta((count,), "int64", (1,), problem.arrays["q"].device, 0)}


def cleared(count: int) -> Step:
    """Return the launch that clears `count` of the counter's words."""
    return Step(build_writer(count), (1,), ("counter", 0, (0,) * count))


def after_counter(step: Step, static: bool) -> list[Step]:
    """Return a launch whose blocks draw from the counter, after the launch that clears it."""
    return [step] if static else [cleared(1), step]


def items_of(config: Sm90Config, variant: Variant, visits: KvTiles) -> WorkItems:
    """The work items of forward's kernel."""
    of_splits = split_walk(config, variant)
    return work_items(
        of_splits if config.split else walk_by_queries(config, variant, visits.between),
        config.q_stages + 1,
        varlen=variant.varlen,
        split=config.split,
        slices=config.slices,
        width=config.columns(variant.Dv),
        following=of_splits.following if config.serial else _nothing_more,
        static=is_static(config, variant),
        word=int(config.split and variant.varlen),  # 1 if keys of varlen are split: another launch has word 0
    )


@noun
def split_walk(config: Sm90Config, variant: Variant) -> Members:
    """The verbs of the schedule of split keys. Neighbouring items have the same keys, as heads of a group do, then keys
    that follow.

    A sequence has as many splits as its own keys need. Splits beyond that begin after its last query.
    """
    QUERIES, HEADS, BLOCK_KV = config.queries, u32(config.heads), config.block_kv
    SERIAL = config.serial  # an item has all splits
    span, split, chain = spans(variant.varlen), splits_of(BLOCK_KV), chain_of(variant.having, variant.dtype)

    @verb
    def _parts(extent):
        return u32(1) if SERIAL else u32(split.most(extent.Sk))

    @verb
    def _q_blocks(extent):
        return u32((extent.Sq + (QUERIES - 1)) // QUERIES)

    @verb
    def _tiles_of(options, m0, Sq, Sk, offset, part):
        """Return first and count of the tiles of this split that some queries see."""
        n_first, n_end = chain.key_range(options, m0, min(m0 + QUERIES, Sq), offset, Sk)
        tiles = split.tiles(Sk)
        first = max(i32(n_first // BLOCK_KV), i32(part * tiles))
        end = min(i32((n_end + (BLOCK_KV - 1)) // BLOCK_KV), i32(part * tiles + tiles))
        return first, u32(max(i32(end - first), i32(0)))

    @verb
    def total(extent):
        return i32(u32(extent.heads) // HEADS * _q_blocks(extent) * _parts(extent))

    @verb
    def task(number, work):
        extent, lengths, options = work.extent, work.lengths, work.options
        blocks, most = _q_blocks(extent), _parts(extent)
        m0 = i32(u32(number) % blocks * u32(QUERIES))
        part, head = i32(u32(number) // blocks % most), i32(u32(number) // blocks // most * HEADS)
        b, h = i32(u32(head) // u32(extent.H)), i32(u32(head) % u32(extent.H))
        q_first, k_first, Sq, Sk = span.of_batch(lengths, b, extent.Sq, extent.Sk)
        if part >= split.count(Sk):
            m0 = i32(Sq)
        offset = i32(extent.aligned * (Sk - Sq))
        first, count = _tiles_of(options, m0, Sq, Sk, offset, part)
        h_kv = i32(u32(h) // u32(extent.group))
        return Task(b, h, h_kv, m0, Sq, Sk, offset, q_first, k_first, first, count, part)

    @verb
    def following(task, options):
        """Return the next split of a serial Config's item."""
        part, m0 = i32(task.split + 1), task.m0
        first, count = _tiles_of(options, m0, task.Sq, task.Sk, task.offset, part)
        if part >= split.count(task.Sk):
            m0 = i32(task.Sq)
        b, h, h_kv, offset = task.b, task.h, task.h_kv, task.offset
        return Task(b, h, h_kv, m0, task.Sq, task.Sk, offset, task.q_first, task.k_first, first, count, part)

    return locals()
