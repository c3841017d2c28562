"""What log_decay's gradient has of the states between chunks, on Hopper's tensor cores: `simt_steps`, step 1.

    forth   x, y, K, V = q, do, k, v     taken_i = scale * w_i * q_i . (S_c do_i)      S_c: before the chunk
    back    x, y, K, V = k, v, q, do     given_j = w_j * k_j . (dS_c v_j)              dS_c: of the state behind it

A block walks one sequence of one head, or a segment of it, from chunk to chunk of 128 tokens, as `chunks` does; w is
what is left from the state to a token. Two warpgroups multiply, with 64 rows of the state each; one warp loads, one
makes the tables of log_decay (`step_tables`).

    for each chunk, by the threads that multiply:
    1  forth the state goes to memory, as threads hold it; back it is met there: both_c = fade * sum of S_c * dS_c
    2  met [64, 128] = state @ Y.T                          the state in three parts of bfloat16 (`tile.exact_left`)
    3  met *= X.T;  its columns' sums, of all 128 rows, are the tokens' (`tile.column_sums`)
    4  more [64, Dv] = (decayed K).T @ V                    the decayed keys in three parts (`tile.carried`)
    5  state = fade * state + more

The result is as exact as float32 arithmetic: tensor cores round sums toward zero, which adds up where a state does, so
that 5 is added by threads. q, k, v and do are bfloat16, and need one part.

Shared memory: `StepsConfig.met_tiles`, 2 * 128 * (128 + Dv) * stages bytes, 192 KiB of Dv = 128, 8 KiB of sums and
2 KiB of tables. Registers: Dv / 2 of the state, beside it 64 of `met` or Dv / 2 of `more`, and up to 32 words of a
left factor.
"""

from __future__ import annotations

from ...backend import Kernel, builds, cuda, f32, i32, i64, kernel, tensor_map, u8, u32
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.carried import times_transposed
from ...tile.column_sums import column_sums, warp_sums
from ...tile.companion import companion
from ...tile.exact_products import exact_left, exact_sums
from ...tile.meeting import meeting
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.products import anew_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, lane_reductions, shfl_idx_i32
from ...tile.warpgroup import ROWS, my_warpgroup
from ...views import number_type, start
from ..arguments import call_type
from .chunks import last_chunk
from .config import CHUNK, CONSUMERS, DTYPE, Walk
from .fragments import fragments_of
from .kept_states import kept_states
from .step_config import WARPS, StepsConfig
from .step_decay import step_decay
from .step_tables import step_tables


@builds
def build_met_states(config: StepsConfig, Dv: int, walk: Walk) -> Kernel:
    """retention_met_sm90(x_map, y_map, k_map, v_map, met, states, both, initial, final, decay, call, segment, segments,
    first_forth, x_apart, y_apart, k_apart, v_apart).

    met: taken or given. states: by batch, head and chunk (`kept_states`). both: by batch, head and chunk, written by
    the walk back. decay: log_decay. Dv: in whole boxes. segment: numbers from one segment's initial or final state to
    the next; segments: of a sequence, the first ones. first_forth: the first chunk that has a state before it. The last
    four: 1, or 0 where all heads share the array, whose map then has one.
    """
    STEP, last = -CHUNK if walk.back else CHUNK, last_chunk(CHUNK)
    num, role, tiles = numbers(f32), roles(CONSUMERS), config.met_tiles(Dv)
    decays = step_decay(Dv, tiles.decay_at, walk.back)
    steps, steps_pipe, written = step_tables(tiles.decay_at, walk.back), pipeline(1, 0, WARPS), companion(1, 0)
    x_tile, y_tile = box_tile(tiles.x, 0, 2), box_tile(tiles.y, tiles.y_at, 2)
    pipe, TURNS = pipeline(config.stages, tiles.x.nbytes + tiles.y.nbytes, WARPS), u32(1 + walk.looks)  # of a chunk
    state_y, kept, fragments = exact_left(tiles.y), kept_states(Dv), fragments_of(Dv)
    kv, met_x = exact_sums(tiles.x, tiles.v, decays.weight), times_transposed(tiles.x)
    sums, of_warps = column_sums(tiles.sums_at, CHUNK, WARPS), warp_sums(tiles.warps_at, WARPS)
    lanes, all_warps = lane_reductions(f32, 32), meeting(CONSUMERS)

    @kernel(
        *[tensor_map] * 4,
        *[number_type(DTYPE, 3)] * 3,
        *[number_type(DTYPE, 4)] * 2,
        decays.argument,
        call_type(DTYPE),
        *[i64] * 2,
        *[i32] * 5,
        threads=role.threads,
    )
    def retention_met_sm90(
        x_map,
        y_map,
        k_map,
        v_map,
        met,
        states,
        both,
        initial,
        final,
        decay,
        call,
        segment,
        segments,
        first_forth,
        x_apart,
        y_apart,
        k_apart,
        v_apart,
    ):
        smem = cuda.shared.array(0, u8, alignment=1024)
        bars, steps_bars = pipe.barriers(), steps_pipe.barriers()
        tables, warpgroup = (smem, steps.eights()), my_warpgroup()
        part, head = i32(cuda.blockIdx.x % segments), i32(cuda.blockIdx.x // segments)
        b, h = i32(head // call.H), i32(head % call.H)
        if cuda.threadIdx.x == 0:
            pipe.init(bars)
            steps_pipe.init(steps_bars)
        prefetch_maps((x_map, y_map, k_map, v_map), 1)
        pipe.start()
        before = i32(part * call.state_chunk)  # tokens that other blocks walk first
        length = max(min(i32(call.rows - before), i32(call.state_chunk)), i32(0))
        i, end = u32(0), u32((length + (CHUNK - 1)) // CHUNK)
        m0 = i32(last(call.rows) - before) if walk.back else before
        if warpgroup == CONSUMERS:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                end *= TURNS
                while i != end:
                    if walk.looks:
                        stage = pipe.acquire(bars, i)
                        x_tile.load(smem, stage, x_map, Corner(m0, 0, (i32(h * x_apart), b)), bars.full)
                        y_tile.load(smem, stage, y_map, Corner(m0, 0, (i32(h * y_apart), b)), bars.full)
                        i = pipe.next(i)
                    stage = pipe.acquire(bars, i)
                    x_tile.load(smem, stage, k_map, Corner(m0, 0, (i32(h * k_apart), b)), bars.full)
                    y_tile.load(smem, stage, v_map, Corner(m0, 0, (i32(h * v_apart), b)), bars.full)
                    m0 = i32(m0 + STEP)
                    i = pipe.next(i)
            elif u32(cuda.threadIdx.x) % u32(128) // u32(32) == u32(1):
                own = steps.own()
                while i != end:
                    steps.fetch(own, decay, b, h, m0, call.rows)
                    steps_pipe.claim(steps_bars, i)
                    steps.put(tables, own, i32(call.rows - m0))
                    written.hand(steps_bars.full, i)
                    m0 = i32(m0 + STEP)
                    i = pipe.next(i)
        else:
            role.consume()
            end, n = u32(shfl_idx_i32(i32(end), 0, FULL_WARP)), u32(0)  # n: of fillings
            mine = decays.of(tables, call, h)
            state, more, products, by_column = kv.fragment(), kv.fragment(), state_y.fragment(), sums.values()
            state_words, key_words = state_y.words(), kv.words()
            for j in range(kv.size // 4):
                for e in range(4):
                    state[4 * j + e] = num.zero
            if walk.begins:
                place = i64(b) * initial.strides[0] + i64(h) * initial.strides[1] + part * segment
                fragments.load(state, initial, place, (i32(ROWS * warpgroup), 0), (call.D, call.Dv))
            while i != end:
                b, h = anew_i32(b), anew_i32(h)  # or where a head's rows begin would be kept from chunk to chunk
                count = min(i32(call.rows - m0), i32(CHUNK))
                if walk.looks:
                    chunk, turn = i32(u32(m0) // u32(CHUNK)), i32(i & u32(1))
                    there = i32(u32(before) // u32(CHUNK) + i) >= call.first_chunk  # a state before it
                    at = start(states, b, h, chunk)
                    if walk.back:
                        of_warps.put(smem, turn, lanes.sum(kept.product(states, at, state)))
                    else:
                        kept.put(states, at, state)
                    stage = pipe.wait(bars, n)
                    state_y.multiply(products, state_words, state, smem, y_tile.at(stage))  # products = state @ Y.T
                    met_x(by_column, products, smem, x_tile.at(stage))  # the sums of my rows of products * X.T
                    sums.put(smem, turn, by_column)
                    pipe.release(bars, n)
                    n = pipe.next(n)
                    steps_pipe.wait(steps_bars, i)
                    all_warps.gather()
                    if warpgroup == 0:
                        token = anew_i32(i32(cuda.threadIdx.x))
                        if token < count:
                            factor = decays.of_row(mine, token, count) * call.state_scale
                            total = sums.total(smem, turn, token) * factor
                            met.data[start(met, b, h, m0 + token)] = total if there else num.zero
                        if walk.back and token == 0:
                            total = of_warps.total(smem, turn) * decays.fade(mine, count)
                            both.data[start(both, b, h, chunk)] = total if there and chunk >= first_forth else num.zero
                else:
                    steps_pipe.wait(steps_bars, i)
                stage = pipe.wait(bars, n)
                keys, fade = (x_tile.at(stage), (mine, count, call.kept_scale)), decays.fade(mine, count)
                kv.multiply(more, key_words, keys, smem, y_tile.at(stage))  # more [64, Dv] = (decayed K).T @ V
                steps_pipe.release(steps_bars, i)  # read by all lanes before they began to multiply
                pipe.release(bars, n)
                n = pipe.next(n)
                for j in range(kv.size // 4):
                    for e in range(4):
                        state[4 * j + e] = state[4 * j + e] * fade + more[4 * j + e]
                m0 = i32(m0 + STEP)
                i = pipe.next(i)
            if walk.finishes:
                place = i64(b) * final.strides[0] + i64(h) * final.strides[1] + part * segment
                fragments.store(final, state, place, (i32(ROWS * warpgroup), 0), (call.D, call.Dv))

    return retention_met_sm90
