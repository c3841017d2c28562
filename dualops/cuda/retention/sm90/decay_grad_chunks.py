"""dq or dk with log_decay, and what log_decay's own gradient has of the states between chunks.

    forth   q, k, v, y = do, v, k, q    taken_i = scale * w_i * do_i . (S_c q_i)      S_c: before the chunk
    back    q, k, v, y = v, do, q, k    given_j = w_j * v_j . (dS_c k_j)              dS_c: of the state behind it

A block walks one sequence of one head, or a segment of it, and computes the pass's results, both as `chunks` does. w is
what is left from the state to a token. One warp loads, one computes the tables of log_decay (`decay_tables`).

    for each chunk, by the consumers:
    1  met [64, 128] = state @ Y.T                          the state in three parts of bfloat16 (`exact_left`)
    2  met *= Q.T;  its columns' sums, of all 128 rows, are the tokens' (`column_sums`)
    3  forth: store the state to memory, in the order of threads; back: load it, both_c = fade * sum of S_c * dS_c
    4  o, as steps 2 to 4 of `chunks`; its scores overlap with 2 and 3
    5  state = fade * state + (decayed K).T @ V             the decayed keys in three parts (`state_sums`)
    6  state, rounded, to shared memory, for the next o; and the tokens' sums to memory

taken, given and both are as exact as float32 arithmetic. They cannot come from o's own products, which round P and the
state. From dq and dk, before they are rounded, dlog_decay would be 600 to 1100 times as far off as the rule of accuracy
allows (emulated). With two parts it would be off by up to 1.5 times as much as allowed.

The second warpgroup stays behind the first (`tile.warpgroup_barrier`): one multiplies while the other does arithmetic.
Loads of Y, Q and K of the next chunk overlap with the rest of this one, the load of V with the next scores. Shared
memory: `StepsConfig.met_tiles`, 2 * 128 * (128 * (1 + stages) + 3 * width + 64) bytes, 208 KiB for width = 128, 8 KiB
of sums and 2 KiB of tables. Registers: width / 2 for the state; with it 64 of one product and 64 words of a left
factor, or 64 of two. The producer warpgroup has 24 for width = 128.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, tensor_map, types, u8, u32
from ...launch.views import number_type, start
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.epilogue import box_output
from ...tile.grids import let_next_grid_begin
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.products import anew_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, lane_reductions, shfl_idx_i32
from ...tile.second_barrier import second_barrier
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import halves
from ..arguments import call_type, inputs_type
from ..nan_repair import chunk_repair
from .arguments import SEGMENT_STATES, LoadedWithY, chunk_range, loaded_types
from .chunk_decay import per_token_decay
from .chunk_sums import column_sums, warp_sums
from .config import BOX, CHUNK, CONSUMERS, DTYPE, WARPS, StepsConfig, Walk
from .decay_tables import decay_tables_feed
from .diagonal_residual import diagonal_residual
from .state_sums import exact_left, state_sums
from .states import box_by_box, fragments_of, place_of, saved_states, state_smem, times_transposed


class Met(NamedTuple):
    """What log_decay's gradient needs of the states between chunks."""

    tokens: Any  # [B, H, S]: taken or given
    states: Any  # [B, H, chunks, numbers of a state] (`saved_states`)
    both: Any  # [B, H, chunks], written by the walk back
    first_chunk: Any  # the first one that has a state before it


MET = types.NamedTuple((*[number_type(DTYPE, 3)] * 3, i32), Met)


@builds
def build_decay_grad_chunks(config: StepsConfig, width: int, walk: Walk) -> Kernel:
    """retention_met_sm90(maps, apart, o_map, x, met, states, decay, call).

    maps, apart: `LoadedWithY`. met: `Met`. states: `SegmentStates` without final ones. decay: log_decay. width: of V, Y
    and o, in whole boxes.
    """
    STEP, walk_of = -CHUNK if walk.back else CHUNK, chunk_range(CHUNK, walk.back)
    num, role, tiles = numbers(f32), roles(CONSUMERS, most=width > BOX), config.met_tiles(width)
    decays = per_token_decay(width, tiles.decay_at, walk.back)
    steps = decay_tables_feed(tiles.decay_at, walk.back, WARPS)
    q_tile, k_tile = box_tile(tiles.q, 0, 2), box_tile(tiles.k, tiles.k_at, 2)
    v_tile, y_tile = box_tile(tiles.v, tiles.v_at, 2), box_tile(tiles.y, tiles.y_at, 2)
    q_pipe, k_part = pipeline(1, tiles.q.nbytes, WARPS), second_barrier(config.stages, tiles.k.nbytes)
    v_pipe, y_pipe = pipeline(1, tiles.v.nbytes, WARPS), pipeline(1, tiles.y.nbytes, WARPS)
    qk, qs = warpgroup_mma(DTYPE, tiles.q, tiles.k), warpgroup_mma(DTYPE, tiles.q, tiles.state)
    pv, rows, fragments = register_mma(DTYPE, tiles.v), softmax_rows(DTYPE, CHUNK // 2, width // 2), fragments_of(width)
    carry = state_smem(tiles.state, tiles.state_at, anew=True)
    boxes = box_output(DTYPE, width, tiles.o_at, 1, 2, anew=True)  # o is stored in two steps through one buffer
    near, kept, half = diagonal_residual(tiles.v), saved_states(width), halves()
    hidden = chunk_repair(DTYPE, carry.number, place_of, pv.size, CHUNK, walk.back, decays)
    kv = state_sums(tiles.k, tiles.v, True, decays.weight, overlapped=True)
    state_y, met_q = exact_left(tiles.y), times_transposed(tiles.q)
    sums, of_warps = column_sums(tiles.sums_at, CHUNK, WARPS), warp_sums(tiles.warps_at, WARPS)
    lanes, store_o = lane_reductions(f32, 32), box_by_box(boxes)

    @kernel(
        *loaded_types(LoadedWithY),
        tensor_map,
        inputs_type(DTYPE),
        MET,
        SEGMENT_STATES,
        decays.argument,
        call_type(DTYPE),
        threads=role.threads,
    )
    def retention_met_sm90(maps, apart, o_map, x, met, states, decay, call):
        smem = cuda.shared.array(0, u8, alignment=1024)
        q_bars, k_full, v_bars = q_pipe.barriers(), k_part.barriers(), v_pipe.barriers()
        y_bars, steps_bars = y_pipe.barriers(), steps.barriers()
        tables, warpgroup = (smem, steps.eights()), my_warpgroup()
        part, head = i32(cuda.blockIdx.x % states.count), i32(cuda.blockIdx.x // states.count)
        b, h = i32(head // call.H), i32(head % call.H)
        if cuda.threadIdx.x == 0:
            q_pipe.init(q_bars)
            k_part.init(k_full)
            v_pipe.init(v_bars)
            y_pipe.init(y_bars)
            steps.init(steps_bars)
        prefetch_maps(maps, 1)
        q_pipe.start()
        if walk.overlaps:
            let_next_grid_begin()  # that of dv, which ends after this one
        i, (end, m0) = u32(0), walk_of.chunks(part, call)
        if warpgroup == CONSUMERS:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                while i != end:
                    stage = y_pipe.acquire(y_bars, i)
                    y_tile.load(smem, stage, maps.y, Corner(m0, 0, (i32(h * apart.y), b)), y_bars.full)
                    stage = q_pipe.acquire(q_bars, i)
                    q_tile.load(smem, stage, maps.q, Corner(m0, 0, (i32(h * apart.q), b)), q_bars.full)
                    stage = k_part.expect(k_full, i)  # free: all had read it two chunks ago before they released Y
                    k_tile.load(smem, stage, maps.k, Corner(m0, 0, (i32(h * apart.k), b)), k_full)
                    stage = v_pipe.acquire(v_bars, i)
                    v_tile.load(smem, stage, maps.v, Corner(0, m0, (i32(h * apart.v), b)), v_bars.full)
                    m0 = i32(m0 + STEP)
                    i = q_pipe.next(i)
            elif u32(cuda.threadIdx.x) % u32(128) // u32(32) == u32(1):
                own = steps.own()
                while i != end:
                    steps.put(tables, steps_bars, i, own, decay, (b, h, m0), call.rows)
                    m0 = i32(m0 + STEP)
                    i = q_pipe.next(i)
        else:
            role.consume()
            row = i32(ROWS * warpgroup)
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            mine = decays.of(tables, call, h)
            scores, probs, o, state = qk.fragment(), pv.left(), qs.fragment(), kv.fragment()
            near_words, room = near.words(), kv.room()
            products, state_words, by_column = state_y.fragment(), state_y.words(), sums.values()
            for j in range(kv.size // 4):
                for e in range(4):
                    state[4 * j + e] = num.zero
            if walk.begins:
                fragments.load(state, states, (b, h, part), (row, 0), (call.D, call.Dv))
            carry.put(smem, state)
            half.hand(warpgroup)
            while i != end:
                b, h = anew_i32(b), anew_i32(h)  # or registers would keep the start of a head's rows
                mine, count = decays.again(mine), min(i32(call.rows - m0), i32(CHUNK))
                chunk, turn = i32(u32(m0) // u32(CHUNK)), i32(i & u32(1))
                y_at, q_at = y_tile.at(y_pipe.wait(y_bars, i)), q_tile.at(q_pipe.wait(q_bars, i))
                half.follow(warpgroup)
                state_y.multiply(products, state_words, state, smem, y_at)  # products = state @ Y.T
                y_pipe.release(y_bars, i)
                k_at, v_at = k_tile.at(k_part.wait(k_full, i)), v_tile.at(v_pipe.stage(i))
                qk.start(scores, smem, q_at, k_at, warpgroup)  # scores = Q @ K.T
                met_q(by_column, products, smem, q_at)  # my rows' sums of products * Q.T
                sums.put(smem, turn, by_column)
                half.go_ahead(warpgroup)
                at = start(met.states, b, h, chunk)
                if walk.back:
                    of_warps.put(smem, turn, lanes.sum(kept.product(met.states, at, state)))
                else:
                    kept.put(met.states, at, state)
                qk.wait(scores)
                steps.wait(steps_bars, i)
                decays.pairs(scores, row, mine, call.scale)
                near.keep(near_words, scores)
                rows.pack(probs, scores)
                half.take(warpgroup)
                qs.start(o, smem, q_at, tiles.state_at, warpgroup)  # o = Q @ state
                qs.wait(o)
                q_pipe.release(q_bars, i)
                decays.rows(o, row, count, mine, call.state_scale)
                v_pipe.wait(v_bars, i)
                pv.add(o, probs, smem, v_at, 1)  # o += P @ V
                pv.wait(o)
                near.add(o, near_words, smem, v_at)
                hidden.repair(o, (x, smem), (b, h, m0, row, 0), mine, call)
                half.leave(warpgroup)
                store_o(smem, o_map, o, Corner(i32(m0 + row), 0, (h, b)))
                known, fade = (mine, count, call.kept_scale), decays.fade(mine, count)
                kv.add(state, room, smem, (k_at, v_at), known, fade)  # state = fade * state + (decayed K).T @ V
                v_pipe.release(v_bars, i)
                half.claim(warpgroup)
                carry.put(smem, state)
                half.hand(warpgroup)
                if warpgroup == 1:  # both have put their sums
                    token = i32(anew_i32(i32(cuda.threadIdx.x)) - 128)
                    tokens_before = i32(walk_of.last(call.rows) - m0) if walk.back else m0
                    there = i32(u32(tokens_before) // u32(CHUNK)) >= call.first_chunk
                    if token < count:
                        total = sums.total(smem, turn, token) * decays.of_row(mine, token, count) * call.state_scale
                        met.tokens.data[start(met.tokens, b, h, m0 + token)] = total if there else num.zero
                    if walk.back and token == 0:
                        total = of_warps.total(smem, turn) * decays.fade(mine, count)
                        there = there and chunk >= met.first_chunk
                        met.both.data[start(met.both, b, h, chunk)] = total if there else num.zero
                steps.release(steps_bars, i)
                m0 = i32(m0 + STEP)
                i = q_pipe.next(i)
            boxes.finish()

    return retention_met_sm90
