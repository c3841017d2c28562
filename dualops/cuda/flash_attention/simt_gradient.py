"""dk, dv and dq of attention without tensor cores. Dao 2023, arXiv:2307.08691, Alg. 2, without its atomics.

A block of 16 x 16 threads has BLOCK_KV keys of one key head and visits all queries that see them, tile after tile, so
that every sum has one owner and one order. Rows are keys, columns queries.

    1  for each query head of the group, for each tile of BLOCK_Q queries that see some of the keys:
    2      S.T [BLOCK_KV, BLOCK_Q] = scale * K @ Q.T, through the options; P.T = exp(S.T - lse)
    3      dP.T = weight * V @ dO.T;   dS.T = P.T * (dP.T - delta) * slope
    4      dv [BLOCK_KV, Dv] += (weight * P.T) @ dO
    5      dk [BLOCK_KV, D] += dS.T @ Q
    6  dk *= scale

For dq a block has BLOCK_Q queries of one head and visits keys; rows are queries.

    1  for each tile of BLOCK_KV keys that some of the queries see:
    2      S [BLOCK_Q, BLOCK_KV] = scale * Q @ K.T, through the options; P = exp(S - lse)
    3      dP = weight * dO @ V.T;   dS = P * (dP - delta) * slope
    4      dq [BLOCK_Q, D] += dS @ K
    5  dq *= scale

-0 marks elements of P and dS that do not count (`simt_forward`).

Shared memory: K and V, Q and dO, P.T and dS.T (`BackwardConfig.layout`). With `share`, K and V take turns in one place,
Q and dO in another, and are read again for each tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..compiler.backend import Kernel, Members, builds, cuda, kernel, members, noun, verb
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, mma_ab, mma_abt
from ..tile.shared import Shared, Tile
from ..tile.storage import storage
from .arguments import Variant, array_type, gradient_inputs_type, size_types
from .options import chain_of
from .saved_lse import exponential_of
from .tiles import Where, blocks, lines, score_tile


class BackwardLayout(NamedTuple):
    """Tiles in shared memory: the pair that the block owns (K and V, or Q and dO), the other pair, and scores."""

    own: Tile  # [rows, D]
    own_v: Tile  # [rows, Dv]
    passing: Tile  # [columns, D]
    passing_v: Tile  # [columns, Dv]
    probs: Tile  # [rows, columns]
    d_scores: Tile  # [rows, columns]; the same as probs if there is one tile of scores
    nbytes: int


@dataclass(frozen=True)
class BackwardConfig:
    """Scores of a thread: tile_rows along the side that the block owns, tile_columns along the other."""

    tile_rows: int
    tile_columns: int
    share: bool = False  # the operands of a side take turns in one place
    min_blocks: int = 1

    @property
    def rows(self) -> int:
        return LANES * self.tile_rows

    @property
    def columns(self) -> int:
        return LANES * self.tile_columns

    def layout(self, D: int, Dv: int, dtype: str, tiles_of_scores: int) -> BackwardLayout:
        shared = Shared(dtype, THREADS)
        own = shared.tile(self.rows, D)
        own_v = shared.tile(self.rows, Dv, over=own if self.share else None)
        passing = shared.tile(self.columns, D, 64)
        passing_v = shared.tile(self.columns, Dv, 64, over=passing if self.share else None)
        scores = [shared.tile(self.rows, self.columns) for _ in range(tiles_of_scores)]
        return BackwardLayout(own, own_v, passing, passing_v, scores[0], scores[-1], shared.nbytes)

    def shared_bytes(self, D: int, Dv: int, dtype: str, tiles_of_scores: int) -> int:
        return self.layout(D, Dv, dtype, tiles_of_scores).nbytes


class Pair(NamedTuple):
    """Rows of two arrays: of K and V, or of Q and dO."""

    first: Any
    second: Any


class Found(NamedTuple):
    """What a thread has of a tile of scores."""

    scores: Any
    d_probs: Any
    slopes: Any


@noun
def tile_of_gradient(config: BackwardConfig, variant: Variant, tiles_of_scores: int, *, bends: bool = True) -> Members:
    """The verbs of tiles of scores. With two tiles, rows are keys, and the second one holds dS. bends: with slopes."""
    mem, tile = storage(variant.dtype), config.layout(variant.D, variant.Dv, variant.dtype, tiles_of_scores)
    num, exponential, TRANSPOSED = numbers(mem.number), exponential_of(mem.number), tiles_of_scores > 1
    chain, SHARE = chain_of(variant.having, variant.dtype, gradient=bends), config.share
    own, own_v, passing, passing_v, probs, d_scores, _ = tile
    qk = mma_abt(mem.number, own, passing, config.tile_rows, config.tile_columns)
    dov = mma_abt(mem.number, own_v, passing_v, config.tile_rows, config.tile_columns)
    score = score_tile(chain, variant.dtype, qk, probs, gradient=True, transposed=TRANSPOSED)
    last = score_tile(chain, variant.dtype, qk, d_scores, gradient=True, transposed=TRANSPOSED)
    BENDS = chain.bends and bends

    @verb
    def found():
        """Return `Found`; once in a kernel."""
        return Found(qk.fragment(), qk.fragment(), qk.fragment())

    @verb
    def load_own(smem, mine):
        """Load the rows that the block owns, if they stay. mine: `Pair`."""
        if not SHARE:
            own.load(smem, mine.first)
            own_v.load(smem, mine.second)

    @verb
    def compute(smem, found, mine, others, work, where):
        """Compute finished scores, slopes and dP, and weights in the tile of dS. Return whether others' rows hold what
        is not finite, of each array.
        """
        cuda.syncthreads()
        if SHARE:
            own.load(smem, mine.first)
        non_finite = passing.load(smem, others.first)
        non_finite_v = non_finite
        if not SHARE:
            non_finite_v = passing_v.load(smem, others.second)
        cuda.syncthreads()

        qk.clear(found.scores)
        qk.add(found.scores, smem)  # scores = Q @ K.T, or K @ Q.T
        if BENDS:
            score.slopes(found.slopes, found.scores, smem, work.options, work.scale, where)
        score.finish(found.scores, smem, work.options, work.scale, where)

        if SHARE:
            cuda.syncthreads()
            own_v.load(smem, mine.second)
            non_finite_v = passing_v.load(smem, others.second)
            cuda.syncthreads()
        dov.clear(found.d_probs)
        dov.add(found.d_probs, smem)  # dP = dO @ V.T, or V @ dO.T
        if chain.weighs:
            last.weights(smem, work.options, where)
        return non_finite, non_finite_v

    @verb
    def load_again(smem, others):
        """Load the first of the others' rows, if the second took their place."""
        if SHARE:
            cuda.syncthreads()
            passing.load(smem, others.first)

    @verb
    def gradient(smem, found, e, lse, delta):
        """Return weight * P and dS of score e, -0 if they do not count. lse: its base."""
        prob = exponential(found.scores[e], lse)
        weighted, d_prob = prob, found.d_probs[e]
        if chain.weighs:
            weighted *= smem[last.at(e)]
            d_prob *= smem[last.at(e)]
        d_score = prob * (d_prob - delta)
        if BENDS:
            d_score = d_score * found.slopes[e] + num.zero  # a slope of 0 gives no -0
        counts = score.counts(found.scores[e], lse)
        return weighted if counts else num.minus_zero, d_score if counts else num.minus_zero

    @verb
    def statistics(x, b, h, token, there):
        """Return base of lse, and delta, of a query; zeros if there is none."""
        lse, delta = num.zero, num.zero
        if there:
            lse = num.base(x.lse.data[start(x.lse, b, h, token)])
            delta = x.delta.data[start(x.delta, b, h, token)]
        return lse, delta

    return members(
        locals(),
        tile=tile,
        qk=qk,
        chain=chain,
        at=score.at,  # (e) -> the place of score e
        d_at=last.at,  # of its dS
    )


@builds
def build_dkv(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dkv(dk, dv, x, work). x: `GradientInputs`."""
    mem, of = storage(variant.dtype), tile_of_gradient(config, variant, 2)
    owned = blocks(variant.varlen, config.rows)
    pdo = mma_ab(mem.number, of.tile.probs, of.tile.passing_v, config.tile_rows)
    dsq = mma_ab(mem.number, of.tile.d_scores, of.tile.passing, config.tile_rows)

    @kernel(
        *[array_type(variant)] * 2,
        gradient_inputs_type(variant),
        size_types(variant),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dkv(dk, dv, x, work):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        lane, line = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        b, _, h_kv, n0, q_first, k_first, Sq, Sk = owned.of_keys(work)
        if n0 >= Sk:
            return
        offset, token = work.aligned * (Sk - Sq), k_first + n0
        mine = Pair(lines(x.k, b, h_kv, token, Sk - n0), lines(x.v, b, h_kv, token, Sk - n0))
        of.load_own(smem, mine)
        n, found = n0 + line * config.tile_rows, of.found()  # n: my first key
        dk_acc, dv_acc = dsq.fragment(), pdo.fragment()
        dsq.clear(dk_acc)
        pdo.clear(dv_acc)

        m_first, m_end = of.chain.query_range(work.options, n0, min(n0 + config.rows, Sk), offset, Sq)
        for h in range(h_kv * work.group, (h_kv + 1) * work.group):
            for m0 in range(m_first // config.columns * config.columns, m_end, config.columns):
                others = Pair(lines(x.q, b, h, q_first + m0, Sq - m0), lines(x.do, b, h, q_first + m0, Sq - m0))
                where = Where(b, h, m0, n0, Sq, Sk, offset)
                non_finite_q, non_finite_do = of.compute(smem, found, mine, others, work, where)
                for j in range(config.tile_columns):
                    m = m0 + lane + LANES * j
                    lse, delta = of.statistics(x, b, h, q_first + m, m < Sq)
                    for i in range(config.tile_rows):
                        e = i * config.tile_columns + j
                        weighted, d_score = of.gradient(smem, found, e, lse, delta)
                        smem[of.at(e)] = weighted
                        smem[of.d_at(e)] = d_score

                if cuda.syncthreads_or(non_finite_do):
                    pdo.add_counted(dv_acc, smem, config.columns)
                else:
                    pdo.add(dv_acc, smem)  # dv [BLOCK_KV, Dv] += P.T @ dO
                of.load_again(smem, others)
                if cuda.syncthreads_or(non_finite_q):
                    dsq.add_counted(dk_acc, smem, config.columns)
                else:
                    dsq.add(dk_acc, smem)  # dk [BLOCK_KV, D] += dS.T @ Q

        k_out = owned.key_out(work.lengths, b)
        for i in range(config.tile_rows):
            if n + i < Sk:
                k_row, v_row = start(dk, b, h_kv, k_out + n + i), start(dv, b, h_kv, k_out + n + i)
                for c in range(dsq.columns):
                    if dsq.column(c) < variant.D:
                        mem.store(dk.data, k_row + dsq.column(c), dk_acc[i * dsq.columns + c] * work.scale)
                for c in range(pdo.columns):
                    if pdo.column(c) < variant.Dv:
                        mem.store(dv.data, v_row + pdo.column(c), dv_acc[i * pdo.columns + c])

    return flash_attention_dkv


@builds
def build_dq(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dq(dq, x, work). x: `GradientInputs`."""
    mem, of = storage(variant.dtype), tile_of_gradient(config, variant, 1)
    owned = blocks(variant.varlen, config.rows)
    dsk = mma_ab(mem.number, of.tile.d_scores, of.tile.passing, config.tile_rows)

    @kernel(
        array_type(variant),
        gradient_inputs_type(variant),
        size_types(variant),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dq(dq, x, work):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        line = cuda.threadIdx.x // LANES
        b, h, h_kv, m0, q_first, k_first, Sq, Sk = owned.of_queries(work)
        if m0 >= Sq:
            return
        offset, token = work.aligned * (Sk - Sq), q_first + m0
        mine = Pair(lines(x.q, b, h, token, Sq - m0), lines(x.do, b, h, token, Sq - m0))
        of.load_own(smem, mine)
        m, found = m0 + line * config.tile_rows, of.found()  # m: my first query
        lse, delta = cuda.local.array(config.tile_rows, mem.number), cuda.local.array(config.tile_rows, mem.number)
        for i in range(config.tile_rows):
            lse[i], delta[i] = of.statistics(x, b, h, q_first + m + i, m + i < Sq)
        dq_acc = dsk.fragment()
        dsk.clear(dq_acc)

        n_first, n_end = of.chain.key_range(work.options, m0, min(m0 + config.rows, Sq), offset, Sk)
        for n0 in range(n_first // config.columns * config.columns, n_end, config.columns):
            others = Pair(lines(x.k, b, h_kv, k_first + n0, Sk - n0), lines(x.v, b, h_kv, k_first + n0, Sk - n0))
            non_finite, _ = of.compute(smem, found, mine, others, work, Where(b, h, m0, n0, Sq, Sk, offset))
            for i in range(config.tile_rows):
                for j in range(config.tile_columns):
                    e = i * config.tile_columns + j
                    _, d_score = of.gradient(smem, found, e, lse[i], delta[i])
                    smem[of.d_at(e)] = d_score

            of.load_again(smem, others)
            if cuda.syncthreads_or(non_finite):
                dsk.add_counted(dq_acc, smem, config.columns)
            else:
                dsk.add(dq_acc, smem)  # dq [BLOCK_Q, D] += dS @ K

        for i in range(config.tile_rows):
            if m + i < Sq:
                row = start(dq, b, h, q_first + m + i)
                for c in range(dsk.columns):
                    if dsk.column(c) < variant.D:
                        mem.store(dq.data, row + dsk.column(c), dq_acc[i * dsk.columns + c] * work.scale)

    return flash_attention_dq
