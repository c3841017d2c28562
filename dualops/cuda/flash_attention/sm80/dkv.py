"""dk and dv of attention by mma.sync, on Ampere and later. Dao 2023 (arXiv:2307.08691), Alg. 2, without its atomics.

A block has BLOCK_KV keys of one key head, a warp 16 of them, and takes all queries that see them, one tile of BLOCK_Q
queries after another, so that every sum has one owner and one order. Rows are keys, columns queries. One stage of
shared memory is multiplied while the other is filled (cp.async).

    1  start the copies of K, V and the first tile of queries that see some of the keys
    2  for each query head of the group, for each tile of queries that see some of the keys:
    3      start the copies of Q and dO of the next tile; a warp fetches their lse and delta
    4      S.T [16, BLOCK_Q] = K @ Q.T, through the options; P.T = exp2(S.T - lse), 0 if masked
    5      dv [16, Dv] += (weight * P.T) @ dO
    6      dP.T [16, BLOCK_Q] = V @ dO.T
    7      dS.T = P.T * (weight * dP.T - delta) * slope
    8      dk [16, D] += dS.T @ Q
    9      lse and delta of the next tile to shared memory; wait for its Q and dO, all threads
   10  dk *= scale; dk and dv, 16 rows of a warp at a time through shared memory

P.T and dS.T never leave registers: packed in pairs, accumulators are the left factors of 5 and 8, which read dO and Q
along their other axis.

Masked tiles, and rows that are not finite: as in `forward`, but any such row of dk and dv is recomputed.

Shared memory: `Sm80DkvConfig.tiles`, 2 * (BLOCK_KV + 2 * BLOCK_Q) * (D + Dv) bytes. Registers: BLOCK_Q / 2 of S.T and
of dP.T, a quarter of BLOCK_Q packed, D / 2 + Dv / 2 of dk and dv, and about 40.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, f32, i32, kernel, noun, u32, verb
from ...tile.async_copies import cp_async_commit, cp_async_wait_group
from ...tile.products import opaque_i32
from ...tile.storage import storage
from ...tile.strips import strip_ab, strip_abt
from ..arguments import Variant, array_type, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..nan_repair import nan_repair_keys
from ..options import chain_of
from ..saved_lse import Columns, lse_delta_of
from ..score_gradients import gradient_of_keys
from ..score_mod import Given
from ..tile_scheduler import key_rows_of, tile_after, tile_count, tiled_work_type, walk_by_keys
from ..tiles import where_of
from .config import ROWS, STAGES, Sm80DkvConfig, Sm80DkvTiles
from .rows import GradientVectors, output_of, q_copies


class Mine(NamedTuple):
    """What a thread multiplies with."""

    scores: Any  # S.T
    d_probs: Any
    packed: Any  # P.T, then dS.T
    dk: Any
    dv: Any
    factors: Any  # as of `Given`
    seed: Any  # of dropout


@noun
def dkv_tiles(
    config: Sm80DkvConfig, variant: Variant, tile: Sm80DkvTiles, columns: Columns, aligned: tuple[bool, bool]
) -> Members:
    """The verbs of a block's tiles of queries. columns: of lse and delta. aligned: as of `build_dkv`."""
    dtype, chain = variant.dtype, chain_of(variant.having, variant.dtype, gradient=True)
    kq = strip_abt(dtype, tile.k, tile.q, tile.k_boxes, held=False)
    vdo = strip_abt(dtype, tile.v, tile.do, tile.v_boxes, held=False)
    pdo, dsq = strip_ab(dtype, tile.do_steps, tile.v_boxes), strip_ab(dtype, tile.q_steps, tile.k_boxes)
    score = fragment_scores(chain, config.block_q, apart=False, bent=chain.bends, transposed=True)
    gradient = gradient_of_keys(chain, score, dtype, config.block_q)
    nan_rows = nan_repair_keys(chain, variant, dsq.size, pdo.size)
    widest, SIZE = max(variant.D, variant.Dv), dsq.size
    dk_output = output_of(dtype, variant.D, tile.k_boxes, aligned[0], widest)
    dv_output = output_of(dtype, variant.Dv, tile.v_boxes, aligned[1], widest)

    @verb
    def mine(work):
        """Return `Mine`; once in a kernel."""
        scores, d_probs, packed = kq.fragment(), vdo.fragment(), pdo.left()
        factors, seed = (work.scale, score.units(work.scale)[0]), score.seed(work.options)
        return Mine(scores, d_probs, packed, dsq.fragment(), pdo.fragment(), factors, seed)

    @verb
    def left(my_rows):
        """Return where a warp's rows of K and V begin. my_rows: the first of my warp."""
        return kq.place(my_rows, 0), vdo.place(my_rows, tile.v_at)

    @verb
    def add_dv(mine, left, shared, stage, where, work):
        """Add a tile to dv; d_probs become dS.T. shared: the tiles, and the slots of lse and delta."""
        (smem, slots), (k_place, v_place) = shared, left
        q_at, do_at = i32(tile.q_at + stage * tile.q_size), i32(tile.do_at + stage * tile.do_size)
        # opaque: otherwise the addresses of all steps would stay in registers, and none are left
        kq.multiply(mine.scores, 0, smem, opaque_i32(k_place), q_at)  # S.T = K @ Q.T
        kept = score.keeps(work.options, where, mine.seed)
        score.finish(mine.scores, work.options, work.scale, where)
        given = Given(work.options, mine.factors, where, 0)
        gradient.probabilities(mine.packed, mine.scores, given, kept, (slots, columns.lse(stage)))
        pdo.add(mine.dv, mine.packed, smem, do_at)  # dv [16, Dv] += P.T @ dO
        vdo.multiply(mine.d_probs, 0, smem, opaque_i32(v_place), do_at)  # dP.T = V @ dO.T
        gradient.d_scores(mine.d_probs, mine.scores, work.options, kept, (slots, columns.delta(stage)))
        gradient.pack(mine.packed, mine.d_probs)

    @verb
    def add_dk(mine, smem, stage):
        """Add the tile to dk."""
        dsq.add(mine.dk, mine.packed, smem, i32(tile.q_at + stage * tile.q_size))  # dk [16, D] += dS.T @ Q

    @verb
    def store(mine, to, x, task, row, work):
        """Store dk and dv. to: both arrays. row: the first of four warps."""
        nan_rows.repair(mine.dk, mine.dv, x, task, row, work)
        for e in range(SIZE):
            mine.dk[e] *= work.scale
        rows, row_smem = key_rows_of(task), cuda.shared.array(0, f32, alignment=128)
        dk_output.store(row_smem, to[0], mine.dk, rows, row)
        dv_output.store(row_smem, to[1], mine.dv, rows, row)

    return locals()


@builds
def build_dkv(
    config: Sm80DkvConfig, variant: Variant, vectors: GradientVectors, dk_aligned: bool, dv_aligned: bool
) -> Kernel:
    """flash_attention_dkv_sm80(dk, dv, x, work). x: `GradientInputs`. work: `TiledWork`.

    vectors: elements of a copy. dk_aligned, dv_aligned: they are stored 16 bytes at a time.
    """
    mem, tile = storage(variant.dtype), config.tiles(variant.D, variant.Dv)
    task_of, copies = walk_by_keys(config, variant), q_copies(config, variant, tile, vectors)
    columns = lse_delta_of(config.block_q, STAGES, chain_of(variant.having, variant.dtype, gradient=True))
    tiles = dkv_tiles(config, variant, tile, columns, (dk_aligned, dv_aligned))

    @kernel(*[array_type(variant)] * 2, gradient_inputs_type(variant), tiled_work_type(variant), threads=config.threads)
    def flash_attention_dkv_sm80(dk, dv, x, work):
        smem, slots = cuda.shared.array(0, mem.element, alignment=128), columns.slots()
        task = task_of(cuda.blockIdx.x, work)
        if task.n0 >= task.Sk:
            return
        row, my_rows = i32(cuda.threadIdx.x // 128 * ROWS), i32(cuda.threadIdx.x // 32 * 16)
        brings = cuda.threadIdx.x < 32
        i, end = u32(0), tile_count(task, work.extent.group, config.block_q)
        h, m0 = i32(task.h_kv * work.extent.group), i32(task.first)
        own = columns.own()
        copies.keys(smem, x, task)
        if end != u32(0):
            copies.queries(smem, x, task, h, m0, i32(0))
            if brings:
                columns.fetch(own, x, task, h, m0)
                columns.put(slots, i32(0), own)
        cp_async_commit()

        mine = tiles.mine(work)
        cp_async_wait_group(0)
        cuda.syncthreads()
        left = tiles.left(my_rows)
        while i != end:
            stage, coming = i32(i % u32(2)), i32((i + u32(1)) % u32(2))
            where = where_of(task, h, m0, i32(task.n0 + row))
            h, m0 = tile_after(task, h, m0, config.block_q)
            if i + u32(1) != end:
                copies.queries(smem, x, task, h, m0, coming)
                cp_async_commit()
            tiles.add_dv(mine, left, (smem, slots), stage, where, work)
            if brings and i + u32(1) != end:
                columns.fetch(own, x, task, h, m0)
            tiles.add_dk(mine, smem, stage)
            if brings and i + u32(1) != end:
                columns.put(slots, coming, own)
            cp_async_wait_group(0)
            cuda.syncthreads()
            i = u32(i + u32(1))

        tiles.store(mine, (dk, dv), x, task, row, work)

    return flash_attention_dkv_sm80
