"""dq or dk with log_decay, and what log_decay's own gradient needs of them.

    dq   q, k, v, y = do, v, k, q        rows_i = q_i . dq_i      of a chunk: <S, (w dO).T @ Q>, S: before the chunk
    dk   q, k, v, y = v, do, q, k        rows_j = k_j . dk_j      of a chunk: <dS, (w V).T @ K>, dS: after the chunk

A block walks one sequence of one head, or a segment of it, and computes the pass's results, both as `chunks` does. One
warp loads, one computes the tables of log_decay (`decay_tables`).

    for each chunk, by the consumers:
    1  P, as step 2 of `chunks`
    2  o = w * Q @ state;  rounded = the sum of Y * o
    3  o += P @ V, stored to memory;  rows = the row sums of Y * o, before o is rounded
    4  states = the sum of the state times (w Q).T @ Y
    5  state = fade * state + (decayed K).T @ V
    6  state, rounded, to shared memory, for the next o

(w Q).T @ Y is what the other pass adds to its own state, with the same rounded factors. So the sums of step 4 give the
change of <S, dS> over a chunk to float32's precision. The sums of step 2, which are part of `rows`, are the same from a
rounded state (`decay_grad_sums`). All sums are stored, those of steps 2 and 4 as one number per warp. The order of a
sum does not depend on the warps' timing.

The second warpgroup follows the first (`tile.warpgroup_barrier`): one multiplies while the other does arithmetic.
Loads of Y and Q of the next chunk overlap with 5 and 6, the load of K with the rest of this chunk, that of V with the
next scores. Shared memory: `GradTiles`, 2 * 128 * (128 * (1 + stages) + 3 * width + 64) bytes, 208 KiB for width = 128,
and 2 KiB of tables. Registers: width / 2 for the state; with it as many of another product, and 32 words of a left
factor.
"""

from __future__ import annotations

from functools import cache

from ...compiler.backend import Kernel, Members, builds, cuda, f32, i32, kernel, noun, tensor_map, u8, u32, verb
from ...launch.views import start
from ...ptx.convert import unpack_bf16x2
from ...tile.a_fragment import words_of_rows
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.epilogue import box_output
from ...tile.grids import let_next_grid_begin, wait_for_grid_before
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.products import anew_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, lane_reductions, shfl_idx_i32
from ...tile.second_barrier import second_barrier
from ...tile.softmax_rows import softmax_rows
from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import halves
from ..arguments import call_type, inputs_type
from ..nan_repair import chunk_repair
from .chunk_decay import diagonal_residual, per_token_decay
from .config import (
    CHUNK,
    CONSUMERS,
    DECAY_GRAD,
    DTYPE,
    SEGMENT_STATES,
    WARPS,
    GradConfig,
    LoadedWithY,
    Walk,
    chunk_range,
    loaded_types,
)
from .decay_tables import decay_tables_feed
from .state_sums import state_sums, weighted_sums
from .states import box_by_box, fragments_of, my_row, place_of, state_smem

LANES, WORDS = 4, 4  # of a row; of a thread, for 16 columns


@cache
@noun
def warp_sums() -> Members:
    """The verb that adds up a warp's numbers."""
    lanes = lane_reductions(f32, 32)

    @verb
    def put(to, x, place):
        """Write the sum of my warp's x. to: [B, H, chunks * WARPS]. place: batch, head, the chunk's first token."""
        (b, h, m0), tid = place, u32(anew_i32(i32(cuda.threadIdx.x)))
        total = lanes.sum(x)
        if tid % u32(32) == u32(0):
            to.data[start(to, b, h, i32(u32(m0) // u32(CHUNK) * u32(WARPS) + tid // u32(32)))] = total

    return locals()


@cache
@noun
def row_sums(y: Operand) -> Members:
    """The verbs for Y in boxes of bfloat16, whose rows and columns are those of the accumulators. Called by a
    warpgroup.
    """
    words_of, lanes, num, of_warp = words_of_rows(y), lane_reductions(f32, LANES), numbers(f32), warp_sums()
    steps = words_of.steps

    @verb
    def _multiply(sums, acc, smem, y_at, tid):
        """Compute my share of the sums of my two rows."""
        first, words = words_of.first(i32(y_at + my_warpgroup() * ROWS * y.span), tid), cuda.local.array(WORDS, u32)
        sums[0], sums[1] = num.zero, num.zero
        for step in range(steps):
            words_of.load(words, 0, smem, first, step)
            for word in range(WORDS):
                low, high = unpack_bf16x2(words[word])
                e = 2 * (WORDS * step + word)
                sums[word % 2] += acc[e] * low + acc[e + 1] * high

    @verb
    def put(to, acc, smem, y_at, place, count):
        """Write the sums of my rows. to: [B, H, S]. place: batch, head, the first token of the chunk, which has `count`
        tokens, and the warpgroup's first row.
        """
        (b, h, m0, row), tid, sums = place, anew_i32(i32(cuda.threadIdx.x)), cuda.local.array(2, f32)
        _multiply(sums, acc, smem, y_at, tid)
        for half in range(2):
            total, r = lanes.sum(sums[half]), i32(row + my_row() + 8 * half)
            if r < count and tid % LANES == 0:
                to.data[start(to, b, h, m0 + r)] = total

    @verb
    def put_total(to, acc, smem, y_at, place):
        """Write the sum of my warp's rows. to, place: as for `warp_sums`."""
        sums = cuda.local.array(2, f32)
        _multiply(sums, acc, smem, y_at, anew_i32(i32(cuda.threadIdx.x)))
        of_warp.put(to, sums[0] + sums[1], place)

    return locals()


@noun
def product_sums(size: int) -> Members:
    """The verb for `size` accumulators of a thread."""
    of_warp, num = warp_sums(), numbers(f32)

    @verb
    def put_total(to, acc, other, place):
        """Write the sum of my warp's products of two numbers. to, place: as for `warp_sums`."""
        total = num.zero
        for e in range(size):
            total += acc[e] * other[e]
        of_warp.put(to, total, place)

    return locals()


@builds
def build_decay_grad_chunks(config: GradConfig, width: int, walk: Walk) -> Kernel:
    """retention_decay_grad_sm90(maps, apart, o_map, x, grad, states, decay, call).

    maps, apart: `LoadedWithY`. grad: `DecayGrad`. states: `SegmentStates` without final ones. decay: log_decay. width:
    of V, Y and o, in whole boxes.
    """
    STEP, walk_of = -CHUNK if walk.back else CHUNK, chunk_range(CHUNK, walk.back)
    num, role, tiles = numbers(f32), roles(CONSUMERS), config.tiles(width)
    decays = per_token_decay(width, tiles.decay_at, walk.back)
    steps = decay_tables_feed(tiles.decay_at, walk.back, WARPS)
    q_tile, k_tile = box_tile(tiles.q, 0, 2), box_tile(tiles.k, tiles.k_at, 2)
    v_tile, y_tile = box_tile(tiles.v, tiles.v_at, 2), box_tile(tiles.v, tiles.y_at, 2)
    q_pipe, k_part = pipeline(1, tiles.q.nbytes, WARPS), second_barrier(config.stages, tiles.k.nbytes)
    v_pipe, y_part = pipeline(1, tiles.v.nbytes, WARPS), second_barrier(1, tiles.v.nbytes)
    qk, qs = warpgroup_mma(DTYPE, tiles.q, tiles.k), warpgroup_mma(DTYPE, tiles.q, tiles.state)
    pv, rows, fragments = register_mma(DTYPE, tiles.v), softmax_rows(DTYPE, CHUNK // 2, width // 2), fragments_of(width)
    carry = state_smem(tiles.state, tiles.state_at, anew=True)
    boxes = box_output(DTYPE, width, tiles.o_at, 1, 2, anew=True)  # o is stored in two steps through one buffer
    near, half, store_o, sums = diagonal_residual(tiles.v), halves(), box_by_box(boxes), row_sums(tiles.v)
    hidden = chunk_repair(DTYPE, carry.number, place_of, pv.size, CHUNK, walk.back, decays)
    kv = state_sums(tiles.k, tiles.v, False, decays.weight)

    @verb
    def row_weight(args, token):
        """Return the factor that the other pass gives this token: the same float32 number."""
        mine, count, scale = args
        return decays.of_row(mine, token, count) * scale

    qy = weighted_sums(tiles.q, tiles.v, row_weight)
    products = product_sums(qy.size)

    @kernel(
        *loaded_types(LoadedWithY),
        tensor_map,
        inputs_type(DTYPE),
        DECAY_GRAD,
        SEGMENT_STATES,
        decays.argument,
        call_type(DTYPE),
        threads=role.threads,
    )
    def retention_decay_grad_sm90(maps, apart, o_map, x, grad, states, decay, call):
        smem = cuda.shared.array(0, u8, alignment=1024)
        q_bars, k_full, v_bars = q_pipe.barriers(), k_part.barriers(), v_pipe.barriers()
        y_full, steps_bars = y_part.barriers(), steps.barriers()
        tables, warpgroup = (smem, steps.eights()), my_warpgroup()
        part, head = i32(cuda.blockIdx.x % states.count), i32(cuda.blockIdx.x // states.count)
        b, h = i32(head // call.H), i32(head % call.H)
        if cuda.threadIdx.x == 0:
            q_pipe.init(q_bars)
            k_part.init(k_full)
            v_pipe.init(v_bars)
            y_part.init(y_full)
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
                    stage = k_part.expect(k_full, i)  # free: all had read it two chunks ago before they released V
                    k_tile.load(smem, stage, maps.k, Corner(m0, 0, (i32(h * apart.k), b)), k_full)
                    stage = q_pipe.acquire(q_bars, i)
                    q_tile.load(smem, stage, maps.q, Corner(m0, 0, (i32(h * apart.q), b)), q_bars.full)
                    y_part.expect(y_full, i)
                    y_tile.load(smem, stage, maps.y, Corner(0, m0, (i32(h * apart.y), b)), y_full)
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
            near_words, room, product = near.words(), kv.room(), qy.fragment()
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
                q_at, k_at = q_tile.at(q_pipe.wait(q_bars, i)), k_tile.at(k_part.wait(k_full, i))
                half.follow(warpgroup)
                qk.start(scores, smem, q_at, k_at, warpgroup)  # scores = Q @ K.T
                qk.wait(scores)
                half.go_ahead(warpgroup)
                steps.wait(steps_bars, i)
                decays.pairs(scores, row, mine, call.scale)
                near.keep(near_words, scores)
                rows.pack(probs, scores)
                half.take(warpgroup)
                qs.start(o, smem, q_at, tiles.state_at, warpgroup)  # o = Q @ state
                qs.wait(o)
                decays.rows(o, row, count, mine, call.state_scale)
                y_at = y_tile.at(y_part.wait(y_full, i))
                sums.put_total(grad.rounded, o, smem, y_at, (b, h, m0))  # of Y * o
                v_at = v_tile.at(v_pipe.wait(v_bars, i))
                pv.add(o, probs, smem, v_at, 1)  # o += P @ V
                pv.wait(o)
                near.add(o, near_words, smem, v_at)
                hidden.repair(o, (x, smem), (b, h, m0, row, 0), mine, call)
                half.leave(warpgroup)
                sums.put(grad.rows, o, smem, y_at, (b, h, m0, row), count)
                store_o(smem, o_map, o, Corner(i32(m0 + row), 0, (h, b)))
                qy.multiply(product, smem, (q_at, y_at), (mine, count, call.state_scale))  # (decayed Q).T @ Y
                qy.wait(product)
                q_pipe.release(q_bars, i)
                products.put_total(grad.states, product, state, (b, h, m0))
                known, fade = (mine, count, call.kept_scale), decays.fade(mine, count)
                kv.fade(state, fade)
                kv.add(state, room, smem, (k_at, v_at), known, fade)  # state += (decayed K).T @ V
                v_pipe.release(v_bars, i)
                half.claim(warpgroup)
                carry.put(smem, state)
                half.hand(warpgroup)
                steps.release(steps_bars, i)
                m0 = i32(m0 + STEP)
                i = q_pipe.next(i)
            boxes.finish()
        if walk.overlaps and cuda.threadIdx.x < 32:  # a consumer: idle lanes of the producer would delay the loads
            wait_for_grid_before()

    return retention_decay_grad_sm90
