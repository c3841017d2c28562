"""Rows of dq from the sums of fragments that the fused kernel leaves in memory.

A block takes 64 queries of one head. A thread reads the numbers that a product would have left in its registers; from
there dq goes the way of `dq`: rows that are not finite are made anew, all are scaled, rounded and stored. A tile that
no block has added to is zero.

Shared memory: 2 * 64 * D bytes.
"""

from __future__ import annotations

from ...backend import Kernel, builds, cuda, f32, i32, i64, kernel, pointer, tensor_map, u8, u32, verb
from ...tile.numbers import numbers
from ...tile.storage import access
from ...tile.warpgroup import ROWS
from ..arguments import Variant, array_type, size_types, statistic_type
from ..gradient_of_queries import rows_of_queries
from ..hidden import hidden_rows
from ..options import chain_of
from ..walk import ROWS_OF_A_HEAD, Task
from .config import BOX, padded
from .fused_config import FRAGMENT, FusedConfig
from .output import rows_output

THREADS = 128


@builds
def build_dq_finish(config: FusedConfig, variant: Variant, stored: str) -> Kernel:
    """flash_attention_dq_finish(dq_map, sums, flags, tiles, dq, q, k, v, do, lse, delta, H, group, Sq, Sk, aligned,
    scale, lengths, options): sums, flags and tiles as the fused kernel has them; stored: how dq gets to memory.
    """
    D, num, chain = padded(variant.D), numbers(f32), chain_of(variant.having, variant.dtype, gradient=True)
    SIZE, PARTS, FRAGMENTS = D // 2, config.block_q // ROWS, D // BOX * FRAGMENT
    source, rows = access("float32", True, once=True), rows_of_queries(SIZE)
    output = rows_output(stored, variant.dtype, variant.D, D, 0, 1)

    @verb
    def all_keys(task):
        return i32(0), task.Sk

    hidden = hidden_rows(chain, variant, ROWS_OF_A_HEAD, all_keys, SIZE, passes=variant.varlen, gradient=True)

    @kernel(
        tensor_map if stored == "boxes" else i64,
        pointer(f32),
        pointer(i64),
        i32,
        *[array_type(variant)] * 5,
        *[statistic_type(variant)] * 2,
        *size_types(variant),
        threads=THREADS,
    )
    def flash_attention_dq_finish(
        dq_map, sums, flags, q_tiles, dq, q, k, v, do, lse, delta, H, group, Sq, Sk, aligned, scale, lengths, options
    ):
        smem = cuda.shared.array(0, u8, alignment=1024)
        blocks = u32((Sq + (ROWS - 1)) // ROWS)
        head, tile = u32(cuda.blockIdx.x) // blocks, i32(u32(cuda.blockIdx.x) % blocks)
        b, h = i32(head // u32(H)), i32(head % u32(H))
        offset, nothing = i32(aligned * (Sk - Sq)), i32(0)
        h_kv, m0 = i32(u32(h) // u32(group)), i32(tile * ROWS)
        task = Task(b, h, h_kv, m0, Sq, Sk, offset, i64(0), i64(0), nothing, u32(0), nothing)
        lse_pair, acc = rows.pair(), cuda.local.array(SIZE, f32)
        added = flags[i64(1 + i32(head) * q_tiles + tile // PARTS)] != 0
        at = (i64(head) * (q_tiles * PARTS) + tile) * FRAGMENTS + 4 * cuda.threadIdx.x
        for n in range(0, SIZE, 4):
            source.load(acc, n, sums, at + 128 * n, added, num.zero)
        rows.read(lse_pair, lse, task, 0)
        hidden.repair(acc, (lse_pair[0], lse_pair[1]), (q, k, v, do, delta), task, i32(0), i32(0), scale, options)
        rows.scale(acc, scale, lse_pair)
        output.store(smem, dq_map, dq, acc, task, i32(0), i32(0))
        output.finish()

    return flash_attention_dq_finish
