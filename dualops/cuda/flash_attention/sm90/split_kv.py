"""Split keys, for few queries: how keys are split, and how the results of splits are merged.

The split depends on the number of keys alone, so that no row depends on its batch. A split has LEAST_TILES tiles of
keys, or as many as needed for at most MOST_SPLITS splits. Splits are counted from key 0 on, masked or not. Slightly
more keys than MOST_SPLITS splits of LEAST_TILES need fewer splits: so the longest sequence of a call need not have the
most splits.

Results of a split, o and lse of a row, are float32. They are merged in order. Milakov & Gimelshein 2018
(arXiv:1805.02867), Alg. 3, for whole splits:

    most' = max(most, lse_s)
    share = exp(most - most'),  weight = exp(lse_s - most' + rest_s)        rest_s: the rounding error of lse_s
    total' = total * share + weight,  acc' = acc * share + weight * o_s

Then o = acc / total and lse = most + ln(total). A sink comes before the first split.

`build_merge` merges the results of several blocks: a warp has a row, a lane columns and every 32nd split's shares. With
`serial_of`, a block has all splits of its rows in turn, and merges them with the same roundings, so with the same bits.
It serves varlen calls with short and long sequences: how many are short is unknown, and memory for all that may be
would be large. A block keeps the state of its own rows in memory, [size, 128], each thread its own numbers: most and
total of two rows, and its part of acc.
"""

from __future__ import annotations

from typing import Any

from ...compiler.backend import (
    Kernel,
    Members,
    builds,
    cuda,
    f32,
    i32,
    i64,
    kept_noun,
    kernel,
    members,
    noun,
    pointer,
    types,
    verb,
)
from ...launch.views import start, strided
from ...tile.numbers import fma_rn, numbers
from ...tile.rows import FULL_WARP, shfl_idx_f32
from ...tile.storage import storage
from ...tile.unrolled import nothing
from ...tile.warpgroup import ROWS
from ..arguments import Variant, array_type, spans, statistic_type
from ..fragment_scores import LANES, my_row
from ..options import OptionChain, chain_of
from ..tile_scheduler import tiled_work_type
from .config import Sm90Config
from .visible_tiles import Queries

LEAST_TILES = 4
OF_LANE = 2  # splits of each lane that merges
MOST_SPLITS = 32 * OF_LANE
PARTS_TYPE = strided("float32", 4)  # results of splits, along split, batch, head and token


def most_splits(keys: Any, block_kv: int) -> Any:
    """Return the most splits of up to this many keys. Fewer keys may have more splits."""
    each = LEAST_TILES * block_kv
    return min((keys + (each - 1)) // each, MOST_SPLITS)


@kept_noun
def splits_of(block_kv: int) -> Members:
    """The verbs of a number of keys, for a kernel's tiles."""
    MOST, LEAST = block_kv * MOST_SPLITS, block_kv * LEAST_TILES

    @verb
    def tiles(keys):
        """Return the number of tiles of a split."""
        return max(i32(LEAST_TILES), i32((keys + (MOST - 1)) // MOST))

    @verb
    def count(keys):
        """Return the number of splits."""
        each = i32(tiles(keys) * block_kv)
        return i32((keys + (each - 1)) // each)

    @verb
    def most(keys):
        """Return the most splits of up to this many keys."""
        return min(i32((keys + (LEAST - 1)) // LEAST), i32(MOST_SPLITS))

    return locals()


@verb
def part_start(x, split, b, h, token):
    """Return where a split's result of a row begins."""
    return i64(split) * x.strides[0] + i64(b) * x.strides[1] + i64(h) * x.strides[2] + i64(token) * x.strides[3]


NUM = numbers(f32)
ZERO, ONE = NUM.zero, NUM.one


@verb
def total_of(sink):
    """Return total before the first split, where most is the sink, -inf if there is none."""
    return NUM.exp(sink - NUM.base(sink))


@verb
def shares_of(before, most, lse, rest):
    """Return share and weight. most: the maximum with this split. before: without it."""
    base = NUM.base(most)
    return NUM.exp(before - base), NUM.exp(lse - base + rest)


@verb
def join(acc, share, weight, o):
    """Return the new acc; or the new total, for which o is 1."""
    return fma_rn(weight, o, acc * share)


@verb
def inverse_of(total):
    """Return the final factor of acc; 0 if the row sees no key."""
    return ONE / total if total != ZERO else ZERO


@verb
def lse_of(most, total):
    return NUM.base(most) + NUM.log(total)


THREADS = 256
WARPS = THREADS // 32
AT_ONCE = 8  # splits whose loads are in flight


@builds
def build_merge(variant: Variant, block_kv: int, with_lse: bool) -> Kernel:
    """flash_attention_merge(o, lse, o_parts, lse_parts, rows, work). work: `TiledWork`. rows: of all heads and
    batches.
    """
    mem, num = storage(variant.dtype), numbers(f32)
    split, span, chain = splits_of(block_kv), spans(variant.varlen), chain_of(variant.having, variant.dtype)
    COLUMNS = -(-variant.Dv // 32)

    @kernel(
        array_type(variant), statistic_type(variant), *[PARTS_TYPE] * 2, i32, tiled_work_type(variant), threads=THREADS
    )
    def flash_attention_merge(o, lse, o_parts, lse_parts, rows, work):
        extent, options = work.extent, work.options
        lane, row = i32(cuda.threadIdx.x % 32), i32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        head, i = i32(row // extent.Sq), i32(row % extent.Sq)
        b, h = i32(head // extent.H), i32(head % extent.H)
        if row >= rows:
            return
        q_first, _, Sq, Sk = span.of_batch(work.lengths, b, extent.Sq, extent.Sk)
        if i >= Sq:
            return
        token, count = i64(q_first + i), split.count(Sk)
        at, step = part_start(lse_parts, 0, b, h, token), lse_parts.strides[0]
        shares = cuda.local.array(OF_LANE, f32)  # for splits lane, lane + 32, ...
        weights = cuda.local.array(OF_LANE, f32)
        most = chain.sink(options, i64(h))
        total = total_of(most)
        for n in range(OF_LANE):
            found, rest = num.minus_inf, num.zero
            if lane + 32 * n < count:
                part = at + (lane + 32 * n) * step
                found, rest = lse_parts.data[part], lse_parts.data[part + 1]
            upto = num.maximum(most, found)
            for bit in range(5):
                upto = num.maximum(upto, shfl_idx_f32(upto, max(i32(lane - (1 << bit)), i32(0)), FULL_WARP))
            before = shfl_idx_f32(upto, max(i32(lane - 1), i32(0)), FULL_WARP)
            shares[n], weights[n] = shares_of(before if lane > 0 else most, upto, found, rest)
            most = shfl_idx_f32(upto, 31, FULL_WARP)

        acc = cuda.local.array(COLUMNS, f32)
        for c in range(COLUMNS):
            acc[c] = num.zero
        at, step = part_start(o_parts, 0, b, h, token), o_parts.strides[0]
        values = cuda.local.array(AT_ONCE * COLUMNS, f32)
        for first in range(0, count, AT_ONCE):
            for n in range(AT_ONCE):
                for c in range(COLUMNS):
                    values[n * COLUMNS + c] = num.minus_zero  # of no split: weight 0 for it, share 1 for the others
                    if (first + n < count) & (32 * c + lane < variant.Dv):
                        values[n * COLUMNS + c] = o_parts.data[at + (first + n) * step + 32 * c + lane]
            for n in range(AT_ONCE):
                share, weight = shares[0], weights[0]
                for k in range(1, OF_LANE):
                    share, weight = (shares[k], weights[k]) if first // 32 == k else (share, weight)
                share = shfl_idx_f32(share, i32((first + n) % 32), FULL_WARP)
                weight = shfl_idx_f32(weight, i32((first + n) % 32), FULL_WARP)
                total = join(total, share, weight, num.one)
                for c in range(COLUMNS):
                    acc[c] = join(acc[c], share, weight, values[n * COLUMNS + c])
        o_row, inverse = start(o, b, h, token), inverse_of(total)
        for c in range(COLUMNS):
            if 32 * c + lane < variant.Dv:
                mem.store(o.data, o_row + 32 * c + lane, acc[c] * inverse)
        if with_lse and lane == 0:
            lse.data[start(lse, b, h, token)] = lse_of(most, total)

    return flash_attention_merge


EACH = 128  # threads with rows of a block
MOST_BLOCKS = 256  # blocks with kept state; each takes one work item after another


def kept_shape(config: Sm90Config, Dv: int) -> tuple[int, int, int]:
    """Return the shape of what is kept: blocks, numbers per thread, threads."""
    return MOST_BLOCKS, 4 + ROWS * config.columns(Dv) // EACH, EACH


@noun
def serial_of(config: Sm90Config, variant: Variant, chain: OptionChain, queries: Queries, with_lse: bool) -> Members:
    """The verb for forward's kernel, and the type of `OutputTo.kept`: a pointer, or nothing for other kernels."""
    if not config.serial:
        return members({}, kept_type=types.Tuple([]), add=nothing(7))
    (_, SIZE, _), QUADS, WIDTH = kept_shape(config, variant.Dv), config.columns(variant.Dv) // 8, variant.Dv
    mem, num, split = storage(variant.dtype), numbers(f32), splits_of(config.block_kv)

    @verb
    def _before(kept, at, task, row, options):
        """Return most and total so far."""
        if task.split == 0:
            sink = chain.sink(options, i64(queries.head(task, row)))
            return sink, total_of(sink)
        return kept[at], kept[at + EACH]

    @verb
    def _store(o, acc, h, inverse, task, row, column):
        near, token = i32(column + 2 * (cuda.threadIdx.x % LANES)), task.q_first + queries.query(task, row)
        at = start(o, task.b, queries.head(task, row), token)
        for j in range(QUADS):
            for e in range(2):
                if near + (8 * j + e) < WIDTH:
                    mem.store(o.data, at + near + (8 * j + e), acc[4 * j + 2 * h + e] * inverse)

    @verb
    def add(to, acc, found, task, row, column, options):
        """Add a split. Store after the last one."""
        kept, mine = to.kept[0], i64(cuda.blockIdx.x) * (SIZE * EACH) + cuda.threadIdx.x
        last = task.split + 1 == split.count(task.Sk)
        for h in range(2):
            r, at = i32(row + my_row() + 8 * h), i64(mine + 2 * EACH * h)
            was, total = _before(kept, at, task, r, options)
            most = num.maximum(was, found.lse[h])
            share, weight = shares_of(was, most, found.lse[h], found.rest[h])
            total = join(total, share, weight, num.one)
            kept[at], kept[at + EACH] = most, total
            for j in range(QUADS):
                for e in range(2):
                    n = 4 * j + 2 * h + e
                    at = i64(mine + (4 + n) * EACH)
                    acc[n] = join(num.zero if task.split == 0 else kept[at], share, weight, acc[n])
                    kept[at] = acc[n]
            if last and queries.there(task, r):
                _store(to.o, acc, h, inverse_of(total), task, r, column)
                if with_lse and column == 0 and cuda.threadIdx.x % LANES == 0:
                    token = task.q_first + queries.query(task, r)
                    to.lse.data[start(to.lse, task.b, queries.head(task, r), token)] = lse_of(most, total)

    return members(locals(), kept_type=types.Tuple([pointer(f32)]))
