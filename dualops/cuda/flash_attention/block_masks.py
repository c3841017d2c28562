"""block_mask: which tiles of keys a mask_mod shows to a tile of queries. Dong et al. 2024, arXiv:2412.05496.

    states, one warp per tile                         lists, one thread per tile of queries
    1  evaluate all pairs of TILE queries and keys    3  for each tile of keys that is not empty, in order:
    2  the state: none, some or all of them are seen     append 2 * tile + whether all are seen; then the count

A state is written where the tile's entry would be if all tiles were listed. So only the lists grow with Sq * Sk: 4
bytes for TILE * TILE pairs. A list never overwrites a state that was not read, since it has at most one entry for each
state.

The gradient needs the transposed lists, for dk and dv: the tiles of queries that see some keys of a tile of keys.

    states, a thread for two tiles                    lists, built from them in the same way
    1  find the tile of keys in the list of the       2  for each tile of queries that is not empty, in order:
       tile of queries, by binary search                 append 2 * number + whether all are seen; then the count

    lists [B or 1, Hkv or 1, tiles of keys, 1 + group * tiles of queries]

A row has the tiles of all heads that share the keys, one head after the other: tile m of the group's head g has number
g * (tiles of queries) + m. Tiles that a window hides are left out. The lists are a workspace of the gradient: 4 bytes
for TILE * TILE pairs of each head, or of each group if all heads have the same mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.attention import BLOCKS, SPEC_BLOCKS as SPEC, BlockMask, UserFunction, as_they_are
from ...spec.attention.blocks import EMPTY, FULL, MIXED, TILE, Args, args as given_lists, kept, sizes_of, tiles_of
from ...spec.meta import Strided, contiguous_strides
from ..compiler.backend import SIMULATED, Kernel, builds, cuda, f32, i32, i64, kernel, types
from ..launch.arrays import adapter_of, cdiv
from ..launch.device import Device
from ..launch.operation import Operation
from ..launch.plans import Choice, stream_of
from ..launch.step import Step
from ..launch.views import strided, whole
from ..tile.rows import lane_reductions
from ..user_functions import typed
from .arguments import Work, sizes
from .options import Having, arguments, chain_of, having
from .tile_scheduler import place_in_list

THREADS = 256
WARPS = THREADS // 32
LISTS_TYPE = strided("int32", 4)


def block_mask(
    mask_mod: Any, B: int | None, H: int | None, Sq: int, Sk: int, *, like: Any, stream: Any = None
) -> BlockMask:
    """Return which tiles of 128 x 128 (query, key) a mask_mod hides, cuts and shows; Dong et al. 2024,
    arXiv:2412.05496.

    mask_mod: (b, h, i, j) -> whether query i sees key j, as in `flash_attention`. B, H: the numbers of batches and
        heads that it distinguishes; None or 1 if it is the same for all, and is then called with number 0. Sq, Sk:
        queries and keys. like: an array such as q; the mask gets its library and device. stream: as in
        `flash_attention`; to use the mask on another stream, wait for this one.
    Returns a BlockMask, which `flash_attention` takes in addition to the function. Its `lists` [B, H, tiles of queries,
    1 + tiles of keys] of int32 say how many tiles of keys to visit, and which. It needs 4 bytes for each tile of pairs,
    and no other memory. Calls with an equal function, the same sizes, device and stream return the same object while it
    exists. Raises TypeError and ValueError for a wrong call.
    """
    _, mask_mod = as_they_are(None, mask_mod)
    sizes = sizes_of(B, H, Sq, Sk)
    adapter = adapter_of(like, SPEC.name, "like")
    handle = adapter.stream((like,)) if stream is None and not SIMULATED else stream_of(SPEC.name, stream or 0)
    place = (type(adapter), adapter.meta(like).device, handle)
    return kept(mask_mod, sizes, place, lambda: forward((like,), (mask_mod, *sizes), None, None, stream))


@builds
def build_states(mask_mod: UserFunction) -> Kernel:
    """block_mask_states(lists, tiles, H, Sq, Sk, q_tiles, kv_tiles): the states of all `tiles`."""
    sees, lanes = typed(mask_mod, f32), lane_reductions(f32, 32)

    @kernel(LISTS_TYPE, i64, *[i64] * 5, threads=THREADS)
    def block_mask_states(lists, tiles, H, Sq, Sk, q_tiles, kv_tiles):
        lane, number = i64(cuda.threadIdx.x % 32), i64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
        if number < tiles:
            n, row = number % kv_tiles, number // kv_tiles
            m, head = row % q_tiles, row // q_tiles
            b, h = head // H, head % H
            rows, columns = min(Sq - m * TILE, TILE), min(Sk - n * TILE, TILE)
            seen = i32(0)
            for pair in range(lane, rows * columns, 32):
                if sees(b, h, m * TILE + pair // columns, n * TILE + pair % columns):
                    seen += i32(1)
            total = i32(lanes.sum(f32(seen)))  # up to TILE * TILE, which float32 counts
            if lane == 0:
                state = i32(EMPTY if total == 0 else FULL if total == rows * columns else MIXED)
                steps = lists.strides
                lists.data[b * steps[0] + h * steps[1] + m * steps[2] + (n + 1) * steps[3]] = state

    return block_mask_states


@builds
def build_lists() -> Kernel:
    """block_mask_lists(lists, rows, H, q_tiles, kv_tiles): lists of `rows` tiles of queries, from their states."""

    @kernel(LISTS_TYPE, i64, *[i64] * 3, threads=THREADS)
    def block_mask_lists(lists, rows, H, q_tiles, kv_tiles):
        row = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if row < rows:
            m, head, steps = row % q_tiles, row // q_tiles, lists.strides
            start = head // H * steps[0] + head % H * steps[1] + m * steps[2]
            count = i64(0)
            for n in range(kv_tiles):
                state = lists.data[start + (n + 1) * steps[3]]
                if state != EMPTY:
                    count += 1
                    lists.data[start + count * steps[3]] = i32(2 * n + (state == FULL))
            lists.data[start] = i32(count)
            for n in range(count, kv_tiles):
                lists.data[start + (n + 1) * steps[3]] = i32(0)

    return block_mask_lists


def _choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    yield Choice("simt", None, "one warp per tile", partial(_steps, problem, results))


def _steps(problem: Problem, results: Mapping[str, ArrayMeta]) -> list[Step]:
    p, lists, rows = problem, whole(results, "lists", 4), problem.B * problem.H * problem.q_tiles
    steps = [Step(build_lists(), (cdiv(rows, THREADS),), (lists, rows, p.H, p.q_tiles, p.kv_tiles))]
    if p.kv_tiles:
        tiles = rows * p.kv_tiles
        args = (lists, tiles, p.H, p.Sq, p.Sk, p.q_tiles, p.kv_tiles)
        steps.insert(0, Step(build_states(p.mask_mod), (cdiv(tiles, WARPS),), args))
    return steps


forward = Operation(SPEC, rungs=(_choices,))


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
    """block_mask_states_by_keys(by_keys, lists, pairs, options): the state of each pair of tiles. pairs: `TilePairs`.

    ranges: the options that hide whole tiles. options: their arguments.
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
    """How many lists there are, along batch, head of keys and tile of keys, and how many tiles each can name."""

    B: Any
    heads: Any
    kv_tiles: Any
    tiles: Any


def shape_of(problem: Problem) -> ListsShape:
    p, (B, H, q_tiles, _) = problem, problem.arrays[BLOCKS.name].shape
    return ListsShape(B, 1 if H == 1 else p.H // p.group, tiles_of(p.Sk), p.group * q_tiles)


def workspace_by_keys(problem: Problem) -> dict[str, ArrayMeta]:
    """Return the transposed lists of a block mask, if the problem has one."""
    if BLOCKS.name not in problem.arrays:
        return {}
    B, heads, kv_tiles, tiles = shape_of(problem)
    shape = (B, heads, kv_tiles, 1 + tiles)
    return {NAME: ArrayMeta(shape, "int32", contiguous_strides(shape), problem.arrays[BLOCKS.name].device, 0)}


def steps_by_keys(problem: Problem) -> Sequence[Step]:
    """Return the launches that build them."""
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
    """Return the work of a problem, with the transposed lists instead of the block mask's own."""
    work = sizes(problem)
    if BLOCKS.name not in problem.arrays:
        return work
    B, heads, _, _ = shape_of(problem)
    steps = workspace_by_keys(problem)[NAME].strides
    own = Args(Strided(NAME, (0 if B == 1 else steps[0], 0 if heads == 1 else steps[1], steps[2])))
    return work._replace(options=tuple(own if isinstance(given, Args) else given for given in work.options))
