"""A pass of retention on Hopper's tensor cores, by chunks. Sun et al. 2023, arXiv:2307.08621, equation 7.

A block walks one sequence of one head from chunk to chunk of 128 tokens. Two warpgroups multiply, with 64 queries and
64 rows of the state each. A thread of a third warpgroup loads.

    producer, one thread            consumers, for the queries r and tokens c of a chunk
    for each chunk:                 for each chunk:
    1  load K and V                 2  scores [64, 128] = Q @ K.T;  P = scale * gamma^(r - c) * scores, 0 where c > r
       load Q                       3  o [64, Dv] = Q @ state;  o *= scale * gamma^(r + 1)
                                    4  o += P @ V, stored to memory, overlapped with what follows
                                    5  state [64, Dv] = gamma^n * state + (gamma^(n - 1 - c) * K).T @ V
                                    6  state, rounded, to shared memory, where both warpgroups read it next time

n is 128, or the number of tokens of the last chunk. The state stays in registers, in float32, from chunk to chunk. K.T
is loaded from shared memory transposed, so registers apply the decay to it. It is rounded to 16 bits. If the state is a
result, it is split into three parts, and a chunk's contribution is a sum of its own (`state_sums`).

For a head that forgets at once, as one with log_decay may, 4 has a second part (`diagonal_residual`). With
log_decay, `per_token_decay` finds each power of gamma in tables of the chunk. A second warp of the third warpgroup
computes these tables (`decay_tables`).

A probability of 0 times a NaN in V is a NaN. `nan_repair` recomputes an element of o that only 4 made NaN.

The gradient is three such passes (`passes`). Two go back, from the last chunk to the first. A query then sees the
tokens c >= r of its chunk and those after it. The state knows how far those are from the chunk's last token:

    o *= gamma^(n - 1 - r);   state = gamma^n * state + (scale * gamma^(c + 1) * K).T @ V

If a block walks a whole sequence, the three passes overlap: each launch lets the next one begin at once, and ends after
the previous one.

If this gives too few blocks, a sequence has segments of `state_chunk` tokens, one a block. Then two launches come
first: the same kernel without Q computes what each segment adds to the state, and `retention_walk` the state before
each.

Shared memory: `Sm90Config.tiles`, 2 * (128 * 128 * (1 + stages) + 128 * Dv * (2 + stages)) bytes, 224 KiB for Dv = 128,
and 2 KiB of tables. Registers: Dv / 2 for the state; with it 64 scores, then 32 words of P and Dv / 2 of o, then 32 of
K.T and o. If the products of 2 and 3 ran together, 64 scores and o would take 80 numbers a thread more than there are.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, tensor_map, u8, u32
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.epilogue import box_output
from ...tile.grids import let_next_grid_begin, wait_for_grid_before
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.products import opaque_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.second_barrier import second_barrier
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import warpgroup_barrier
from ..arguments import call_type, inputs_type
from ..nan_repair import chunk_repair
from .chunk_decay import constant_decay, diagonal_residual, per_token_decay
from .config import (
    BOX,
    CHUNK,
    CONSUMERS,
    DTYPE,
    SEGMENT_STATES,
    Loaded,
    Sm90Config,
    Walk,
    chunk_range,
    loaded_types,
)
from .decay_tables import decay_tables_feed
from .state_sums import state_sums
from .states import box_by_box, fragments_of, place_of, state_smem


@builds
def build_chunks(config: Sm90Config, Dv: int, walk: Walk) -> Kernel:
    """retention_sm90(maps, apart, o_map, x, states, decay, call).

    maps, apart: `Loaded`. states: `SegmentStates`. decay: gamma, or log_decay. Dv: in whole boxes.
    """
    STEP, STEPWISE, walk_of = -CHUNK if walk.back else CHUNK, config.stepwise, chunk_range(CHUNK, walk.back)
    num, role, warps, tiles = numbers(f32), roles(CONSUMERS, most=not STEPWISE), 4 * CONSUMERS, config.tiles(Dv)
    decays = per_token_decay(Dv, tiles.decay_at, walk.back) if STEPWISE else constant_decay(CHUNK, Dv, walk.back)
    steps = decay_tables_feed(tiles.decay_at, walk.back, warps)
    q_tile, k_tile = box_tile(tiles.q, 0, 2), box_tile(tiles.k, tiles.k_at, 2)
    v_tile = box_tile(tiles.v, tiles.v_at, 2)
    q_pipe, k_pipe = pipeline(1, tiles.q.nbytes, warps), pipeline(config.stages, tiles.k.nbytes, warps)
    v_part, both = second_barrier(config.stages, tiles.v.nbytes), warpgroup_barrier(CONSUMERS)
    qk, qs = warpgroup_mma(DTYPE, tiles.q, tiles.k), warpgroup_mma(DTYPE, tiles.q, tiles.state)
    pv, rows, fragments = register_mma(DTYPE, tiles.v), softmax_rows(DTYPE, CHUNK // 2, Dv // 2), fragments_of(Dv)
    carry, boxes = state_smem(tiles.state, tiles.state_at), box_output(DTYPE, Dv, tiles.o_at, Dv // BOX, 2)
    near, store_o = diagonal_residual(tiles.v), box_by_box(boxes)
    hidden = chunk_repair(DTYPE, carry.number, place_of, pv.size, CHUNK, walk.back, decays)
    kv = state_sums(tiles.k, tiles.v, config.parts > 1, decays.weight, overlapped=not walk.looks)

    @kernel(
        *loaded_types(Loaded),
        tensor_map,
        inputs_type(DTYPE),
        SEGMENT_STATES,
        decays.argument,
        call_type(DTYPE),
        threads=role.threads,
    )
    def retention_sm90(maps, apart, o_map, x, states, decay, call):
        smem = cuda.shared.array(0, u8, alignment=1024)
        q_bars, k_bars, v_full = q_pipe.barriers(), k_pipe.barriers(), v_part.barriers()
        warpgroup = my_warpgroup()
        part, head = i32(cuda.blockIdx.x % states.count), i32(cuda.blockIdx.x // states.count)
        b, h = i32(head // call.H), i32(head % call.H)
        steps_bars, tables = steps.barriers(), (smem, steps.eights())
        if cuda.threadIdx.x == 0:
            q_pipe.init(q_bars)
            k_pipe.init(k_bars)
            v_part.init(v_full)
            if STEPWISE:
                steps.init(steps_bars)
        prefetch_maps(maps, 1)
        q_pipe.start()
        if walk.overlaps:
            let_next_grid_begin()
        i, (end, m0) = u32(0), walk_of.chunks(part, call)
        if warpgroup == CONSUMERS:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                while i != end:
                    stage = k_pipe.acquire(k_bars, i)
                    k_tile.load(smem, stage, maps.k, Corner(m0, 0, (i32(h * apart.k), b)), k_bars.full)
                    v_part.expect(v_full, i)
                    v_tile.load(smem, stage, maps.v, Corner(0, m0, (i32(h * apart.v), b)), v_full)
                    if walk.looks:
                        stage = q_pipe.acquire(q_bars, i)
                        q_tile.load(smem, stage, maps.q, Corner(m0, 0, (i32(h * apart.q), b)), q_bars.full)
                    m0 = i32(m0 + STEP)
                    i = k_pipe.next(i)
            elif STEPWISE and u32(cuda.threadIdx.x) % u32(128) // u32(32) == u32(1):
                own = steps.own()
                while i != end:
                    steps.put(tables, steps_bars, i, own, decay, (b, h, m0), call.rows)
                    m0 = i32(m0 + STEP)
                    i = k_pipe.next(i)
        else:
            role.consume()
            row = i32(ROWS * warpgroup)
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            mine = decays.of(tables if STEPWISE else decay, call, h)
            scores, probs, o, state = qk.fragment(), pv.left(), qs.fragment(), kv.fragment()
            near_words, room = near.words(), kv.room()
            for j in range(kv.size // 4):
                for e in range(4):
                    state[4 * j + e] = num.zero
            if walk.begins:
                fragments.load(state, states, (b, h, part), (row, 0), (call.D, call.Dv))
            if walk.looks:
                carry.put(smem, state)
                both.meet()
            while i != end:
                mine = decays.again(mine)
                count = min(i32(call.rows - m0), i32(CHUNK))
                stage = k_pipe.wait(k_bars, i)
                k_at, v_at = k_tile.at(stage), v_tile.at(stage)
                if walk.looks:
                    q_at = q_tile.at(q_pipe.wait(q_bars, i))
                    qk.start(scores, smem, q_at, k_at, warpgroup)  # scores = Q @ K.T
                    qk.wait(scores)
                    if STEPWISE:
                        steps.wait(steps_bars, i)
                    decays.pairs(scores, row, mine, call.scale)
                    if decays.forgets(mine):
                        near.keep(near_words, scores)
                    rows.pack(probs, scores)
                    qs.start(o, smem, q_at, tiles.state_at, warpgroup)  # o = Q @ state
                    qs.wait(o)
                    q_pipe.release(q_bars, i)
                    decays.rows(o, row, count, mine, call.state_scale)
                    v_part.wait(v_full, i)
                    pv.add(o, probs, smem, v_at, 1)  # o += P @ V
                else:
                    v_part.wait(v_full, i)
                    if STEPWISE:
                        steps.wait(steps_bars, i)
                fade = decays.fade(mine, count)
                kv.fade(state, fade)
                if walk.looks:
                    pv.wait(o)
                    if decays.forgets(mine):
                        near.add(o, near_words, smem, v_at)
                    hidden.repair(o, (x, smem), (b, h, m0, row, 0), mine, call)
                    store_o(smem, o_map, o, Corner(i32(m0 + row), 0, (h, b)))
                known = decays.again(mine), count, call.kept_scale
                kv.add(state, room, smem, (k_at, v_at), known, fade)  # state += (decayed K).T @ V
                if STEPWISE:
                    steps.release(steps_bars, i)
                k_pipe.release(k_bars, i)
                if walk.looks:
                    both.gather()  # both have read the previous state
                    carry.put(smem, state)
                    both.meet()
                m0 = i32(m0 + STEP)
                i = k_pipe.next(i)
            if walk.finishes:
                row = opaque_i32(row)  # or the address of the initial state would stay in a register until here
                fragments.store(states, state, (b, h, part), (row, 0), (call.D, call.Dv))
            if walk.looks:
                boxes.finish()
        if walk.overlaps and cuda.threadIdx.x < 32:  # a consumer: idle lanes of the producer would delay the loads
            wait_for_grid_before()

    return retention_sm90
