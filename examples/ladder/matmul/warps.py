"""matmul's ladder on tensor cores, with products of one warp (mma.sync), and slices loaded by asynchronous copies.

One kernel, two Configs: with one stage a block waits for every slice that it copies; with several it copies later
slices while it multiplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dualops.cuda.compiler.backend import Kernel, builds, cuda, f32, i32, i64, kernel, pointer, u16, u32, verb
from dualops.cuda.matmul.loading import Reading
from dualops.cuda.matmul.product import Factor, Variant
from dualops.cuda.matmul.sm80 import Sm80Config
from dualops.cuda.matmul.sm80_copies import Terms, slice_copies
from dualops.cuda.matmul.tiled import block_order
from dualops.cuda.tile.async_copies import cp_async_commit, cp_async_wait_group
from dualops.cuda.tile.storage import storage
from dualops.cuda.tile.warp_mma import FactorSlice, fragments, warp_products
from dualops.cuda.tile.warp_rows import warp_output

from .tiles import DTYPE


class Rows(NamedTuple):
    """A result and the length of its rows."""

    y: Any
    N: Any


@builds
def build_warps(config: Sm80Config) -> Kernel:
    """Build matmul_warps(y, a, b, M, N, K): a warp computes [WARP_M, WARP_N] of its block's tile.

        1  start copies of slices 0 .. STAGES - 2, without registers in between (cp.async)
        2  for each slice t:
        3      start to copy slice t + STAGES - 1; wait until slice t has arrived for all threads
        4      for each 16 steps of the slice:
        5          a_frag [WARP_M, 16], b_frag [16, WARP_N] to registers
        6          acc [WARP_M, WARP_N] += a_frag @ b_frag
        7      barrier: all threads have read slice t
        8  y = acc, 16 rows of a warp at a time through shared memory

    Slices are 0 beyond the edges of a and b. N and K: multiples of 8.
    """
    mem, of_block = storage(DTYPE), block_order(config.block_m, config.block_n)
    a_copies = slice_copies(Variant(DTYPE), config, config.block_m, Reading("depth", 8))
    b_copies = slice_copies(Variant(DTYPE), config, config.block_n, Reading("row", 8))
    a_side = fragments(FactorSlice("depth", config.block_m, config.block_k), config.warp_m, left=True)
    b_side = fragments(FactorSlice("row", config.block_n, config.block_k), config.warp_n, left=False)
    sums = warp_products(DTYPE, config.warp_m, config.warp_n)
    AHEAD, STAGES, NOTHING = config.num_stages - 1, u32(config.num_stages), i64(0)
    WORDS = max(a_copies.words, b_copies.words)

    @verb
    def place(t):
        """Return where slice t is in shared memory."""
        return i32(u32(t) % STAGES * u32(config.stage))

    @verb
    def copy(smem, a_part, b_part, terms, t):
        """Start to copy the thread's share of slice t."""
        words = cuda.local.array(WORDS, u32)  # unused: aligned copies don't go through registers
        a_slice, b_slice = a_copies.coming(a_part, terms, t), b_copies.coming(b_part, terms, t)
        for share in range(config.shares):
            a_copies.start(words, smem, place(t), a_part, a_slice, share)
            b_copies.start(words, smem, place(t) + config.b_at, b_part, b_slice, share)

    @verb
    def finish(values, rows, m, n):
        mem.store_vector(rows.y, m * rows.N + n, n < rows.N, values, 0)

    output = warp_output(config.warp_m, config.warp_n, finish)

    @kernel(*[pointer(u16)] * 3, *[i64] * 3, threads=config.threads, min_blocks=config.min_blocks)
    def matmul_warps(y, a, b, M, N, K):
        smem = cuda.shared.array(0, u16, alignment=128)
        _, m0, n0 = of_block(M, N)
        warp = cuda.threadIdx.x // 32
        my_m, my_n = warp // config.warps_n * config.warp_m, warp % config.warps_n * config.warp_n
        slices = i32((K + (config.block_k - 1)) // config.block_k)
        terms = Terms(K, slices, (NOTHING,))
        a_part = a_copies.part(Factor(a, (NOTHING,), (NOTHING,), K, i64(1)), NOTHING, m0, M)
        b_part = b_copies.part(Factor(b, (NOTHING,), (NOTHING,), i64(1), N), NOTHING, n0, N)
        for t in range(AHEAD):
            if t < slices:
                copy(smem, a_part, b_part, terms, t)
            cp_async_commit()

        acc = sums.make()
        a_frag, b_frag = a_side.make(), b_side.make()
        a_at, b_at = a_side.start(my_m), i32(b_side.start(my_n) + config.b_at)  # in a stage
        for t in range(slices):
            if t + AHEAD < slices:
                copy(smem, a_part, b_part, terms, t + AHEAD)
            cp_async_commit()
            cp_async_wait_group(AHEAD)  # all but the latest AHEAD slices have arrived: also slice t
            cuda.syncthreads()
            for step in range(config.steps):
                a_side.read(a_frag, 0, smem, place(t) + a_at, step)
                b_side.read(b_frag, 0, smem, place(t) + b_at, step)
                sums.multiply(acc, a_frag, b_frag, 0)
            cuda.syncthreads()

        row_smem = cuda.shared.array(0, f32, alignment=128)
        output.store(row_smem, acc, m0 + my_m, n0 + my_n, M, Rows(y, N))

    return matmul_warps
