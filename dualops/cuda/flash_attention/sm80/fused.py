"""dq, dk and dv of attention in one kernel by mma.sync. WRITE."""

from __future__ import annotations

from ...backend import Kernel, builds, cuda, f32, i32, i64, kernel, pointer, u32
from ...tile.async_copies import cp_async_commit, cp_async_wait_group
from ...tile.held_strips import held_strips
from ...tile.ordered_sums import all_added, draw, pass_on
from ...tile.products import opaque_i32
from ...tile.storage import storage
from ...tile.strip_words import strip_words
from ...tile.strips import APART, strip_ab, strip_abt
from ...tile.tile_copies import tile_copies
from ...tile.tile_sums import tile_sums
from ..arguments import Variant, array_type, size_types, statistic_type
from ..columns import columns_of
from ..fragment_scores import fragment_scores
from ..gradient_of_keys import gradient_of_keys
from ..hidden_keys import hidden_keys
from ..key_rows import from_the_first, from_the_last, key_rows_of
from ..options import chain_of
from ..tiles import Where, lines
from ..walk import Extent, walk_by_keys
from .config import ROWS, box_count
from .fused_config import HALVES, PART, Sm80FusedConfig
from .dq_config import ITEMSIZE
from .halves import halves_of
from .output import output_of
from .reading import GradientVectors
from .strips_of_keys import strips_of_keys


@builds
def build_fused(
    config: Sm80FusedConfig, variant: Variant, vectors: GradientVectors, dk_aligned: bool, dv_aligned: bool
) -> Kernel:
    """flash_attention_fused_sm80(sums, flags, tiles, heads, section, dk, dv, q, k, v, do, lse, delta, H, group, Sq,
    Sk, aligned, scale, lengths, options).
    """
    mem, dtype, BLOCK_Q, HALF, PARTS = storage(variant.dtype), variant.dtype, config.block_q, config.part, config.parts
    D, Dv, STAGES, PLACES = variant.D, variant.Dv, config.stages, config.places
    chain, tile = chain_of(variant.having, dtype, gradient=True), config.tiles(D, Dv)
    task_of = walk_by_keys(config.block_kv, BLOCK_Q, variant.varlen, chain, last_first=config.ascends)
    order = from_the_first(config.block_kv, BLOCK_Q, chain) if config.ascends else from_the_last(config.block_kv, BLOCK_Q)
    k_copies = tile_copies(tile.k, D, vectors.k, config.threads)
    v_copies = tile_copies(tile.v, Dv, vectors.v, config.threads)
    q_copies = tile_copies(tile.q, D, vectors.q, config.threads)
    do_copies = tile_copies(tile.do, Dv, vectors.do, config.threads)
    if config.held:
        kq = held_strips(dtype, tile.k, tile.q_part, HALVES, tile.q.size)
        vdo = held_strips(dtype, tile.v, tile.do_part, HALVES, tile.do.size)
    else:
        kq = strip_abt(dtype, tile.k, tile.q_part, HALVES, held=False, strips=2)
        vdo = strip_abt(dtype, tile.v, tile.do_part, HALVES, held=False, strips=2)
    pdo, dsq = strip_ab(dtype, tile.do_steps, 1, 2), strip_ab(dtype, tile.q_steps, 1, 2)
    words, dsk = strip_words(tile.words, 2, config.matrices), tile_sums(dtype, tile.ds, tile.k_right, HALVES * PARTS, HALVES)
    score = fragment_scores(chain, ROWS, PART, apart=False, bent=chain.bends, transposed=True)
    columns = columns_of(config)
    gradient = strips_of_keys(score, gradient_of_keys(chain, score, dtype, PART), kq.size // 2)
    hidden = hidden_keys(chain, variant, dsq.size, pdo.size)
    halves_k, halves_v = (halves_of(size, config.rows_bytes(D, Dv), config.threads) for size in (dsq.size, pdo.size))
    dk_output = output_of(dtype, D, box_count(D, ITEMSIZE), dk_aligned, max(D, Dv))
    dv_output = output_of(dtype, Dv, box_count(Dv, ITEMSIZE), dv_aligned, max(D, Dv))
    Q_HALF, DO_HALF, Q_BOX, DO_BOX, WORDS_PART = HALVES * tile.q.size, HALVES * tile.do.size, tile.q.size, tile.do.size, tile.words.size
    ORDER, SOON, Q_LINES, DO_LINES = config.order, config.soon and PLACES == 1, tile.q_part.size, tile.do_part.size
    TOP, END, AFTER = config.poll == "top", config.poll == "end", config.poll == "after"
    STATISTICS, AHEAD, TILE = PART // 4, STAGES - 1, BLOCK_Q * D

    @kernel(
        pointer(f32),
        pointer(i64),
        *[i32] * 3,
        *[array_type(variant)] * 6,
        *[statistic_type(variant)] * 2,
        *size_types(variant),
        threads=config.threads,
    )
    def flash_attention_fused_sm80(
        sums,
        flags,
        q_tiles,
        heads,
        section,
        dk,
        dv,
        q,
        k,
        v,
        do,
        lse,
        delta,
        H,
        group,
        Sq,
        Sk,
        aligned,
        scale,
        lengths,
        options,
    ):
        smem, slots, drawn = cuda.shared.array(0, mem.element, alignment=128), columns.slots(), cuda.shared.array(1, i32)
        if cuda.threadIdx.x == 0:
            drawn[0] = draw(flags)
        cuda.syncthreads()
        extent = Extent(heads, H, group, Sq, Sk, aligned, section)
        task = task_of(drawn[0], extent, lengths, options)
        if task.n0 >= task.Sk:
            return
        b, h_kv, n0 = task.b, task.h_kv, task.n0
        mine = i32(cuda.threadIdx.x // 128)
        other = i32(1 - mine)
        my_rows, warp = i32(cuda.threadIdx.x % 128 // 32 * 16), i32(cuda.threadIdx.x // 32)
        brings = warp == 0
        i, end = u32(0), u32(u32(group) * (u32(task.end - task.first + (BLOCK_Q - 1)) // u32(BLOCK_Q)))
        start = order.start(task)
        h, m0 = i32(h_kv * group), start
        h_next, m_next = h, m0
        own = columns.own()
        k_copies.load(smem, 0, lines(k, b, h_kv, task.k_first + n0, task.Sk - n0))
        v_copies.load(smem, tile.v_at, lines(v, b, h_kv, task.k_first + n0, task.Sk - n0))
        for ahead in range(AHEAD):
            if u32(ahead) < end:
                for part in range(HALVES):
                    first = i32(m_next + HALF * part)
                    q_at, do_at = tile.q_at + ahead * tile.q_size + part * Q_HALF, tile.do_at + ahead * tile.do_size + part * DO_HALF
                    q_copies.load(smem, q_at, lines(q, b, h_next, task.q_first + first, task.Sq - first))
                    do_copies.load(smem, do_at, lines(do, b, h_next, task.q_first + first, task.Sq - first))
                if brings:
                    columns.fetch(own, lse, delta, task, h_next, m_next)
                    columns.put(slots, i32(ahead), own)
                h_next, m_next = order.next(task, h_next, m_next, start)
        cp_async_commit()

        scores, d_probs, packed = kq.fragment(), vdo.fragment(), pdo.left()
        factors, seed = (scale, score.multiplier(scale)), score.seed(options)
        dk_acc, dv_acc = dsq.fragment(), pdo.fragment()
        flag, passed = i64(0), i32(0)
        cp_async_wait_group(0)
        cuda.syncthreads()
        k_place, v_place = kq.place(my_rows, 0), vdo.place(my_rows, tile.v_at)
        k_frag, v_frag = kq.hold(smem, k_place), vdo.hold(smem, v_place)
        while i != end:
            stage, coming = i32(i % u32(STAGES)), i32((i + u32(AHEAD)) % u32(STAGES))
            place = i32(i % u32(PLACES))
            q_at, do_at = i32(tile.q_at + stage * tile.q_size), i32(tile.do_at + stage * tile.do_size)
            p_at, ds_at = i32(tile.p_at + place * tile.words_size), i32(tile.ds_at + place * tile.words_size)
            rank = order.rank(task, m0, options)
            index = i64(i32(i32(b * H) + h) * q_tiles + i32(u32(m0) // u32(BLOCK_Q)))
            if ORDER and TOP:
                if cuda.threadIdx.x == 32:
                    all_added(flags, index + 1, rank)
            for part in range(PARTS):
                which = i32(PARTS * mine + part)
                where = Where(b, h, i32(m0 + PART * which), n0, task.Sq, task.Sk, task.offset)
                q_mine, do_mine = i32(q_at + Q_HALF * mine + Q_LINES * part), i32(do_at + DO_HALF * mine + DO_LINES * part)
                given, at = (options, factors, scale, where), i32(STATISTICS * which)
                # S.T = K @ Q.T
                kq.multiply(scores, k_frag, smem, opaque_i32(k_place), q_mine)
                gradient.probabilities(packed, scores, given, seed, slots, i32(columns.lse(stage) + at))
                words.put(smem, i32(p_at + WORDS_PART * which), packed)
                pdo.add(dv_acc, packed, smem, i32(do_mine + DO_BOX * mine))  # dv += P.T @ dO, of my queries
                # dP.T = V @ dO.T
                vdo.multiply(d_probs, v_frag, smem, opaque_i32(v_place), do_mine)
                gradient.d_scores(packed, d_probs, scores, given, seed, slots, i32(columns.delta(stage) + at))
                words.put(smem, i32(ds_at + WORDS_PART * which), packed)
                dsq.add(dk_acc, packed, smem, i32(q_mine + Q_BOX * mine))  # dk += dS.T @ Q, of my queries
            if ORDER and END:
                if cuda.threadIdx.x == 32:
                    all_added(flags, index + 1, rank)
            cp_async_wait_group(0)
            cuda.syncthreads()
            if ORDER and not SOON:
                if cuda.threadIdx.x == 64 and i != u32(0):
                    pass_on(flags, flag, passed)
            flag, passed = index + 1, rank + 1
            more = i + u32(AHEAD) < end
            if more:
                for part in range(HALVES):
                    first = i32(m_next + HALF * part)
                    q_next = i32(tile.q_at + coming * tile.q_size + part * Q_HALF)
                    do_next = i32(tile.do_at + coming * tile.do_size + part * DO_HALF)
                    q_copies.load(smem, q_next, lines(q, b, h_next, task.q_first + first, task.Sq - first))
                    do_copies.load(smem, do_next, lines(do, b, h_next, task.q_first + first, task.Sq - first))
                cp_async_commit()
                if brings:
                    columns.fetch(own, lse, delta, task, h_next, m_next)
            for part in range(PARTS):
                which = i32(PARTS * other + part)
                q_other, do_other = i32(q_at + Q_HALF * other + Q_LINES * part), i32(do_at + DO_HALF * other + DO_LINES * part)
                words.take(packed, smem, i32(p_at + WORDS_PART * which))
                pdo.add(dv_acc, packed, smem, i32(do_other + DO_BOX * mine))  # of the other half
                words.take(packed, smem, i32(ds_at + WORDS_PART * which))
                dsq.add(dk_acc, packed, smem, i32(q_other + Q_BOX * mine))
            dq_acc = dsk.multiply(smem, ds_at, 0)  # dq [BLOCK_Q, D] = dS @ K
            if rank == 0:
                dsk.store(sums, index * TILE, dq_acc)
            else:
                dsk.add(sums, index * TILE, dq_acc)
            if more:
                if brings:
                    columns.put(slots, coming, own)
                h_next, m_next = order.next(task, h_next, m_next, start)
            h, m0 = order.next(task, h, m0, start)
            if PLACES == 1:
                cp_async_wait_group(0)
                cuda.syncthreads()
                if ORDER and SOON:
                    if cuda.threadIdx.x == 64:
                        pass_on(flags, flag, passed)
            i = u32(i + u32(1))

        cuda.syncthreads()
        if not SOON:
            if cuda.threadIdx.x == 64 and end != u32(0):
                pass_on(flags, flag, passed)
        floats, row = cuda.shared.array(0, f32, alignment=128), i32(APART * mine)
        halves_k.swap(floats, dk_acc, mine)
        halves_v.swap(floats, dv_acc, mine)
        task = task_of(opaque_i32(drawn[0]), extent, lengths, options)  # anew: no register kept it until now
        hidden.repair(dk_acc, dv_acc, (q, k, v, do, lse, delta), task, row, group, scale, options)
        for e in range(dsq.size):
            dk_acc[e] *= scale
        rows = key_rows_of(task)
        dk_output.store(floats, dk, dk_acc, rows, row)
        dv_output.store(floats, dv, dv_acc, rows, row)

    return flash_attention_fused_sm80
