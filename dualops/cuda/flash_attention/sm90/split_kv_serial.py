"""Splits of the keys that a block has one after the other: what they make together, kept beside the block meanwhile.

Where some sequences of varlen have few queries and others many, nobody knows beforehand how many have parts, and memory
for all that could is much. A block keeps what its own rows have so far, [size, 128], each thread its own numbers: most
and total of two rows (`split_kv_sums`), and its part of acc.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import Namespace, cuda, f32, i32, i64, pointer, types, verb
from ...launch.views import start
from ...tile.numbers import numbers
from ...tile.storage import storage
from ...tile.warpgroup import ROWS
from ..arguments import Variant
from ..fragment_scores import LANES, my_row
from ..options import OptionChain
from .config import Sm90Config
from .queries import Queries
from .split_kv import splits_of
from .split_kv_sums import inverse_of, join, lse_of, shares_of, total_of

THREADS = 128  # that have the rows of a block
MOST_BLOCKS = 256  # that keep something: each takes one piece of work after another


class Serial(Namespace):
    """The verb, and the type of its first argument: a pointer, or nothing for other kernels."""

    kept_type: Any
    # (kept, o, lse, acc, lses, rests, task, row, column, options): o and lse of a split; once all are there they are
    # stored
    add: Callable[..., None]


def kept_shape(config: Sm90Config, Dv: int) -> tuple[int, int, int]:
    """What is kept: of blocks, numbers of a thread, threads."""
    return MOST_BLOCKS, 4 + ROWS * config.columns(Dv) // THREADS, THREADS


def serial_of(config: Sm90Config, variant: Variant, chain: OptionChain, queries: Queries, with_lse: bool) -> Serial:
    """For a kernel."""
    if not config.serial:
        return Serial(kept_type=types.Tuple([]), add=_nothing)
    (_, SIZE, _), QUADS, WIDTH = kept_shape(config, variant.Dv), config.columns(variant.Dv) // 8, variant.Dv
    mem, num, split = storage(variant.dtype), numbers(f32), splits_of(config.block_kv)

    @verb
    def before(kept, at, task, row, options):
        """most and total."""
        if task.split == 0:
            sink = chain.sink(options, i64(queries.head(task, row)))
            return sink, total_of(sink)
        return kept[at], kept[at + THREADS]

    @verb
    def store(o, lse, acc, h, most, total, task, row, column):
        near, inverse = i32(column + 2 * (cuda.threadIdx.x % LANES)), inverse_of(total)
        head, token = queries.head(task, row), task.q_first + queries.query(task, row)
        at = start(o, task.b, head, token)
        for j in range(QUADS):
            for e in range(2):
                if near + (8 * j + e) < WIDTH:
                    mem.store(o.data, at + near + (8 * j + e), acc[4 * j + 2 * h + e] * inverse)
        if with_lse and column == 0 and cuda.threadIdx.x % LANES == 0:
            lse.data[start(lse, task.b, head, token)] = lse_of(most, total)

    @verb
    def add(kept, o, lse, acc, lses, rests, task, row, column, options):
        mine, last = i64(cuda.blockIdx.x) * (SIZE * THREADS) + cuda.threadIdx.x, task.split + 1 == split.count(task.Sk)
        for h in range(2):
            r, at = i32(row + my_row() + 8 * h), i64(mine + 2 * THREADS * h)
            was, total = before(kept[0], at, task, r, options)
            most = num.maximum(was, lses[h])
            share, weight = shares_of(was, most, lses[h], rests[h])
            total = join(total, share, weight, num.one)
            kept[0][at], kept[0][at + THREADS] = most, total
            for j in range(QUADS):
                for e in range(2):
                    n = 4 * j + 2 * h + e
                    at = i64(mine + (4 + n) * THREADS)
                    acc[n] = join(num.zero if task.split == 0 else kept[0][at], share, weight, acc[n])
                    kept[0][at] = acc[n]
            if last and queries.there(task, r):
                store(o, lse, acc, h, most, total, task, r, column)

    return Serial(kept_type=types.Tuple([pointer(f32)]), add=add)


@verb
def _nothing(kept, o, lse, acc, lses, rests, task, row, column, options):
    pass
