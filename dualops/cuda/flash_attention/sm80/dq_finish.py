"""Rows of dq from the sums that the fused kernel leaves in memory.

A block takes 64 queries of one head, a warp 16 of them, whose sums a thread reads as a product would have left them in
its registers. From there dq goes the way of `dq`: rows that are not finite are made anew, all are scaled, rounded and
stored. A tile that no block adds to is zero.
"""

from __future__ import annotations

from ...backend import Kernel, builds, cuda, f32, i32, i64, kernel, pointer, verb
from ...tile.numbers import numbers
from ...tile.tile_sums import QUAD
from ..arguments import Variant, array_type, size_types, statistic_type
from ..gradient_of_queries import rows_of_queries
from ..hidden import hidden_rows
from ..options import chain_of
from ..walk import ROWS_OF_A_HEAD, Extent, range_of, walk_by_queries
from .config import ROWS, box_count
from .dq_config import ITEMSIZE
from .fused_config import Sm80FusedConfig
from .output import output_of

THREADS = 128


@builds
def build_dq_finish(config: Sm80FusedConfig, variant: Variant, aligned: bool) -> Kernel:
    """flash_attention_dq_finish_sm80(sums, tiles, heads, section, dq, q, k, v, do, lse, delta, H, group, Sq, Sk,
    aligned, scale, lengths, options): sums, tiles, heads and section as the fused kernel has them; aligned: dq is
    stored 16 bytes at a time.
    """
    D, num, chain = variant.D, numbers(f32), chain_of(variant.having, variant.dtype, gradient=True)
    SIZE, PARTS, PART = D // 2, config.block_q // ROWS, ROWS * D
    rows, output = rows_of_queries(SIZE), output_of(variant.dtype, D, box_count(D, ITEMSIZE), aligned)
    walk = walk_by_queries(ROWS, range_of(config.block_kv).between, variant.varlen, chain)

    @verb
    def all_keys(task):
        return i32(0), task.Sk

    hidden = hidden_rows(chain, variant, ROWS_OF_A_HEAD, all_keys, SIZE, passes=variant.varlen, gradient=True)

    @kernel(
        pointer(f32),
        *[i32] * 3,
        *[array_type(variant)] * 5,
        *[statistic_type(variant)] * 2,
        *size_types(variant),
        threads=THREADS,
    )
    def flash_attention_dq_finish_sm80(
        sums, q_tiles, heads, section, dq, q, k, v, do, lse, delta, H, group, Sq, Sk, aligned, scale, lengths, options
    ):
        extent = Extent(heads, H, group, Sq, Sk, aligned, section)
        task, lane = walk.task(i32(cuda.blockIdx.x), extent, lengths, options), cuda.threadIdx.x % 32
        lse_pair, acc = rows.pair(), cuda.local.array(SIZE, f32)
        part = i64(i32(task.b * H) + task.h) * (q_tiles * PARTS) + i32(task.m0 // ROWS)
        at = part * PART + (cuda.threadIdx.x // 32 * (PART // 4) + lane)
        there = task.count != 0
        for e in range(SIZE):
            acc[e] = sums[at + (e // 4 * QUAD + e % 4 * 32)] if there else num.zero
        rows.read(lse_pair, lse, task, i32(0))
        hidden.repair(acc, (lse_pair[0], lse_pair[1]), (q, k, v, do, delta), task, i32(0), i32(0), scale, options)
        rows.scale(acc, scale, lse_pair)
        row_smem = cuda.shared.array(0, f32, alignment=128)
        output.store(row_smem, dq, acc, task, i32(0))

    return flash_attention_dq_finish_sm80
