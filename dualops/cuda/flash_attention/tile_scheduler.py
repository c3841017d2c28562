"""Work items of tensor-core kernels: which queries or keys of which head a block has, and which tiles see them.

Items are ordered so that the longest come first, and so that blocks that run at the same time share keys or queries in
L2: heads are taken a section at a time.

Sequences of varlen may be packed: their tiles are numbered so that few numbers are unused. Those of sequence b begin at
number ends[b] // block + b. So total // block + B numbers are enough, however long the longest sequence is. A tile's
sequence is found by binary search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...spec import Problem
from ...spec.meta import itemsize
from ..compiler.backend import Members, Namespace, i32, kept_noun, noun, types, u32, verb
from ..launch.views import boundary
from .arguments import Variant, size_types, spans
from .options import chain_of

# heads of keys in a section: few, so that their inputs and sums stay in L2, but enough that not all keys of a head run
# at once, each block waiting for the previous one
LEAST_HEADS, MOST_HEADS = 2, 16


def packed_count(total: Any, block: int, B: Any) -> Any:
    """Return how many numbers the tiles of `total` tokens in B sequences have."""
    return total // block + B


@noun
def packed_tiles(block: int) -> Members:
    """The verbs of packed tiles of `block` tokens.

    ends [B + 1]: cu_seqlens of one side; of key ranges their cumulative lengths.
    """

    @verb
    def after(tokens, b):
        """Return the number of sequence b's first tile. tokens: how many are before it."""
        return i32(u32(tokens) // u32(block) + u32(b))

    @verb
    def first(ends, b):
        """Return the number of sequence b's first tile."""
        return after(boundary(ends, b), b)

    @verb
    def sequence(ends, B, number):
        """Return the sequence that has the tile with this number."""
        low, high = i32(0), i32(B - 1)
        while low < high:
            middle = i32((low + high + 1) // 2)
            if first(ends, middle) <= number:
                low = middle
            else:
                high = i32(middle - 1)
        return low

    return locals()


def packed_pieces(block: int, side: int) -> Callable[..., Any]:
    """Return the verb (number, extent, each, lengths) -> heads of a batch; head, counted through all batches; its tile;
    and how many numbers its tiles have. Numbers after the last sequence's are tiles beyond its last token.

    side: 0 for tiles of queries, 1 for tiles of keys. each: heads for each head of keys. extent.section: queries that
    L2 has room for. A section has as many heads of a sequence as have these queries.
    """
    tiles = packed_tiles(block)

    @verb
    def piece(number, extent, each, lengths):
        ends, ends_q, heads = lengths[side], lengths[0], u32(u32(extent.H) // u32(extent.group) * u32(each))
        b = tiles.sequence(ends, i32(u32(extent.heads) // u32(extent.H)), i32(u32(number) // heads))
        first = u32(tiles.first(ends, b))
        count = u32(u32(tiles.first(ends, i32(b + 1))) - first)
        Sq = max(i32(boundary(ends_q, b + 1) - boundary(ends_q, b)), i32(1))
        room = min(max(u32(extent.section) // u32(Sq), u32(LEAST_HEADS)), u32(MOST_HEADS))
        section, place = min(u32(room * u32(each)), heads), u32(u32(number) - u32(first * heads))
        nobodys = place >= u32(heads * count)
        if nobodys:
            place = u32(0)
        before = u32(place // u32(section * count) * section)  # heads of earlier sections
        place, here = u32(place - u32(before * count)), min(u32(heads - before), section)
        head, tile = u32(u32(b) * heads + u32(before + place % here)), u32(place // here)
        # the same tile from the front and from the back
        return heads, head, count if nobodys else tile, u32(u32(2) * count + u32(1)) if nobodys else count

    return piece


KEYS_IN_L2 = 32 << 20  # bytes of K and V that blocks share at a time, of H200's 50 MiB
# groups of heads in a section of a static schedule. For S = 8192 and 16384, D = 128, the kernel takes 0.97 to 0.98 of
# the time that it takes with sections of 32 MiB (H200, 2026-11-25)
STATIC_GROUPS = 2
MOST_GROUPS = 2**15  # in a section; the number of heads has 32 bits


def section_of(problem: Problem, static: bool = False) -> Any:
    """Return how many heads, of whole groups, form a section: as many as have their keys and values in L2, or few for a
    static schedule.
    """
    p = problem
    if static:
        return p.group * STATIC_GROUPS
    each = itemsize(p.dtype) * max(1, p.Sk) * (p.D + p.Dv)
    return p.group * min(max(1, KEYS_IN_L2 // each), MOST_GROUPS)


def section_of_queries(problem: Problem, *, packed: bool = False) -> Any:
    """Return how many heads of keys form a section: as many as have their queries in L2. Packed: return these
    queries.
    """
    p = problem
    of_query = itemsize(p.dtype) * (p.D + p.Dv) * p.group
    if packed:
        return KEYS_IN_L2 // of_query
    each = of_query * max(1, p.Sq)
    return min(max(1, KEYS_IN_L2 // each), MOST_GROUPS)


class Extent(NamedTuple):
    """Numbers of heads, lengths of the longest sequence, and the size of a section."""

    heads: Any  # of all batches
    section: Any  # heads, or for tiles of keys heads of keys; for packed tiles, queries
    H: Any
    group: Any
    Sq: Any
    Sk: Any
    aligned: Any


class TiledWork(NamedTuple):
    """How large a problem is, how its tiles are numbered, and how its scores are computed."""

    extent: Any  # `Extent`
    scale: Any
    lengths: Any  # of varlen: `spans`
    options: Any


def tiled_work(problem: Problem, section: Any, sizes: tuple[Any, ...]) -> TiledWork:
    """Return the work of a problem. section: as in `Extent`. sizes: of `arguments.sizes` or `sizes_by_keys`."""
    H, group, Sq, Sk, aligned, scale, lengths, options = sizes
    return TiledWork(Extent(problem.B * H, section, H, group, Sq, Sk, aligned), scale, lengths, options)


def tiled_work_type(found: Variant) -> Any:
    """Return the type of `TiledWork`."""
    *_, scale, lengths, options = size_types(found)
    return types.NamedTuple((types.NamedUniTuple(i32, len(Extent._fields), Extent), scale, lengths, options), TiledWork)


class Task(NamedTuple):
    """Queries of a head from m0 on, or of several heads of a group from h on; and the tiles of keys that some of them
    see: `count` from `first` on (`range_of`, or sm90's `visible_tiles`).
    """

    b: Any
    h: Any
    h_kv: Any
    m0: Any
    Sq: Any
    Sk: Any
    offset: Any  # position of query 0 among the keys
    q_first: Any  # tokens of varlen before this sequence
    k_first: Any
    first: Any
    count: Any
    split: Any  # of the keys (`sm90.split_kv`)


class KeysTask(NamedTuple):
    """Keys of a head from n0 on; and for each head of the group the tiles of queries from `first` to `end`, excluded,
    that see some of the keys.
    """

    b: Any
    h_kv: Any
    n0: Any
    Sq: Any
    Sk: Any
    offset: Any  # position of query 0 among the keys
    q_first: Any  # tokens of varlen before this sequence
    k_first: Any
    first: Any
    end: Any
    k_out: Any  # row of dk and dv of the sequence's first key


class Walk(Namespace):
    """The verbs of a schedule."""

    total: Callable[..., Any]  # (extent) -> how many work items there are
    task: Callable[..., Task]  # (number, work)


class Rows(Namespace):
    """Query and head of the rows of a tile of queries."""

    query: Callable[..., Any]  # (task, row) -> number in the sequence
    head: Callable[..., Any]  # (task, row)
    there: Callable[..., Any]  # (task, row) -> whether the query exists


@verb
def _query(task, row):
    return i32(task.m0 + row)


@verb
def _head(task, row):
    return task.h


@verb
def _there(task, row):
    return task.m0 + row < task.Sq


ROWS_OF_A_HEAD = Rows(query=_query, head=_head, there=_there)  # row r is query m0 + r


@verb
def place_in_list(numbers, row, count, tile):
    """Return the place of the first tile from `tile` on in a row of a block mask, or the list's end. row: where the row
    begins.
    """
    low, high = i32(0), count
    while low < high:
        middle = i32((low + high) // 2)
        if numbers[row + 1 + middle] // 2 < tile:
            low = i32(middle + 1)
        else:
            high = middle
    return low


@kept_noun
def range_of(block_kv: int) -> Members:
    """The verbs of tiles of block_kv keys, one after another."""

    @verb
    def between(b, h, m0, n_first, n_end, options):
        """Return the first of the tiles that have some of these keys, and how many there are."""
        first = i32(n_first // block_kv)
        return first, max(i32((n_end + (block_kv - 1)) // block_kv - first), i32(0))

    @verb
    def keys(task):
        """Return first and end of the keys of all tiles of a task."""
        return i32(task.first * block_kv), i32((task.first + i32(task.count)) * block_kv)

    return locals()


def pieces_of_longest(block: int, side: int) -> Callable[..., Any]:
    """Return the verb (number, extent, each, lengths) -> heads of a batch; head, counted through all batches; its tile;
    and how many tiles a head has, as many as for the longest sequence. side, each: as in `packed_pieces`.
    """

    @verb
    def piece(number, extent, each, lengths):
        blocks = u32(((extent.Sk if side else extent.Sq) + (block - 1)) // block)
        heads = u32(extent.H) // u32(extent.group) if side else u32(extent.H)
        all_heads = u32(extent.heads) // u32(extent.group) if side else u32(extent.heads)
        section = min(u32(extent.section), all_heads)
        before = u32(u32(number) // u32(section * blocks) * section)  # heads of earlier sections
        place, here = u32(number) - u32(before * blocks), min(all_heads - before, section)
        return heads, u32(before + place % here), u32(place // here), blocks

    return piece


def walk_by_queries(
    config: Any,
    variant: Variant,
    between: Callable[..., Any] | None = None,
    *,
    gradient: bool = False,
    first_first: bool = False,
    packed: bool = False,
) -> Walk:
    """The schedule of tiles of queries: a section of heads at a time, first the last queries of all its heads, then
    those before them. With a causal mask, the last queries have the most work.

    config: with block_q and block_kv. between: as in `range_of`, if tiles are not those of a range. first_first: the
    first queries come first. packed: sequences are packed (`packed_pieces`), so that there are no more items than for
    all tokens.
    """
    block_q, tiles_between = config.block_q, between or range_of(config.block_kv).between
    span, pieces = spans(variant.varlen), (packed_pieces if packed else pieces_of_longest)(block_q, 0)
    chain = chain_of(variant.having, variant.dtype, gradient=gradient)

    @verb
    def q_blocks(extent):
        return u32((extent.Sq + (block_q - 1)) // block_q)

    @verb
    def total(extent):
        return i32(u32(extent.heads) * q_blocks(extent))

    @verb
    def task(number, work):
        extent, lengths, options = work.extent, work.lengths, work.options
        _, head, m_block, blocks = pieces(number, extent, extent.group, lengths)
        if not first_first:
            m_block = u32(blocks - 1 - m_block)
        m0 = i32(m_block * u32(block_q))
        b, h = i32(u32(head) // u32(extent.H)), i32(u32(head) % u32(extent.H))
        q_first, k_first, Sq, Sk = span.of_batch(lengths, b, extent.Sq, extent.Sk)
        offset = i32(extent.aligned * (Sk - Sq))
        n_first, n_end = chain.key_range(options, m0, min(m0 + block_q, Sq), offset, Sk)
        first, count = tiles_between(b, h, m0, n_first, n_end, options)
        h_kv = i32(u32(h) // u32(extent.group))
        return Task(b, h, h_kv, m0, Sq, Sk, offset, q_first, k_first, first, u32(count), i32(0))

    return Walk.from_locals(locals())


def walk_by_keys(
    config: Any, variant: Variant, *, last_first: bool = False, packed: bool = False
) -> Callable[..., KeysTask]:
    """Return the verb (number, work) -> the task of that number: a section of heads at a time, first the first keys,
    which most queries see under a causal mask. config: with block_kv and block_q. last_first: the last keys come first.
    packed: as in `walk_by_queries`.
    """
    block_kv, block_q, span = config.block_kv, config.block_q, spans(variant.varlen)
    pieces = (packed_pieces if packed else pieces_of_longest)(block_kv, 1)
    chain = chain_of(variant.having, variant.dtype, gradient=True)

    @verb
    def task(number, work):
        extent, lengths, options = work.extent, work.lengths, work.options
        heads_kv, head, n_block, blocks = pieces(number, extent, i32(1), lengths)
        if last_first:
            n_block = u32(blocks - 1 - n_block)
        n0 = i32(n_block * u32(block_kv))
        b, h_kv = i32(head // heads_kv), i32(head % heads_kv)
        q_first, k_first, Sq, Sk = span.of_batch(lengths, b, extent.Sq, extent.Sk)
        offset = i32(extent.aligned * (Sk - Sq))
        m_first, m_end = chain.query_range(options, n0, min(n0 + block_kv, Sk), offset, Sq)
        first = i32(m_first // block_q * block_q)
        end = i32(m_end) if m_end > m_first else first
        return KeysTask(b, h_kv, n0, Sq, Sk, offset, q_first, k_first, first, end, span.key_out(lengths, b))

    return task


class KeyRows(NamedTuple):
    """Rows of dk or dv, as `output` stores those of a tile of queries."""

    b: Any
    h: Any
    m0: Any
    Sq: Any
    q_first: Any


@verb
def key_rows_of(task):
    """Return the rows of a task's keys."""
    return KeyRows(task.b, task.h_kv, task.n0, task.Sk, task.k_out)


@verb
def tile_count(task, group, block_q):
    """Return how many tiles of queries of all heads of a group see some of the keys of a task."""
    return u32(u32(group) * (u32(task.end - task.first + (block_q - 1)) // u32(block_q)))


@verb
def tile_after(task, h, m0, block_q):
    """Return head and first query of the tile after this one: of the same head, or the first tile of the next head."""
    m0 = i32(m0 + block_q)
    return (i32(h), m0) if m0 < task.end else (i32(h + 1), i32(task.first))
