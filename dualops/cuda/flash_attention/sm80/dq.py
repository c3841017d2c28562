"""dq of attention by mma.sync, on Ampere and later. Dao 2023 (arXiv:2307.08691), Alg. 2, in the order of forward.

A block has BLOCK_Q queries of one head, a warp 16 of them. Two stages of shared memory hold BLOCK_KV keys and their
values each: one is filled (cp.async) while the other is multiplied.

    1  start the copies of Q, dO and the last tile of keys that some of the queries see
    2  a warp's rows of Q and dO to registers; lse and delta of a thread's two rows
    3  for each tile, the last first:
    4      start the copies of the tile before it, to the other stage
    5      scores [16, BLOCK_KV] = Q @ K.T, through the options; -inf if masked
    6      P = exp2(scores - lse) * slope
    7      dP [16, BLOCK_KV] = dO @ V.T
    8      dS = P * (weight * dP - delta)
    9      acc [16, D] += dS @ K
   10      wait for the next tile, all threads
   11  dq = acc * scale, 16 rows of a warp at a time through shared memory

K of a tile is read twice: by its rows for the scores, by its columns for dq. dS never leaves registers: packed in
pairs, accumulators are the left factor of 9.

Masked tiles, and rows that are not finite: as in `forward`. A row that sees no key has lse = -inf, and gets zeros.

Shared memory: `Sm80DqConfig.tiles`, 2 * (BLOCK_Q + 2 * BLOCK_KV) * (D + Dv) bytes. Registers: BLOCK_KV / 2 scores, as
many of dP, and dS in half as many, D / 2 of acc, D / 4 + Dv / 4 of Q and dO, and about 40.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, f32, i32, kernel, noun, u32, verb
from ...tile.async_copies import cp_async_commit, cp_async_wait_group
from ...tile.products import opaque_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.storage import storage
from ...tile.strips import strip_ab, strip_abt
from ..arguments import Variant, array_type, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..nan_repair import nan_repair
from ..options import chain_of
from ..score_gradients import gradient_of_queries
from ..tile_scheduler import ROWS_OF_A_HEAD, range_of, tiled_work_type, walk_by_queries
from ..tiles import where_of
from .config import ROWS, Sm80DqConfig, Sm80DqTiles
from .rows import GradientVectors, KeyHead, kv_copies, output_of


class Mine(NamedTuple):
    """What a thread multiplies with."""

    scores: Any
    d_probs: Any
    d_scores: Any  # packed
    acc: Any
    lse: Any  # of two rows
    base: Any  # of their exponents
    delta: Any


class Left(NamedTuple):
    """A warp's rows of Q and dO: where they begin, and what a thread holds of them."""

    q_place: Any
    do_place: Any
    q: Any
    do: Any


@noun
def dq_tiles(config: Sm80DqConfig, variant: Variant, tile: Sm80DqTiles, aligned: bool) -> Members:
    """The verbs of a block's tiles of keys. row: the first of four warps."""
    dtype, chain = variant.dtype, chain_of(variant.having, variant.dtype, gradient=True)
    qk = strip_abt(dtype, tile.q, tile.k, tile.q_boxes, held=True)
    dov = strip_abt(dtype, tile.do, tile.v, tile.v_boxes, held=True)
    dsk = strip_ab(dtype, tile.k_right, tile.q_boxes)
    rows, keys = softmax_rows(dtype, qk.size, dsk.size), range_of(config.block_kv).keys
    score = fragment_scores(chain, config.block_kv, apart=False, bent=chain.scores)
    gradient = gradient_of_queries(chain, score, rows, qk.size, dsk.size)
    nan_rows = nan_repair(chain, variant, ROWS_OF_A_HEAD, keys, dsk.size, passes=False, gradient=True)
    output = output_of(dtype, variant.D, tile.q_boxes, aligned)

    @verb
    def begin(x, task, row):
        """Read lse and delta. Return `Mine`; once in a kernel."""
        scores, d_probs, acc, d_scores = qk.fragment(), dov.fragment(), dsk.fragment(), dsk.left()
        lse, base, delta = gradient.pair(), gradient.pair(), gradient.pair()
        gradient.read(lse, x.lse, task, row)
        gradient.read(delta, x.delta, task, row)
        gradient.bases(base, lse)
        return Mine(scores, d_probs, d_scores, acc, lse, base, delta)

    @verb
    def hold(smem, my_rows):
        """Return `Left`, once Q and dO have arrived. my_rows: the first of my warp."""
        q_place, do_place = qk.place(my_rows, 0), dov.place(my_rows, tile.do_at)
        return Left(q_place, do_place, qk.hold(smem, q_place), dov.hold(smem, do_place))

    @verb
    def add(mine, left, smem, stage, where, work):
        """Add a tile to acc."""
        k_at, v_at = i32(tile.k_at + stage * tile.k_size), i32(tile.v_at + stage * tile.v_size)
        qk.multiply(mine.scores, left.q, smem, left.q_place, k_at)  # scores = Q @ K.T
        score.finish(mine.scores, work.options, work.scale, where)
        held = score.held()  # unused: products are not changed here
        gradient.probs(mine.scores, held, work.options, work.scale, where, mine.base)
        dov.multiply(mine.d_probs, left.do, smem, left.do_place, v_at)  # dP = dO @ V.T
        gradient.d_scores(mine.scores, mine.d_probs, work.options, where, mine.delta)
        dsk.put(mine.d_scores, mine.scores)
        dsk.add(mine.acc, mine.d_scores, smem, k_at)  # acc [16, D] += dS @ K

    @verb
    def store(mine, dq, x, task, row, work):
        gradient.read(mine.lse, x.lse, task, row)
        nan_rows.repair(mine.acc, (mine.lse[0], mine.lse[1]), x, task, row, i32(0), work)
        gradient.scale(mine.acc, work.scale, mine.lse)
        output.store(cuda.shared.array(0, f32, alignment=128), dq, mine.acc, task, row)

    return locals()


@builds
def build_dq(config: Sm80DqConfig, variant: Variant, vectors: GradientVectors, aligned: bool) -> Kernel:
    """flash_attention_dq_sm80(dq, x, work). x: `GradientInputs`. work: `TiledWork`.

    vectors: elements of a copy. aligned: dq is stored 16 bytes at a time.
    """
    mem, tile = storage(variant.dtype), config.tiles(variant.D, variant.Dv)
    walk, copies = walk_by_queries(config, variant, gradient=True), kv_copies(config, variant, tile, vectors)
    tiles = dq_tiles(config, variant, tile, aligned)

    @kernel(
        array_type(variant),
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=config.threads,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dq_sm80(dq, x, work):
        smem = cuda.shared.array(0, mem.element, alignment=128)
        task = walk.task(i32(cuda.blockIdx.x), work)
        if task.m0 >= task.Sq:
            return
        count, head = task.count, KeyHead(task.b, task.h_kv)
        row, my_rows = i32(cuda.threadIdx.x // 128 * ROWS), i32(cuda.threadIdx.x // 32 * 16)
        n0 = i32((task.first + i32(count)) * config.block_kv - config.block_kv)
        copies.queries(smem, x, task)
        if count != u32(0):
            copies.keys(smem, x, task, head, n0, (tile.k_at, tile.v_at))
        cp_async_commit()

        mine = tiles.begin(x, task, row)
        cp_async_wait_group(0)
        cuda.syncthreads()
        left = tiles.hold(smem, my_rows)
        cuda.syncthreads()  # a task without tiles stores where other warps still read
        i = u32(0)
        while i != count:
            stage, n1 = i32(i % u32(2)), i32(n0 - config.block_kv)
            if i + u32(1) != count:
                k_next, v_next = i32(tile.k_at + (1 - stage) * tile.k_size), i32(tile.v_at + (1 - stage) * tile.v_size)
                copies.keys(smem, x, task, head, n1, (k_next, v_next))
                cp_async_commit()
            tiles.add(mine, left, smem, stage, where_of(task, task.h, i32(task.m0 + row), n0), work)
            cp_async_wait_group(0)
            cuda.syncthreads()
            i, n0 = u32(i + u32(1)), n1

        task = walk.task(opaque_i32(cuda.blockIdx.x), work)  # again: no register kept it
        tiles.store(mine, dq, x, task, row, work)

    return flash_attention_dq_sm80
