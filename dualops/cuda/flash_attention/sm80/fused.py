"""dq, dk and dv of attention by mma.sync in one kernel of five products. Dao 2023 (arXiv:2307.08691), Alg. 2, in order.

A block of eight warps takes 128 keys of one key head, and all that looks at them, one tile of BLOCK_Q queries after
another, from the last on. Rows are keys, columns queries, as in `dkv`. Two warps share 32 keys, two strips of 16: of S
and dP each makes those of half of the queries, of dk and dv half of the columns, and of dq each warp 32 x 32.

    1  K, V, and the first tiles of queries that see some of the keys, on their way
    2  for each query head of the group, for each tile of queries that see some of the keys, 32 of my queries at a time:
    3      S.T [32, 32] = K @ Q.T, dP.T [32, 32] = V @ dO.T
    4      P.T = exp2(S.T - lse), 0 where a mask is; to shared memory; dv [32, Dv / 2] += P.T @ dO
    5      dS.T = P.T * (dP.T - delta); to shared memory
    6      dk [32, D / 2] += dS.T @ Q
    7      all threads meet; a later tile's Q, dO, lse and delta on their way
    8      dv and dk likewise, of the other warp's queries, with what it has put into shared memory
    9      dq [32, 32] = dS @ K, of all 128 keys; added to its sum in memory
   10  two warps change halves of columns for strips; dk *= scale; dk and dv, 16 rows of a warp at a time

The sum of a tile's dq has one order, whatever blocks run when: a thread waits until all blocks before have added
(`tile.ordered_sums`), before all meet at 7; that its own has added it tells after they have met once more. Blocks draw
their work, a head's first keys first, and all walk from the last tile on, so that who is waited for began before who
waits, and they follow one another. Or, of causal heads of 64, a head's last keys come first, and blocks walk from the
first tile on that sees theirs, so that none waits where it begins (`Sm80FusedConfig.ascends`). `dq_finish` makes rows.

Why so: a multiprocessor's tensor cores make 16 x 8 x 16 in 1.6 clocks by mma.sync (Hopper), and its shared memory reads
128 bytes in a clock, 256 of a right factor and 512 of a left one for that. A warp of 16 keys by 32 queries (`dkv`)
reads, in clocks for each such product, 3 for S and dP, whose left factor is read anew for each tile, and 2 for dk and
dv. By 32 x 32, S and dP take (64 + 64) / 64 = 2; dk and dv (64 + 16 + 16) / 64 = 1.5, as half of P and dS is where it
is needed, in registers, and half is written and read; dq 2: in all 9 for five products, where two kernels take 16 for
seven. Of heads of 64, K and V stay in registers, and S and dP take 1: 8 in all.

Shared memory: `Sm80FusedConfig.tiles`, (256 + stages * 2 * BLOCK_Q) * (D + Dv) + places * 512 * BLOCK_Q bytes: 224
KiB of D = 128 with three stages, and two places for P and dS, where all meet once a tile; 160 KiB of D = 64 with two
stages and one place, where they meet twice. Registers: D / 2 + Dv / 2 of dk and dv, 32 of S.T, 32 of dP.T (or dq), 16
packed, of heads of 64 64 of K and V, and about 40.
"""

from __future__ import annotations

from ...backend import Kernel, builds, cuda, f32, i32, i64, kernel, pointer, u32, verb
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
from .dq_config import ITEMSIZE
from .fused_config import HALVES, PART, STRIPS, Sm80FusedConfig
from .halves import halves_of
from .output import output_of
from .reading import GradientVectors
from .strips_of_keys import strips_of_keys

WAITS, TELLS = 32, 64  # threads: of one warp who waits for other blocks, of another who tells them


@builds
def build_fused(
    config: Sm80FusedConfig, variant: Variant, vectors: GradientVectors, dk_aligned: bool, dv_aligned: bool
) -> Kernel:
    """flash_attention_fused_sm80(sums, flags, tiles, heads, section, dk, dv, q, k, v, do, lse, delta, H, group, Sq,
    Sk, aligned, scale, lengths, options).

    sums: dq in float32, `tiles` tiles of each head, as `tile.tile_sums` has them. flags: zeros; a counter, then one a
    tile. vectors: elements that copies have. dk_aligned, dv_aligned: they are stored 16 bytes at a time. heads: of all
    batches. section: heads of keys whose queries blocks share at a time.
    """
    mem, dtype, D, Dv, threads = storage(variant.dtype), variant.dtype, variant.D, variant.Dv, config.threads
    BLOCK_KV, BLOCK_Q, HALF, PARTS = config.block_kv, config.block_q, config.half, config.parts
    chain, tile = chain_of(variant.having, dtype, gradient=True), config.tiles(D, Dv)
    task_of = walk_by_keys(BLOCK_KV, BLOCK_Q, variant.varlen, chain, last_first=config.ascends)
    order = from_the_first(BLOCK_KV, BLOCK_Q, chain) if config.ascends else from_the_last(BLOCK_KV, BLOCK_Q)
    k_copies, v_copies = tile_copies(tile.k, D, vectors.k, threads), tile_copies(tile.v, Dv, vectors.v, threads)
    q_copies, do_copies = tile_copies(tile.q, D, vectors.q, threads), tile_copies(tile.do, Dv, vectors.do, threads)
    if config.held:
        kq = held_strips(dtype, tile.k, tile.q_part, HALVES, tile.q.size)
        vdo = held_strips(dtype, tile.v, tile.do_part, HALVES, tile.do.size)
    else:
        kq = strip_abt(dtype, tile.k, tile.q_part, HALVES, held=False, strips=STRIPS)
        vdo = strip_abt(dtype, tile.v, tile.do_part, HALVES, held=False, strips=STRIPS)
    pdo, dsq = strip_ab(dtype, tile.do_steps, 1, STRIPS), strip_ab(dtype, tile.q_steps, 1, STRIPS)
    words = strip_words(tile.words, STRIPS)
    dsk = tile_sums(dtype, tile.ds, tile.k_right, HALVES * PARTS, HALVES)
    score = fragment_scores(chain, ROWS, PART, apart=False, bent=chain.bends, transposed=True)
    columns = columns_of(config, chain)
    gradient = strips_of_keys(score, gradient_of_keys(chain, score, dtype, PART), kq.size // STRIPS)
    hidden = hidden_keys(chain, variant, dsq.size, pdo.size)
    dk_halves, dv_halves = (halves_of(size, config.rows_bytes(D, Dv), threads) for size in (dsq.size, pdo.size))
    dk_output = output_of(dtype, D, box_count(D, ITEMSIZE), dk_aligned, max(D, Dv))
    dv_output = output_of(dtype, Dv, box_count(Dv, ITEMSIZE), dv_aligned, max(D, Dv))
    STAGES, PLACES, AHEAD = config.stages, config.places, config.stages - 1
    Q_BOX, DO_BOX, Q_PART, DO_PART = tile.q.size, tile.do.size, tile.q_part.size, tile.do_part.size
    WORDS, TILE, MEETS_TWICE = tile.words.size, BLOCK_Q * D, config.places == 1

    @verb
    def load(smem, stage, q, do, task, h, m0):
        """A tile of queries; in no group of copies yet."""
        for half in range(HALVES):
            first = i32(m0 + HALF * half)
            q_at = i32(tile.q_at + stage * tile.q_size + HALVES * Q_BOX * half)
            do_at = i32(tile.do_at + stage * tile.do_size + HALVES * DO_BOX * half)
            q_copies.load(smem, q_at, lines(q, task.b, h, task.q_first + first, task.Sq - first))
            do_copies.load(smem, do_at, lines(do, task.b, h, task.q_first + first, task.Sq - first))

    @verb
    def number_of(b, h, m0, H, q_tiles):
        """Of a tile of queries."""
        return i32(i32(i32(b * H) + h) * q_tiles + i32(u32(m0) // u32(BLOCK_Q)))

    @kernel(
        pointer(f32),
        pointer(i64),
        *[i32] * 3,
        *[array_type(variant)] * 6,
        *[statistic_type(variant)] * 2,
        *size_types(variant),
        threads=threads,
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
        smem, slots = cuda.shared.array(0, mem.element, alignment=128), columns.slots()
        # my number; of the sum that is to be told of its own, and how many have added
        drawn = cuda.shared.array(3, i32)
        if cuda.threadIdx.x == 0:
            drawn[0] = draw(flags)
        cuda.syncthreads()
        extent = Extent(heads, H, group, Sq, Sk, aligned, section)
        task = task_of(drawn[0], extent, lengths, options)
        if task.n0 >= task.Sk:
            return
        b, h_kv, n0 = task.b, task.h_kv, task.n0
        mine, my_rows = i32(cuda.threadIdx.x // 128), i32(cuda.threadIdx.x % 128 // 32 * 16)
        other, brings = i32(1 - mine), cuda.threadIdx.x < 32
        i, end = u32(0), u32(u32(group) * (u32(task.end - task.first + (BLOCK_Q - 1)) // u32(BLOCK_Q)))
        start, own = order.start(task), columns.own()
        h, m0 = i32(h_kv * group), start
        h_next, m_next = h, m0
        k_copies.load(smem, 0, lines(k, b, h_kv, task.k_first + n0, task.Sk - n0))
        v_copies.load(smem, tile.v_at, lines(v, b, h_kv, task.k_first + n0, task.Sk - n0))
        for stage in range(AHEAD):
            if u32(stage) < end:
                load(smem, i32(stage), q, do, task, h_next, m_next)
                if brings:
                    columns.fetch(own, lse, delta, task, h_next, m_next)
                    columns.put(slots, i32(stage), own)
                h_next, m_next = order.next(task, h_next, m_next, start)
        cp_async_commit()

        scores, d_probs, packed = kq.fragment(), vdo.fragment(), pdo.left()
        factors, seed = (scale, score.units(scale)[0]), score.seed(options)
        dk_acc, dv_acc = dsq.fragment(), pdo.fragment()
        cp_async_wait_group(0)
        cuda.syncthreads()
        k_place, v_place = kq.place(my_rows, 0), vdo.place(my_rows, tile.v_at)
        k_frag, v_frag = kq.hold(smem, k_place), vdo.hold(smem, v_place)
        while i != end:
            stage, place = i32(i % u32(STAGES)), i32(i % u32(PLACES))
            q_at, do_at = i32(tile.q_at + stage * tile.q_size), i32(tile.do_at + stage * tile.do_size)
            p_at, ds_at = i32(tile.p_at + place * tile.words_size), i32(tile.ds_at + place * tile.words_size)
            if cuda.threadIdx.x == WAITS:
                all_added(flags, i64(number_of(b, h, m0, H, q_tiles)) + 1, order.rank(task, m0, options))
            for part in range(PARTS):
                which = i32(PARTS * mine + part)
                where = Where(b, h, i32(m0 + PART * which), n0, task.Sq, task.Sk, task.offset)
                q_mine = i32(q_at + HALVES * Q_BOX * mine + Q_PART * part)
                do_mine = i32(do_at + HALVES * DO_BOX * mine + DO_PART * part)
                given, at = (options, factors, where), i32(PART // 4 * which)
                # opaque: places of all steps would be kept in registers, of which there are none left
                kq.multiply(scores, k_frag, smem, opaque_i32(k_place), q_mine)  # S.T = K @ Q.T
                vdo.multiply(d_probs, v_frag, smem, opaque_i32(v_place), do_mine)  # dP.T = V @ dO.T
                gradient.probabilities(packed, scores, given, seed, slots, i32(columns.lse(stage) + at))
                words.put(smem, i32(p_at + WORDS * which), packed)
                pdo.add(dv_acc, packed, smem, i32(do_mine + DO_BOX * mine))  # dv += P.T @ dO, of my queries
                gradient.d_scores(packed, d_probs, scores, given, seed, slots, i32(columns.delta(stage) + at))
                words.put(smem, i32(ds_at + WORDS * which), packed)
                dsq.add(dk_acc, packed, smem, i32(q_mine + Q_BOX * mine))  # dk += dS.T @ Q, of my queries
            if not MEETS_TWICE:
                cp_async_wait_group(0)
            cuda.syncthreads()
            number, rank = number_of(b, h, opaque_i32(m0), H, q_tiles), order.rank(task, opaque_i32(m0), options)
            if not MEETS_TWICE and cuda.threadIdx.x == TELLS:
                if i != u32(0):
                    pass_on(flags, i64(drawn[1]) + 1, drawn[2])
                drawn[1], drawn[2] = number, i32(rank + 1)
            coming, more = i32((i + u32(AHEAD)) % u32(STAGES)), i + u32(AHEAD) < end
            if MEETS_TWICE:
                h_next, m_next = order.next(task, h, m0, start)
            for e in range(len(own)):  # else registers would keep what the last tile had
                own[e] = f32(0)
            if more:
                load(smem, coming, q, do, task, h_next, m_next)
                cp_async_commit()
                if brings:
                    columns.fetch(own, lse, delta, task, h_next, m_next)
            for part in range(PARTS):
                which = i32(PARTS * other + part)
                q_other = i32(q_at + HALVES * Q_BOX * other + Q_PART * part)
                do_other = i32(do_at + HALVES * DO_BOX * other + DO_PART * part)
                words.take(packed, smem, i32(p_at + WORDS * which))
                pdo.add(dv_acc, packed, smem, i32(do_other + DO_BOX * mine))  # of the other's
                words.take(packed, smem, i32(ds_at + WORDS * which))
                dsq.add(dk_acc, packed, smem, i32(q_other + Q_BOX * mine))
            dq_acc = dsk.multiply(smem, ds_at, 0)  # dq [BLOCK_Q, D] = dS @ K
            if rank == 0:
                dsk.store(sums, i64(number) * TILE, dq_acc)
            else:
                dsk.add(sums, i64(number) * TILE, dq_acc)
            if more and brings:
                columns.put(slots, coming, own)
            if MEETS_TWICE:
                h, m0 = h_next, m_next
                cp_async_wait_group(0)
                cuda.syncthreads()
                if cuda.threadIdx.x == TELLS:
                    pass_on(flags, i64(number) + 1, i32(rank + 1))
            else:
                h_next, m_next = order.next(task, h_next, m_next, start)
                h, m0 = order.next(task, h, m0, start)
            i = u32(i + u32(1))

        floats, row = cuda.shared.array(0, f32, alignment=128), i32(APART * mine)
        if not MEETS_TWICE:
            cuda.syncthreads()
            if cuda.threadIdx.x == TELLS and end != u32(0):
                pass_on(flags, i64(drawn[1]) + 1, drawn[2])
        dk_halves.swap(floats, dk_acc, mine)
        cuda.syncthreads()
        dv_halves.swap(floats, dv_acc, mine)
        task = task_of(opaque_i32(drawn[0]), extent, lengths, options)  # anew: no register kept it until now
        hidden.repair(dk_acc, dv_acc, (q, k, v, do, lse, delta), task, row, group, scale, options)
        for e in range(dsq.size):
            dk_acc[e] *= scale
        rows = key_rows_of(task)
        dk_output.store(floats, dk, dk_acc, rows, row)
        dv_output.store(floats, dv, dv_acc, rows, row)

    return flash_attention_fused_sm80
