"""log_decay's gradient from the pairs of a chunk and the results of `decay_grad_chunks`, on Hopper's tensor cores.

    P_ij = scale * (q_i . k_j) * (do_i . v_j) * what is left of j at i                          j < i of a chunk
    dlog_decay_t = sum_(i >= t) (taken_i + sum_(j < t) P_ij) + sum_(j < t) given_j + both

A block has chunks of 128 tokens, one after another. Two warpgroups multiply, with 64 rows i each. One warp loads, one
computes the tables of log_decay (`decay_tables`).

    for each chunk, by the consumers:
    1  scores [64, 128] = Q @ K.T;  slopes [64, 128] = dO @ V.T
    2  P = scores * decay * slopes, 0 where j >= i
    3  along each row of P, from taken_i on: its sum before a column t; 0 where t > i
    4  the column sums over all 128 rows (`column_sums`), and the sums of given before t

Nothing is subtracted: a result is as exact as its terms, and a NaN reaches only the steps that it passes over.

Shared memory: `StepsConfig.pair_tiles`, 512 * (D + Dv) bytes, 128 KiB for D = Dv = 128, 8 KiB of sums and 2 KiB of
tables. Registers: 64 scores and 64 slopes, then 32 sums of columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, types, u8, u32, verb
from ...launch.views import number_type, start
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_f32, shfl_idx_i32
from ...tile.warpgroup import ROWS, my_warpgroup, warpgroup_mma
from ...tile.warpgroup_barrier import warpgroup_barrier
from ..arguments import call_type
from .arguments import LoadedPairs, loaded_types
from .chunk_decay import per_token_decay
from .chunk_sums import column_sums, decay_row_sums, warp_sums
from .config import CHUNK, CONSUMERS, DTYPE, WARPS, StepsConfig
from .decay_tables import decay_tables_feed
from .states import my_row


class PairSums(NamedTuple):
    """The numbers that are added up, and the result."""

    dlogs: Any  # [B, H, S]: log_decay's gradient
    taken: Any  # [B, H, S]
    given: Any  # [B, H, S]
    both: Any  # [B, H, chunks]


@verb
def place_of(number, call):
    """Return batch, head and first token of a chunk; chunks are numbered through all heads."""
    head, chunk = u32(number) // u32(call.slots), u32(number) % u32(call.slots)
    return i32(head // u32(call.H)), i32(head % u32(call.H)), i32(chunk * u32(CHUNK))


@builds
def build_decay_grad_pairs(config: StepsConfig, D: int, Dv: int) -> Kernel:
    """retention_step_gradient_sm90(maps, apart, gathered, decay, call, chunks).

    maps, apart: `LoadedPairs`. gathered: `PairSums`. decay: log_decay. chunks: those of all heads. D, Dv: whole boxes.
    """
    num, role, tiles = numbers(f32), roles(CONSUMERS), config.pair_tiles(D, Dv)
    decays = per_token_decay(Dv, tiles.decay_at, False, by_steps=True)
    steps = decay_tables_feed(tiles.decay_at, False, WARPS, states=False)
    q_tile, k_tile = box_tile(tiles.q, 0, 2), box_tile(tiles.q, tiles.k_at, 2)
    do_tile, v_tile = box_tile(tiles.do, tiles.do_at, 2), box_tile(tiles.do, tiles.v_at, 2)
    q_pipe, do_pipe = pipeline(1, 2 * tiles.q.nbytes, WARPS), pipeline(1, 2 * tiles.do.nbytes, WARPS)
    qk, dov = warpgroup_mma(DTYPE, tiles.q, tiles.q), warpgroup_mma(DTYPE, tiles.do, tiles.do)
    passed, sums, of_warps = (
        decay_row_sums(CHUNK),
        column_sums(tiles.sums_at, CHUNK, WARPS),
        warp_sums(tiles.warps_at, WARPS),
    )
    all_warps, RUN = warpgroup_barrier(CONSUMERS), config.run

    sums_type = types.NamedUniTuple(number_type(DTYPE, 3), 4, PairSums)

    @kernel(*loaded_types(LoadedPairs), sums_type, decays.argument, call_type(DTYPE), i32, threads=role.threads)
    def retention_step_gradient_sm90(maps, apart, gathered, decay, call, chunks):
        dlogs, taken, given, both = gathered
        smem = cuda.shared.array(0, u8, alignment=1024)
        q_bars, do_bars, steps_bars = q_pipe.barriers(), do_pipe.barriers(), steps.barriers()
        tables, warpgroup = (smem, steps.eights()), my_warpgroup()
        if cuda.threadIdx.x == 0:
            q_pipe.init(q_bars)
            do_pipe.init(do_bars)
            steps.init(steps_bars)
        prefetch_maps(maps, 1)
        q_pipe.start()
        first = i32(cuda.blockIdx.x * RUN)  # of my chunks
        i, end = u32(0), u32(min(i32(chunks - first), i32(RUN)))
        if warpgroup == CONSUMERS:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                while i != end:
                    b, h, m0 = place_of(i32(first + i32(i)), call)
                    stage = q_pipe.acquire(q_bars, i)
                    q_tile.load(smem, stage, maps.q, Corner(m0, 0, (i32(h * apart.q), b)), q_bars.full)
                    k_tile.load(smem, stage, maps.k, Corner(m0, 0, (i32(h * apart.k), b)), q_bars.full)
                    stage = do_pipe.acquire(do_bars, i)
                    do_tile.load(smem, stage, maps.do, Corner(m0, 0, (i32(h * apart.do), b)), do_bars.full)
                    v_tile.load(smem, stage, maps.v, Corner(m0, 0, (i32(h * apart.v), b)), do_bars.full)
                    i = q_pipe.next(i)
            elif u32(cuda.threadIdx.x) % u32(128) // u32(32) == u32(1):
                own = steps.own()
                while i != end:
                    b, h, m0 = place_of(i32(first + i32(i)), call)
                    steps.put(tables, steps_bars, i, own, decay, (b, h, m0), call.rows)
                    i = q_pipe.next(i)
        else:
            role.consume()
            row, token = i32(ROWS * warpgroup), i32(cuda.threadIdx.x)
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            mine = decays.of(tables, call, 0)
            scores, slopes, by_column = qk.fragment(), dov.fragment(), sums.values()
            rows_taken = cuda.local.array(2, f32)
            while i != end:
                b, h, m0 = place_of(i32(first + i32(i)), call)
                count, turn = min(i32(call.rows - m0), i32(CHUNK)), i32(i & u32(1))
                q_stage = q_pipe.wait(q_bars, i)
                qk.start(scores, smem, q_tile.at(q_stage), k_tile.at(q_stage), warpgroup)  # scores = Q @ K.T
                do_stage = do_pipe.wait(do_bars, i)
                dov.start(slopes, smem, do_tile.at(do_stage), v_tile.at(do_stage), warpgroup)  # slopes = dO @ V.T
                for half in range(2):
                    r = i32(row + my_row() + 8 * half)
                    rows_taken[half] = num.zero
                    if r < count:
                        rows_taken[half] = taken.data[start(taken, b, h, m0 + r)]
                given_before = num.zero
                if (token > 0) & (token < count):
                    given_before = given.data[start(given, b, h, m0 + token - 1)]
                given_before = passed.up_to(given_before)
                of_warps.put(smem, turn, shfl_idx_f32(given_before, 31, FULL_WARP))
                qk.wait_but_one(scores)
                q_pipe.release(q_bars, i)
                steps.wait(steps_bars, i)
                decays.pairs(scores, row, mine, call.scale)
                steps.release(steps_bars, i)
                dov.wait(slopes)
                do_pipe.release(do_bars, i)
                passed.add(by_column, scores, slopes, rows_taken, row, count)
                sums.put(smem, turn, by_column)
                all_warps.gather()
                if token < count:
                    given_before += of_warps.before(smem, turn, i32(u32(token) // u32(32)))
                    total = sums.total(smem, turn, token) + given_before
                    place = start(dlogs, b, h, m0 + token)
                    dlogs.data[place] = total + both.data[start(both, b, h, i32(u32(m0) // u32(CHUNK)))]
                i = q_pipe.next(i)

    return retention_step_gradient_sm90
