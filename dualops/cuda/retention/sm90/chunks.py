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

The passes of dq and dk with log_decay also leave sums for its gradient (`decay_grad`): `rounded` after 3, `rows` after
4 and `states` before 5. They load one more array, Y: q for dq, k for dk. The order of a sum does not depend on the
warps' timing. The second warpgroup follows the first at a distance (`halves`). Loads of Y and Q of the next chunk
overlap with 5 and 6, the load of K with the rest of this chunk, that of V with the next scores.

Shared memory: `Sm90Config.tiles`, 2 * (128 * 128 * (1 + stages) + 128 * Dv * (2 + stages)) bytes, 224 KiB for Dv = 128,
and 2 KiB of tables. With Y, V has one stage and o one box: 208 KiB. Registers: Dv / 2 for the state; with it 64 scores,
then 32 words of P and Dv / 2 of o, then 32 of K.T and o. If the products of 2 and 3 ran together, 64 scores and o would
take 80 numbers a thread more than there are.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, tensor_map, types, u8, u32, verb
from ...ptx.warp import griddepcontrol_launch_dependents, griddepcontrol_wait
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.epilogue import box_output
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline, second_barrier
from ...tile.products import opaque_i32, recomputed_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import halves, in_step
from ..arguments import call_type, inputs_type
from ..nan_repair import chunk_repair
from .chunk_decay import constant_decay, decay_tables, per_token_decay
from .config import (
    BOX,
    CHUNK,
    CONSUMERS,
    DECAY_GRAD,
    DTYPE,
    SEGMENT_STATES,
    WARPS,
    Loaded,
    LoadedWithY,
    Sm90Config,
    Walk,
    chunks_of,
    loaded_types,
)
from .decay_grad import decay_grad_parts
from .state_sums import exact_sums, rounded
from .states import diagonal_residual, fragments_of, place_of, state_smem


@builds
def build_chunks(config: Sm90Config, Dv: int, walk: Walk) -> Kernel:
    """retention_sm90(maps, apart, o_map, x, grad, states, decay, call).

    maps, apart: `Loaded`, or `LoadedWithY`. grad: `DecayGrad` with `walk.decay_grad`, otherwise empty. states:
    `SegmentStates`. decay: gamma, or log_decay. Dv: in whole boxes; with Y also its width.
    """
    STEP, STEPWISE, GRAD = -CHUNK if walk.back else CHUNK, config.stepwise, walk.decay_grad
    chunks_from = chunks_of(CHUNK, walk.back)
    num, role, tiles = numbers(f32), roles(CONSUMERS, most=not STEPWISE), config.tiles(Dv, GRAD)
    decays = per_token_decay(Dv, tiles.decay_at, walk.back) if STEPWISE else constant_decay(CHUNK, Dv, walk.back)
    steps = decay_tables(tiles.decay_at, walk.back, WARPS)
    q_tile, k_tile = box_tile(tiles.q, 0, 2), box_tile(tiles.k, tiles.k_at, 2)
    v_tile, y_tile = box_tile(tiles.v, tiles.v_at, 2), box_tile(tiles.v, tiles.y_at, 2)
    q_pipe, y_part = pipeline(1, tiles.q.nbytes, WARPS), second_barrier(1, tiles.v.nbytes)
    k_pipe, k_part = pipeline(config.stages, tiles.k.nbytes, WARPS), second_barrier(config.stages, tiles.k.nbytes)
    v_pipe, v_part = pipeline(1, tiles.v.nbytes, WARPS), second_barrier(config.stages, tiles.v.nbytes)
    k_feed, v_feed = (k_part, v_pipe) if GRAD else (k_pipe, v_part)  # the release of its pipeline frees both
    qk, qs = warpgroup_mma(DTYPE, tiles.q, tiles.k), warpgroup_mma(DTYPE, tiles.q, tiles.state)
    pv, rows, fragments = register_mma(DTYPE, tiles.v), softmax_rows(DTYPE, CHUNK // 2, Dv // 2), fragments_of(Dv)
    carry, turn = state_smem(tiles.state, tiles.state_at, recompute=GRAD), halves() if GRAD else in_step()
    boxes = box_output(DTYPE, Dv, tiles.o_at, 1 if GRAD else Dv // BOX, 2, recompute=GRAD)
    near, sums = diagonal_residual(tiles.v), decay_grad_parts(tiles.q, tiles.v, decays)
    repair = chunk_repair(DTYPE, carry.number, place_of, pv.size, CHUNK, walk.back, decays)
    if config.parts > 1:
        kv = exact_sums(tiles.k, tiles.v, decays.weight, overlapped=not walk.looks)
    else:
        kv = rounded(tiles.k, tiles.v, decays.weight)

    @verb
    def store_o(smem, o_map, o, corner):
        """Store o box after box, with registers for one."""
        box = i32(0)
        while box < boxes.parts:
            values = boxes.fragment()
            boxes.acquire()
            boxes.take(values, o, box)
            boxes.store(smem, o_map, values, corner, box, box)
            box = boxes.next(box)

    @kernel(
        *loaded_types(LoadedWithY if GRAD else Loaded),
        tensor_map,
        inputs_type(DTYPE),
        DECAY_GRAD if GRAD else types.Tuple([]),
        SEGMENT_STATES,
        decays.argument,
        call_type(DTYPE),
        threads=role.threads,
    )
    def retention_sm90(maps, apart, o_map, x, grad, states, decay, call):
        smem = cuda.shared.array(0, u8, alignment=1024)
        q_bars, k_bars, v_bars = q_pipe.barriers(), k_feed.barriers(), v_feed.barriers()
        y_full = y_part.barriers() if GRAD else None
        warpgroup = my_warpgroup()
        part, head = i32(cuda.blockIdx.x % states.count), i32(cuda.blockIdx.x // states.count)
        b, h = i32(head // call.H), i32(head % call.H)
        steps_bars, tables = steps.barriers(), (smem, steps.eights())
        if cuda.threadIdx.x == 0:
            q_pipe.init(q_bars)
            k_feed.init(k_bars)
            v_feed.init(v_bars)
            if GRAD:
                y_part.init(y_full)
            if STEPWISE:
                steps.init(steps_bars)
        prefetch_maps(maps, 1)
        q_pipe.start()
        if walk.overlaps:
            griddepcontrol_launch_dependents()
        i, (end, m0) = u32(0), chunks_from(part, call)
        if warpgroup == CONSUMERS:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                while i != end:
                    if GRAD:
                        stage = k_part.expect(k_bars, i)  # free: all had read it two chunks ago before they released V
                        k_tile.load(smem, stage, maps.k, Corner(m0, 0, (i32(h * apart.k), b)), k_bars)
                    else:
                        stage = k_pipe.acquire(k_bars, i)
                        k_tile.load(smem, stage, maps.k, Corner(m0, 0, (i32(h * apart.k), b)), k_bars.full)
                        v_part.expect(v_bars, i)
                        v_tile.load(smem, stage, maps.v, Corner(0, m0, (i32(h * apart.v), b)), v_bars)
                    if walk.looks:
                        stage = q_pipe.acquire(q_bars, i)
                        q_tile.load(smem, stage, maps.q, Corner(m0, 0, (i32(h * apart.q), b)), q_bars.full)
                    if GRAD:
                        y_part.expect(y_full, i)
                        y_tile.load(smem, stage, maps.y, Corner(0, m0, (i32(h * apart.y), b)), y_full)
                        stage = v_pipe.acquire(v_bars, i)
                        v_tile.load(smem, stage, maps.v, Corner(0, m0, (i32(h * apart.v), b)), v_bars.full)
                    m0 = i32(m0 + STEP)
                    i = q_pipe.next(i)
            elif STEPWISE and u32(cuda.threadIdx.x) % u32(128) // u32(32) == u32(1):
                own = steps.own()
                while i != end:
                    steps.put(tables, steps_bars, i, own, decay, (b, h, m0), call.rows)
                    m0 = i32(m0 + STEP)
                    i = q_pipe.next(i)
        else:
            role.consume()
            row = i32(ROWS * warpgroup)
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            mine = decays.of(tables if STEPWISE else decay, call, h)
            scores, probs, o, state = qk.fragment(), pv.left(), qs.fragment(), kv.fragment()
            near_words, room, product = near.words(), kv.room(), sums.fragment()
            for j in range(kv.size // 4):
                for e in range(4):
                    state[4 * j + e] = num.zero
            if walk.begins:
                fragments.load(state, states, (b, h, part), (row, 0), (call.D, call.Dv))
            if walk.looks:
                carry.put(smem, state)
                turn.hand(warpgroup)
            while i != end:
                if GRAD:
                    b, h = recomputed_i32(b), recomputed_i32(h)  # or registers would keep the start of a head's rows
                mine = decays.again(mine)
                count = min(i32(call.rows - m0), i32(CHUNK))
                k_at, q_at, y_at, fade = k_tile.at(k_feed.wait(k_bars, i)), i32(0), i32(0), num.one
                if walk.looks:
                    q_at = q_tile.at(q_pipe.wait(q_bars, i))
                    turn.follow(warpgroup)
                    qk.start(scores, smem, q_at, k_at, warpgroup)  # scores = Q @ K.T
                    qk.wait(scores)
                    turn.go_ahead(warpgroup)
                    if STEPWISE:
                        steps.wait(steps_bars, i)
                    decays.pairs(scores, row, mine, call.scale)
                    if decays.forgets(mine):
                        near.keep(near_words, scores)
                    rows.pack(probs, scores)
                    turn.take(warpgroup)
                    qs.start(o, smem, q_at, tiles.state_at, warpgroup)  # o = Q @ state
                    qs.wait(o)
                    if not GRAD:
                        q_pipe.release(q_bars, i)
                    decays.rows(o, row, count, mine, call.state_scale)
                    if GRAD:
                        y_at = y_tile.at(y_part.wait(y_full, i))
                        sums.put_total(grad.rounded, o, smem, y_at, (b, h, m0))  # of Y * o
                v_at = v_tile.at(v_feed.wait(v_bars, i))
                if walk.looks:
                    pv.add(o, probs, smem, v_at, 1)  # o += P @ V
                elif STEPWISE:
                    steps.wait(steps_bars, i)
                if not GRAD:
                    fade = decays.fade(mine, count)
                    kv.fade(state, fade)
                if walk.looks:
                    pv.wait(o)
                    if decays.forgets(mine):
                        near.add(o, near_words, smem, v_at)
                    repair(o, (x, (smem, tiles.state_at)), (b, h, m0, row, 0), mine, call)
                    turn.leave(warpgroup)
                    if GRAD:
                        sums.put_rows(grad.rows, o, smem, y_at, (b, h, m0, row), count)
                    store_o(smem, o_map, o, Corner(i32(m0 + row), 0, (h, b)))
                if GRAD:
                    sums.multiply(product, smem, (q_at, y_at), (mine, count, call.state_scale))  # (decayed Q).T @ Y
                    q_pipe.release(q_bars, i)
                    sums.put_product(grad.states, product, state, (b, h, m0))
                    fade = decays.fade(mine, count)
                    kv.fade(state, fade)
                known = decays.again(mine), count, call.kept_scale
                kv.add(state, room, smem, (k_at, v_at), known, fade)  # state += (decayed K).T @ V
                if GRAD:
                    v_pipe.release(v_bars, i)
                else:
                    if STEPWISE:
                        steps.release(steps_bars, i)
                    k_pipe.release(k_bars, i)
                if walk.looks:
                    turn.claim(warpgroup)  # both have read the previous state
                    carry.put(smem, state)
                    turn.hand(warpgroup)
                if GRAD:
                    steps.release(steps_bars, i)
                m0 = i32(m0 + STEP)
                i = q_pipe.next(i)
            if walk.finishes:
                row = opaque_i32(row)  # or the address of the initial state would stay in a register until here
                fragments.store(states, state, (b, h, part), (row, 0), (call.D, call.Dv))
            if walk.looks:
                boxes.finish()
        if walk.overlaps and cuda.threadIdx.x < 32:  # a consumer: idle lanes of the producer would delay the loads
            griddepcontrol_wait()

    return retention_sm90
