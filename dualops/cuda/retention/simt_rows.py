"""Rows of retention without tensor cores: any GPU, any dtype. Sun et al. 2023, arXiv:2307.08621, equations 5 and 7.

A block of 16 x 16 threads takes BLOCK_Q rows and BLOCK_V columns of the result. In the chunk form the rows see the
columns of their own chunk one by one, and all before it through the state; in the parallel form all is one chunk.

    1  acc [BLOCK_Q, BLOCK_V] = state_scale * gamma^(r - first row of the chunk + later) * Q @ state
    2  for each tile of BLOCK_KV columns of the chunk, up to the last that is seen:
    3      P [BLOCK_Q, BLOCK_KV] = scale * Q @ K.T * gamma^(r - c), or times the mask
    4      acc += P @ V
    5  out = acc / n

Q stays in shared memory; K comes DEPTH numbers of a row at a time, the state BLOCK_KV rows at a time. Products of a
tile are summed before they are added to acc. A pair that is not seen is -0 in P: it adds nothing, and where V holds a
NaN or an infinity, it says what to leave out, so that nothing reaches a row from behind it. Where scores have terms, Q
and K have one more column: the terms in one of them, ones in the other; and the state has one more row, the norm.

Shared memory: itemsize * (BLOCK_Q * (D' + BLOCK_KV + 4) + BLOCK_KV * (max(DEPTH, BLOCK_V) + 5)), D' being DEPTH + 4
for each DEPTH columns of Q.
Registers: tile_q * (BLOCK_V / 16 + max(tile_kv, 4)) numbers and about 50 more.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.meta import compute_dtype
from ..arrays import cdiv
from ..backend import Kernel, builds, cuda, i32, i64, kernel, u32, verb
from ..tile.numbers import numbers
from ..tile.products import LANES, products, row_of, tile_load
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from ..views import number_type, start, strided
from .arguments import ABS, OF_COLUMNS, OF_ROWS, Variant, call_type, decay, origin, slot_of, span


@dataclass(frozen=True)
class RowsConfig:
    """A thread holds tile_q x tile_kv scores, and of the result tile_q rows of `groups` times `near` columns."""

    tile_q: int
    tile_kv: int
    groups: int
    depth: int  # a multiple of block_kv
    near: int = 4
    lanes: int = LANES  # threads that share a row; also the lines of threads in a block
    min_blocks: int = 1

    @property
    def block_q(self) -> int:
        return self.lanes * self.tile_q

    @property
    def block_kv(self) -> int:
        return self.lanes * self.tile_kv

    @property
    def block_v(self) -> int:
        return self.lanes * self.near * self.groups

    def shared_bytes(self, dtype: str, D: int) -> int:
        widest = max(row_of(self.depth), row_of(self.block_v))
        q_rows = cdiv(D, self.depth) * row_of(self.depth)
        count = self.block_q * (q_rows + row_of(self.block_kv)) + self.block_kv * (widest + 1)
        return count * (8 if dtype == "float64" else 4)


@builds
def build_rows(config: RowsConfig, variant: Variant) -> Kernel:
    """retention_rows(out, row_sum, q, k, v, states, norms, weights, terms, mask, gamma, ends, call)."""
    dtype = variant.dtype
    mem, mask_mem, decays = storage(dtype), storage(variant.mask or dtype), decay(dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, config.lanes)
    ACROSS, THREADS = config.lanes, config.lanes**2
    TILE_Q, TILE_KV, GROUPS, DEPTH = config.tile_q, config.tile_kv, config.groups, config.depth
    BLOCK_Q, BLOCK_KV, BLOCK_V = config.block_q, config.block_kv, config.block_v
    product = products(mem.number, TILE_Q, TILE_KV, config.near, ACROSS)
    q_tile = tile_load(dtype, variant.aligned, BLOCK_Q, DEPTH, THREADS)
    k_tile = tile_load(dtype, variant.aligned, BLOCK_KV, DEPTH, THREADS)
    v_tile = tile_load(dtype, variant.aligned, BLOCK_KV, BLOCK_V, THREADS, weighted=variant.normalized, checked=True)
    state_tile = tile_load(compute_dtype(dtype), variant.aligned, BLOCK_KV, BLOCK_V, THREADS)
    N_LOAD = max(q_tile.size, k_tile.size, v_tile.size, state_tile.size)
    K_ROW, V_ROW, P_ROW = row_of(DEPTH), row_of(BLOCK_V), row_of(BLOCK_KV)
    K, P = 0, BLOCK_KV * max(K_ROW, V_ROW)
    W = P + BLOCK_Q * P_ROW
    Q = W + BLOCK_KV
    SLICE = BLOCK_Q * K_ROW  # Q lies in slices of DEPTH columns
    NEAR, COLUMNS = config.near, config.near * GROUPS
    N_SCORES, N_ACC, N_PIECE, N_FRAGS = TILE_Q * TILE_KV, TILE_Q * COLUMNS, NEAR * TILE_Q, max(4 * TILE_KV, 16)
    MASKED, NORMALIZED = bool(variant.mask), variant.normalized

    @verb
    def q_place(d, D):
        """Where column d of Q lies; column D beside the last one."""
        part = min(d, D - 1) // DEPTH
        return part * SLICE + d - part * DEPTH

    @verb
    def append(smem, at, term):
        """One more column, and zeros for the rest of four."""
        smem[u32(at)] = term
        for i in range(1, 4):
            smem[u32(at + i)] = num.zero

    @kernel(
        strided(dtype, 3),
        number_type(dtype, 3),
        *[strided(dtype, 3)] * 3,
        *[number_type(dtype, 3)] * 4,
        strided(variant.mask or dtype, 3),
        number_type(dtype, 1),
        strided("int32", 1),
        call_type(dtype),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def retention_rows(out, row_sum, q, k, v, states, norms, weights, terms, mask, gamma, ends, call):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % ACROSS, tid // ACROSS
        q_blocks, v_blocks = (call.rows + BLOCK_Q - 1) // BLOCK_Q, (call.Dv + BLOCK_V - 1) // BLOCK_V
        place, head = cuda.blockIdx.x // v_blocks, cuda.blockIdx.x // v_blocks // q_blocks
        e0 = i64(cuda.blockIdx.x % v_blocks * BLOCK_V)
        m0 = i64(q_blocks - 1 - place % q_blocks) * BLOCK_Q  # the last first: in the parallel form the longest
        b, h = i64(head // call.H), i64(head % call.H)
        first, rows, columns = span(ends, call, b)
        if m0 >= rows:
            return
        row0, column0 = origin(call, first, rows), origin(call, first, columns)
        chunk = (q_blocks - 1 - place % q_blocks) * BLOCK_Q // call.chunk
        n_first = i64(chunk) * call.chunk
        log2 = num.zero
        if not MASKED:
            log2 = decays.log2(gamma, call, h)

        m = m0 + line * TILE_Q  # my first row
        sums = cuda.local.array(TILE_Q, mem.number)  # my share of a row's sum; the lanes meet at the end
        seen_by = cuda.local.array(TILE_Q, i32)  # columns of the chunk that a row of mine sees
        for i in range(TILE_Q):
            end = columns
            if not MASKED:
                end = min(m + i + call.offset + 1, columns)
            seen_by[i] = i32(end - n_first if m + i < rows else 0)
            sums[i] = num.zero
        acc = cuda.local.array(N_ACC, mem.number)
        for i in range(N_ACC):
            acc[i] = num.zero
        scores = cuda.local.array(N_SCORES, mem.number)
        piece = cuda.local.array(N_PIECE, mem.number)
        loading = cuda.local.array(N_LOAD, mem.number)
        frag = cuda.local.array(4, mem.number)
        frags = cuda.local.array(N_FRAGS, mem.number)

        q_start, q_step = start(q, b, h, row0 + call.direction * m0), call.direction * q.strides[2]
        for d in range(0, call.D, DEPTH):
            q_at, left = Q + d // DEPTH * SLICE, call.D - d
            q_tile.load(smem, q_at, K_ROW, loading, q.data, q_start + d, q_step, rows - m0, left, 0)
        more = 0  # columns that Q and K have beyond D: of terms, or of ones
        if NORMALIZED and call.normed == OF_COLUMNS:
            more = 1
        if more != 0:
            cuda.syncthreads()
            for r in range(tid, BLOCK_Q, THREADS):
                term = num.one
                if (call.row_term != 0) & (m0 + r < rows):
                    term = terms.data[start(terms, b, h, row0 + call.direction * (m0 + r))]
                append(smem, Q + q_place(call.D, call.D) + r * K_ROW, term)

        if chunk >= call.first_chunk:
            slot = slot_of(call, first, b, chunk)
            state = slot * states.strides[0] + h * states.strides[1] + e0
            norm = slot * norms.strides[0] + h * norms.strides[1]
            for d in range(0, call.D + more, BLOCK_KV):
                cuda.syncthreads()
                at, left = state + d * call.Dv, call.D - d
                state_tile.load(smem, K, V_ROW, loading, states.data, at, call.Dv, left, call.Dv - e0, 0)
                cuda.syncthreads()
                if (more != 0) & (left < BLOCK_KV):
                    for e in range(tid, min(call.Dv - e0, BLOCK_V), THREADS):
                        smem[u32(K + left * V_ROW + e)] = norms.data[norm + e0 + e]
                    cuda.syncthreads()
                count = min((left + more + 3) // 4 * 4, BLOCK_KV)
                q_at = Q + q_place(d, call.D)
                product.ab(acc, piece, frag, frags, smem, q_at, K_ROW, K, V_ROW, count, GROUPS, line, lane)
            if NORMALIZED and call.normed == OF_ROWS:
                for d in range(lane, call.D, ACROSS):
                    for i in range(TILE_Q):
                        sums[i] += (
                            smem[u32(Q + q_place(d, call.D) + (line * TILE_Q + i) * K_ROW)] * norms.data[norm + d]
                        )
            for i in range(TILE_Q):
                factor = decays.power(log2, m + i - n_first + call.later) * call.state_scale
                sums[i] *= factor
                for c in range(COLUMNS):
                    acc[i * COLUMNS + c] *= factor

        n_end = columns
        if not MASKED:
            n_end = min(m0 + BLOCK_Q + call.offset, columns)
        k_step, v_step = call.direction * k.strides[2], call.direction * v.strides[2]
        for n0 in range(n_first, n_end, BLOCK_KV):
            token = column0 + call.direction * n0
            k_start, v_start = start(k, b, h, token), start(v, b, h, token) + e0
            for e in range(N_SCORES):
                scores[e] = num.zero
            for d in range(0, call.D, DEPTH):
                left = call.D - d
                cuda.syncthreads()
                k_tile.load(smem, K, K_ROW, loading, k.data, k_start + d, k_step, columns - n0, left, 0)
                cuda.syncthreads()
                depth = DEPTH
                if left <= DEPTH:
                    depth = (left + more + 3) // 4 * 4
                    if more != 0:
                        for r in range(tid, BLOCK_KV, THREADS):
                            term = num.one
                            if (call.column_term != 0) & (n0 + r < columns):
                                term = terms.data[start(terms, b, h, token + call.direction * r)]
                            append(smem, K + r * K_ROW + left, term)
                        cuda.syncthreads()
                product.abt(scores, frag, frags, smem, Q + d // DEPTH * SLICE, K_ROW, K, K_ROW, depth, line, lane)

            if NORMALIZED:
                for r in range(tid, BLOCK_KV, THREADS):
                    weight = num.one
                    if (call.column_weighted != 0) & (n0 + r < columns):
                        weight = weights.data[start(weights, b, h, token + call.direction * r)]
                    smem[u32(W + r)] = weight
            apart = mem.number(m + call.offset - n0 - lane)  # of my first row and column
            for i in range(TILE_Q):
                share = num.zero
                for j in range(TILE_KV):
                    n = n0 + lane + ACROSS * j
                    seen = i32(n - n_first) < seen_by[i]
                    if MASKED:
                        factor = num.zero
                        if seen:
                            row, column = row0 + call.direction * (m + i), column0 + call.direction * n
                            at = h * mask.strides[0] + row * mask.strides[1] + column * mask.strides[2]
                            factor = mem.number(mask_mem.load(mask.data, at))
                    else:
                        factor = num.exp2(log2 * (apart + mem.number(i - ACROSS * j)))
                    score = scores[i * TILE_KV + j] * call.scale * factor + num.zero  # no -0
                    if not seen:
                        score = num.minus_zero
                    smem[u32(P + (line * TILE_Q + i) * P_ROW + lane + ACROSS * j)] = score
                    if NORMALIZED:
                        share += abs(score) if call.normalize == ABS else score
                if NORMALIZED:
                    sums[i] += share

            cuda.syncthreads()
            strange = v_tile.load(smem, K, V_ROW, loading, v.data, v_start, v_step, columns - n0, call.Dv - e0, W)
            count = min((n_end - n0 + 3) // 4 * 4, BLOCK_KV)
            if cuda.syncthreads_or(strange):
                product.ab_counted(acc, smem, P, P_ROW, K, V_ROW, count, GROUPS, line, lane)
            else:
                product.ab(acc, piece, frag, frags, smem, P, P_ROW, K, V_ROW, count, GROUPS, line, lane)

        e_mine = e0 + lane * NEAR  # my first column of the result
        left = i32(call.Dv - e_mine)
        for i in range(TILE_Q):
            inverse = num.one
            row = row0 + call.direction * (m + i)
            if NORMALIZED and call.normalize != 0:
                total = lanes.sum(sums[i])
                size = abs(total)
                if not size <= num.one:  # a NaN too
                    inverse = num.one / size
                if (call.sums != 0) & (m + i < rows) & (lane == 0) & (e0 == 0):
                    row_sum.data[start(row_sum, b, h, row)] = total
            if m + i < rows:
                if NORMALIZED and call.row_weighted != 0:
                    inverse = weights.data[start(weights, b, h, row)]
                to = start(out, b, h, row) + e_mine
                for c in range(COLUMNS):
                    e = c // NEAR * ACROSS * NEAR + c % NEAR
                    if i32(e) < left:
                        mem.store(out.data, to + e, acc[i * COLUMNS + c] * inverse)

    return retention_rows
