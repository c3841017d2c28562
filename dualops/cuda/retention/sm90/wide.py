"""A pass of retention on Hopper's tensor cores for wide heads: keys to 512, values of any width, by slices.

A state [256, 512] in float32 is 512 KiB, twice an SM's registers. Each of its columns needs all keys and one column of
V. So a block has a slice of the columns, and each of its two warpgroups has 64 of them with their whole state. The
warpgroups share Q and K, and do not communicate. The state is transposed, [64, keys]: this makes the widest products
(m64n256k16), and puts the decay on V, whose 64 columns are fewer than the keys.

    producer, one thread            a consumer, for the queries r and tokens c of a chunk of 64
    for each chunk:                 for each chunk:
    1  load K and V                 2  scores [64, 64] = Q @ K.T     3  o [64, 64] = Q @ state.T, overlapped
       load Q                          P = scale * gamma^(r - c) * scores, 0 where c > r;  o *= scale * gamma^(r + 1)
                                    4  o += P @ V, stored to memory, overlapped with what follows
                                    5  state [64, keys] = gamma^n * state + (gamma^(n - 1 - c) * V).T @ K
                                    6  state, rounded, to shared memory, for its own warpgroup

Passes that go back, segments, heads that forget at once, states that are results, and recomputed elements: as in
`chunks`.

With more than 256 keys (the gradient's passes with Dv in the place of D) 64 columns of the state do not fit in a
warpgroup's registers. Retention is linear in q . k, so it is the sum of retention of the first half of the keys and of
the second. Each warpgroup has a half of the keys and the same 64 columns of V. The second hands its o to the first,
which stores the sum. The second leaves its state in shared memory until the first has recomputed elements.

Registers: keys / 2 for the state, 128 for 256 keys; with it 32 scores and 32 of o, later 16 words of P or V.T. For a
result 48 words of V.T and 32 sums. Shared memory: `WideConfig.tiles`. For 256 keys Q 32, K 2 * 32, V 2 * 16, states 64,
o 16: 208 KiB. For two halves of 256 Q 64, K 64, V 8, states 64, o 8, the exchange 16: 224 KiB, one stage.

(2, 8192, 8, 256, 512) has B * S * H = 131072 tokens: four slices a sequence, 64 blocks, so two segments each. A block's
chunk is 13.6 MFLOP, 3300 cycles of tensor cores. Its 80 KiB of loads take as long, at the 24 bytes a cycle that an SM
gets from L2: 0.12 ms for its 64 chunks. The gradient's passes with 512 keys load 136 KiB a chunk.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, tensor_map, u8, u32, verb
from ...ptx.warp import griddepcontrol_launch_dependents, griddepcontrol_wait
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.epilogue import box_output
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline, second_barrier
from ...tile.products import recomputed_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import meet_alone
from ...tile.warpgroup_exchange import warpgroup_exchange
from ..arguments import call_type, inputs_type
from ..nan_repair import chunk_repair
from .chunk_decay import constant_decay
from .config import BOX, CONSUMERS, DTYPE, SEGMENT_STATES, WARPS, Loaded, Walk, WideConfig, chunks_of, loaded_types
from .state_sums import exact_pieces, rounded
from .states import diagonal_residual, fragments_of, place_of, state_smem


@builds
def build_wide(config: WideConfig, D: int, walk: Walk) -> Kernel:
    """retention_wide_sm90(maps, o_map, x, states, gamma, call, slices).

    maps: `Loaded`. states: `SegmentStates`. slices: those of the columns of a sequence. D: keys, in whole boxes.
    """
    tiles, CHUNK, STEP = config.tiles(D), config.chunk, -config.chunk if walk.back else config.chunk
    HALVES, KEYS, VALUES, stages = tiles.halves, tiles.keys, tiles.values, tiles.stages
    num, decays, role = numbers(f32), constant_decay(CHUNK, BOX, walk.back), roles(CONSUMERS, most=True)
    # from one warpgroup's part to the next one's: bytes of Q and K, keys, bytes of V, columns
    Q_APART, KEYS_APART = (tiles.q.nbytes, KEYS) if HALVES else (0, 0)
    V_APART, COLUMNS_APART = (0, 0) if HALVES else (tiles.v.nbytes, BOX)
    q_tile, k_tile = box_tile(tiles.q_tile, 0, 2), box_tile(tiles.q_tile, tiles.k_at, 2)
    v_tile = box_tile(tiles.v_tile, tiles.v_at, 2)
    q_pipe, k_pipe = pipeline(1, tiles.q_tile.nbytes, WARPS), pipeline(stages, tiles.q_tile.nbytes, WARPS)
    v_part = second_barrier(stages, tiles.v_tile.nbytes)
    qk, qs = warpgroup_mma(DTYPE, tiles.q, tiles.q), warpgroup_mma(DTYPE, tiles.q, tiles.state)
    pv, rows, near = register_mma(DTYPE, tiles.v), softmax_rows(DTYPE, CHUNK // 2, BOX // 2), diagonal_residual(tiles.v)
    fragments, chunks_from = fragments_of(KEYS, transposed=True), chunks_of(CHUNK, walk.back)
    carry, boxes = state_smem(tiles.state, tiles.state_at), box_output(DTYPE, BOX, tiles.o_at, 1, 2)

    @verb
    def weight(args, token):
        log2_gamma, count, kept_scale, row = args
        return decays.weight((log2_gamma, count, kept_scale), i32(row + token))

    if config.parts > 1:
        kv = exact_pieces(tiles.v, tiles.k, weight)
    else:
        kv = rounded(tiles.v, tiles.k, weight, same_columns=True)
    half = warpgroup_exchange(tiles.sum_at, pv.size, 1, True)

    @verb
    def of_state(room, d, column):
        smem, state_at = room
        if HALVES:
            return carry.number((smem, i32(state_at + d // KEYS * tiles.state.nbytes)), column, i32(d % KEYS))
        return carry.number(room, column, d)

    @verb
    def load_q(smem, q_map, q_bars, i, m0, others):
        q_tile.load(smem, q_pipe.acquire(q_bars, i), q_map, Corner(m0, 0, others), q_bars.full)

    @verb
    def task(block, call, segments, slices):
        """Return a block's segment, head, batch and first column."""
        place = block // u32(segments)
        head = place // u32(slices)
        e0 = i32(place % u32(slices) * u32(VALUES))
        return i32(block % u32(segments)), i32(head % u32(call.H)), i32(head // u32(call.H)), e0

    repair = chunk_repair(DTYPE, of_state, place_of, pv.size, CHUNK, walk.back, decays)

    @verb
    def add_others(o, smem, place):
        """Add the other warpgroup's part of o."""
        eight = cuda.local.array(8, f32)
        for n in range(0, pv.size, 8):
            half.get(eight, smem, place, n)
            for e in range(8):
                o[n + e] += eight[e]

    @kernel(
        loaded_types(Loaded)[0],
        tensor_map,
        inputs_type(DTYPE),
        SEGMENT_STATES,
        decays.argument,
        call_type(DTYPE),
        i32,
        threads=role.threads,
    )
    def retention_wide_sm90(maps, o_map, x, states, gamma, call, slices):
        smem = cuda.shared.array(0, u8, alignment=1024)
        q_bars, k_bars, v_full, half_bars = q_pipe.barriers(), k_pipe.barriers(), v_part.barriers(), half.barriers()
        warpgroup = my_warpgroup()
        part, h, b, e0 = task(u32(cuda.blockIdx.x), call, states.count, slices)
        if cuda.threadIdx.x == 0:
            q_pipe.init(q_bars)
            k_pipe.init(k_bars)
            v_part.init(v_full)
            if HALVES:
                half.init(half_bars)
        prefetch_maps(maps, 1)
        q_pipe.start()
        if walk.overlaps:
            griddepcontrol_launch_dependents()
        i, (end, m0) = u32(0), chunks_from(part, call)
        if warpgroup == CONSUMERS:
            role.produce()
            if u32(cuda.threadIdx.x) % u32(128) == u32(0):
                while i != end:
                    if walk.looks and HALVES:  # there Q's buffer is free first
                        load_q(smem, maps.q, q_bars, i, m0, (h, b))
                    stage = k_pipe.acquire(k_bars, i)
                    k_tile.load(smem, stage, maps.k, Corner(m0, 0, (h, b)), k_bars.full)
                    v_part.expect(v_full, i)
                    v_tile.load(smem, stage, maps.v, Corner(e0, m0, (h, b)), v_full)
                    if walk.looks and not HALVES:
                        load_q(smem, maps.q, q_bars, i, m0, (h, b))
                    m0 = i32(m0 + STEP)
                    i = k_pipe.next(i)
        else:
            role.consume()
            e0, d0 = i32(e0 + COLUMNS_APART * warpgroup), i32(KEYS_APART * warpgroup)
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            log2_gamma = decays.of(gamma, call, h)
            state_at = i32(tiles.state_at + tiles.state.nbytes * warpgroup)
            scores, probs, o, state = qk.fragment(), pv.left(), qs.fragment(), kv.fragment()
            near_words, room = near.words(), kv.room()
            for j in range(kv.size // 4):
                for e in range(4):
                    state[4 * j + e] = num.zero
            if walk.begins:
                fragments.load(state, states, (b, h, part), (e0, d0), (call.Dv, call.D))
            if walk.looks:
                carry.put_to(smem, state_at, state)
                meet_alone(warpgroup)
            while i != end:
                log2_gamma = decays.again(log2_gamma)
                if HALVES and walk.begins and walk.overlaps and not walk.back:
                    warpgroup = my_warpgroup()  # recomputed: or this kernel would spill
                count = min(i32(call.rows - m0), i32(CHUNK))
                # 0, but unknown to the compiler: registers keep nothing computed from it
                row = i32(u32(m0) % u32(CHUNK))
                stage = k_pipe.wait(k_bars, i)
                k_at = i32(k_tile.at(stage) + Q_APART * warpgroup)
                v_at = i32(v_tile.at(stage) + V_APART * warpgroup)
                if walk.looks:
                    q_at = i32(q_tile.at(q_pipe.wait(q_bars, i)) + Q_APART * warpgroup)
                    qk.start(scores, smem, q_at, k_at, 0)  # scores = Q @ K.T
                    qs.start(o, smem, q_at, state_at, 0)  # o = Q @ state.T
                    qk.wait_but_one(scores)
                    decays.pairs(scores, row, log2_gamma, call.scale)
                    if decays.forgets(log2_gamma):
                        near.keep(near_words, scores)
                    rows.pack(probs, scores)
                    qs.wait(o)
                    q_pipe.release(q_bars, i)
                    decays.rows(o, row, count, log2_gamma, call.state_scale)
                    v_part.wait(v_full, i)
                    pv.add(o, probs, smem, v_at, 1)  # o += P @ V
                else:
                    v_part.wait(v_full, i)
                fade = decays.fade(log2_gamma, count)
                kv.fade(state, fade)
                if walk.looks:
                    pv.wait(o)
                    if decays.forgets(log2_gamma):
                        near.add(o, near_words, smem, v_at)
                    if HALVES and warpgroup == 1:
                        half.put(smem, 0, o)
                        half.hand(half_bars, i)
                    else:
                        if HALVES:
                            # recomputed: no register is left for it during products
                            _, h, b, e0 = task(u32(recomputed_i32(i32(cuda.blockIdx.x))), call, states.count, slices)
                            add_others(o, smem, half.take(half_bars, i))
                        repair(o, (x, (smem, state_at)), (b, h, m0, 0, e0), log2_gamma, call)
                        boxes.store_all(smem, o_map, o, Corner(m0, e0, (h, b)))  # all products and reads are over
                        if HALVES:
                            half.free(half_bars, i)
                known = log2_gamma, count, call.kept_scale, row
                kv.add(state, room, smem, (v_at, k_at), known, fade)  # state += (decayed V).T @ K
                v_part.leave()
                k_pipe.release(k_bars, i)
                if walk.looks:
                    if HALVES and warpgroup == 1:
                        half.claim(half_bars, i + u32(1))  # the first has read the previous state
                    own = my_warpgroup()  # recomputed: its register held something else
                    carry.put_to(smem, i32(tiles.state_at + tiles.state.nbytes * own), state)
                    meet_alone(own)
                m0 = i32(m0 + STEP)
                i = k_pipe.next(i)
            if walk.finishes:
                # recomputed: or its address would stay in a register from the beginning
                part, h, b, e0 = task(u32(recomputed_i32(i32(cuda.blockIdx.x))), call, states.count, slices)
                warpgroup = my_warpgroup()
                e0, d0 = i32(e0 + COLUMNS_APART * warpgroup), i32(KEYS_APART * warpgroup)
                fragments.store(states, state, (b, h, part), (e0, d0), (call.Dv, call.D))
            if walk.looks:
                boxes.finish()
        if walk.overlaps and cuda.threadIdx.x < 32:  # a consumer: idle lanes of the producer would delay the loads
            griddepcontrol_wait()

    return retention_wide_sm90
