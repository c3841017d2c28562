"""Rows of dq from the sums of fragments that the fused kernel leaves in memory.

A block takes 64 queries of a tile of one head. A thread reads the numbers that a product would have left in its
registers; from there dq goes the way of `dq`: rows that are not finite are repaired (`nan_repair`), all are scaled,
rounded and stored. A tile that no block adds to is zero. Of varlen a number of a tile may be nobody's (`packed`).

Blocks need not wait until the fused kernel has ended: they begin where it leaves room, in the order in which it ends
its tiles, and wait for all that is added to theirs. The last one ends when it has ended.

Shared memory: 2 * 64 * D bytes.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, u8, verb
from ...tile.grids import wait_for_grid_before
from ...tile.numbers import numbers
from ...tile.storage import access
from ...tile.warpgroup import ROWS
from ..arguments import Variant, gradient_inputs_type
from ..gradient_of_queries import rows_of_queries
from ..key_rows import place_of_sum
from ..nan_repair import nan_repair
from ..options import chain_of
from ..ordered_sums import all_added
from ..tile_scheduler import ROWS_OF_A_HEAD, range_of, walk_by_queries
from .arguments import SUMS_TYPE, queries_to_type, tiled_work_type
from .config import BOX, padded
from .fused_config import FRAGMENT, FusedConfig
from .output import rows_output

THREADS = 128


@builds
def build_dq_convert(config: FusedConfig, variant: Variant, stored: str) -> Kernel:
    """flash_attention_dq_finish(sums, to, x, work). These are `Sums`, `QueriesTo`, `GradientInputs` and `TiledWork`.

    stored: how dq gets to memory (`output`).
    """
    D, num, chain = padded(variant.D), numbers(f32), chain_of(variant.having, variant.dtype, gradient=True)
    SIZE, PARTS, FRAGMENTS = D // 2, config.parts, D // BOX * FRAGMENT
    source, rows = access("float32", True, once=True), rows_of_queries(SIZE)
    output = rows_output(stored, variant.dtype, variant.D, D, 0, 1)
    between = range_of(config.block_kv).between
    BLOCK_Q, VARLEN = config.block_q, variant.varlen
    walk = walk_by_queries(BLOCK_Q, between, VARLEN, chain, first_first=config.ascends, packed=VARLEN)
    place_of = place_of_sum(BLOCK_Q, VARLEN)

    @verb
    def all_keys(task):
        return i32(0), task.Sk

    hidden = nan_repair(chain, variant, ROWS_OF_A_HEAD, all_keys, SIZE, passes=variant.varlen, gradient=True)

    @kernel(
        SUMS_TYPE,
        queries_to_type(variant, stored),
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=THREADS,
    )
    def flash_attention_dq_finish(sums, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        extent, scale, lengths, options = work
        task, part = walk.task(cuda.blockIdx.x // PARTS, extent, lengths, options), i32(cuda.blockIdx.x % PARTS)
        if not VARLEN or task.m0 < task.Sq:
            row = i32(ROWS * part)
            lse_pair, acc = rows.pair(), cuda.local.array(SIZE, f32)
            tile = place_of(task, extent.H, task.h, i32(task.m0 // BLOCK_Q), sums.tiles)
            at = (tile * PARTS + part) * FRAGMENTS + 4 * cuda.threadIdx.x
            all_added(sums.flags, 1 + tile, task.count)
            for n in range(0, SIZE, 4):
                source.load(acc, n, sums.data, at + 128 * n, task.count != 0, num.zero)
            rows.read(lse_pair, x.lse, task, row)
            arrays = x.q, x.k, x.v, x.do, x.delta
            hidden.repair(acc, (lse_pair[0], lse_pair[1]), arrays, task, row, i32(0), scale, options)
            rows.scale(acc, scale, lse_pair)
            output.store(smem, to.dq_map, to.dq, acc, task, row, i32(0))
            output.finish()
        if cuda.blockIdx.x == cuda.gridDim.x - 1:
            wait_for_grid_before()

    return flash_attention_dq_finish
