"""What each chunk adds to a state, all chunks at once, by mma.sync, on Ampere and later GPUs.

    A [D, Dv] = kept_scale * sum_t gamma^(T - t - later) * k_t^T v_t

A block has 64 rows of one chunk's A, 16 a warp, and up to 128 of its columns. Two stages of shared memory hold some
tokens each. One stage is multiplied while cp.async fills the other.

    1  start to load the first tokens' K and V; write the weights of all tokens of the chunk to shared memory
    2  for some tokens after the others:
    3      start to load K and V of the next ones
    4      sums [16, BLOCK_V] = (weights * K).T @ V, and added to A by the threads
    5      wait for the next ones, all threads
    6  store A, 16 rows of a warp at a time through shared memory

Tensor cores round toward zero. So threads, which round to the nearest, add up the sums of a few tokens.

Shared memory: `Sm80States.tiles`, 4 * TOKENS * (64 + BLOCK_V) bytes and 1 KiB. Registers: BLOCK_V for both sums, and
about 60.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, Noun, builds, cuda, f32, i32, i64, kernel, u32, verb
from ...launch.views import start
from ...tile.async_copies import cp_async_commit, cp_async_wait_group
from ...tile.numbers import numbers
from ...tile.shared import Lines
from ...tile.storage import access, storage
from ...tile.tile_copies import tile_copies
from ...tile.warp_rows import COLUMNS, warp_output
from ..arguments import Variant, origin, slot_of
from ..decays import decays_of
from ..simt_states import chunk_of, contributions_types, token_weights
from .config import BOX, ROWS, Shape, Sm80States
from .floats import strip_of_weighted


def rows_output(dtype: str, aligned: bool, columns: int) -> Noun:
    """Return the noun that stores a warp's rows. results: the array, the index of row 0, numbers from a row to the next
    one, and numbers of a row. aligned: rows are whole 16-byte vectors.
    """
    vec = access(dtype, aligned)

    @verb
    def finish(values, results, m, n):
        out, first, step, width = results
        for c in range(0, COLUMNS, vec.vector):
            vec.store(out.data, first + i64(m) * step + n + c, n + c < width, values, c)

    return warp_output(ROWS, columns, finish)


@builds
def build_states(config: Sm80States, variant: Variant, shape: Shape, mirrored: bool) -> Kernel:
    """retention_states_sm80(states, k, v, weights, decay, call, chunks). chunks: those of a sequence.

    mirrored: a pass back has the chunks of the pass forth.
    """
    mem, decays, num = storage(variant.dtype), decays_of(variant.dtype, variant.stepwise), numbers(f32)
    rows_of, tile, BLOCK_V = chunk_of(mirrored), config.tiles(shape.columns), shape.columns
    put_weights = token_weights(variant, config.threads)
    k_copies = tile_copies(tile.k, BOX, shape.vector, config.threads)
    v_copies = tile_copies(tile.v, BLOCK_V, shape.vector, config.threads)
    kv = strip_of_weighted(variant.dtype, tile.k, tile.v, tile.v_boxes, config.exact)
    output = rows_output("float32", shape.states, BLOCK_V)

    @kernel(*contributions_types(variant), threads=config.threads, min_blocks=config.min_blocks)
    def retention_states_sm80(states, k, v, weights, decay, call, chunks):
        smem, floats = cuda.shared.array(0, mem.element, alignment=128), cuda.shared.array(0, f32, alignment=128)
        tid = cuda.threadIdx.x
        d_blocks, v_blocks = (call.D + (BOX - 1)) // BOX, (call.Dv + (BLOCK_V - 1)) // BLOCK_V
        part, place = i64(cuda.blockIdx.x) % (d_blocks * v_blocks), i64(cuda.blockIdx.x) // (d_blocks * v_blocks)
        d0, e0 = part // v_blocks * BOX, part % v_blocks * BLOCK_V
        chunk = place % chunks
        b, h, first, count, t0, end = rows_of(call, chunk, place // chunks)
        if t0 >= count:
            return
        token0 = origin(call, first, count)
        k_step, v_step = call.direction * k.strides[2], call.direction * v.strides[2]
        k_first = start(k, b, h, token0 + call.direction * t0) + d0
        v_first = start(v, b, h, token0 + call.direction * t0) + e0
        there, k_columns, v_columns = i32(end - t0), i32(call.D - d0), i32(call.Dv - e0)
        k_copies.load_some(smem, 0, Lines(k.data, k_first, k_step, there), k_columns)
        v_copies.load_some(smem, tile.v_at, Lines(v.data, v_first, v_step, there), v_columns)
        cp_async_commit()

        mine = decays.of(decay, call, b, h, first, count)
        put_weights(floats, tile.weights_at, weights, (b, h, token0), (t0, end), mine, call)
        acc, sums = kv.fragment(), kv.fragment()
        k_place = kv.place(i32(tid // 32 * 16))
        i, rounds = u32(0), u32((there + (config.tokens - 1)) // config.tokens)
        cp_async_wait_group(0)
        cuda.syncthreads()
        while i != rounds:
            at, coming = i32(i % u32(2)) * tile.stage, i32((i + u32(1)) % u32(2)) * tile.stage
            n = i32(i) * config.tokens
            if i + u32(1) != rounds:
                further = i64(n + config.tokens)
                k_lines = Lines(k.data, k_first + further * k_step, k_step, i32(there - n - config.tokens))
                v_lines = Lines(v.data, v_first + further * v_step, v_step, i32(there - n - config.tokens))
                k_copies.load_some(smem, i32(coming), k_lines, k_columns)
                v_copies.load_some(smem, i32(coming + tile.v_at), v_lines, v_columns)
                cp_async_commit()
            for e in range(kv.size):
                sums[e] = num.zero
            kv.add(sums, smem, (i32(at + k_place), i32(at + tile.v_at)), (floats, i32(tile.weights_at + n)))
            for e in range(kv.size):
                acc[e] += sums[e]  # [16, BLOCK_V] += (weights * K).T @ V
            cp_async_wait_group(0)
            cuda.syncthreads()
            i = u32(i + u32(1))

        state = slot_of(call, first, b, chunk) * states.strides[0] + h * states.strides[1]
        output.store(floats, acc, i32(d0 + tid // 32 * 16), i32(e0), i32(call.D), (states, state, call.Dv, call.Dv))

    return retention_states_sm80
