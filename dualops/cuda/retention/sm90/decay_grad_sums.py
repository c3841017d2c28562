"""log_decay's gradient from the sums that the passes of dq and dk left (`decay_grad_chunks`).

    dlog_decay_t = sum_(i >= t) (q_i . dq_i - k_i . dk_i) + <S, dS> after the last token

is exact, but adds and subtracts every pair after t. Within a chunk this is harmless: dq and dk use the same rounded P
of a pair, so its error cancels. The errors of rounded states do not cancel, and would add up over the chunks. So each
chunk begins with its own B = <S, dS>, the product of the state before it and that state's gradient. Its rows also get
the rounding errors of its states:

    B_0 = <initial_state, dinitial_state>, or 0           B_(c+1) = B_c + states of dk - states of dq
    dlog_decay_t = B_c + sum_(first token <= i < t) (k_i . dk_i + share of dk - q_i . dq_i - share of dq)

Without a gradient of the last state, B is 0 after the last chunk, and the sum goes back from there. The share of a
token is its part of `states - rounded` of a pass. The parts are proportional to the square of the decay between token
and state, which is the expected squared error of a token.

A block has some chunks of a head, and a thread has one token of each. The block itself adds up all chunks before its
own, or after them, so no block waits for another.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, i64, kernel, u32, verb
from ...launch.views import number_type, start
from ...tile.numbers import numbers
from ...tile.rows import FULL_WARP, shfl_idx_f32
from ..arguments import call_type, state_type
from .config import CHUNK, DECAY_GRAD, DTYPE, WARPS, GradConfig
from .decay_tables import LEAST

LANES = 32
BLOCK_WARPS = CHUNK // LANES


@builds
def build_decay_grad_sums(config: GradConfig) -> Kernel:
    """retention_decay_grad_sums(dlogs, dq, dk, logs, ends, call, chunks). chunks: those of a sequence.

    dq, dk: `DecayGrad`. ends: the initial state and its gradient; whether there is an initial state, and a gradient of
    the last one.
    """
    num, RUN, SMALLEST, TINY = numbers(f32), config.run, f32(LEAST), f32(1e-30)

    @verb
    def scan(warps, at, x):
        """Return the sum of x up to this thread, and the sum of all. warps[at:]: not the half of the previous scan,
        which other threads may still read.
        """
        tid = i32(cuda.threadIdx.x)
        lane, warp, through = i32(u32(tid) % u32(LANES)), i32(u32(tid) // u32(LANES)), x
        for step in range(5):
            there = i32(lane - (1 << step))
            other = shfl_idx_f32(through, i32(there & (LANES - 1)), FULL_WARP)
            through += other if there >= 0 else num.zero
        if lane == LANES - 1:
            warps[at + warp] = through
        cuda.syncthreads()
        total = num.zero
        for n in range(BLOCK_WARPS):
            through += warps[at + n] if n < warp else num.zero
            total += warps[at + n]
        return through, total

    @verb
    def of_chunk(x, b, h, chunk):
        """Return the sum of a chunk's numbers of all warps."""
        total, first = num.zero, start(x, b, h, chunk * WARPS)
        for n in range(WARPS):
            total += x.data[first + n]
        return total

    @kernel(
        number_type(DTYPE, 3),
        *[DECAY_GRAD] * 2,
        number_type(DTYPE, 3),
        state_type(DTYPE),
        call_type(DTYPE),
        i32,
        threads=CHUNK,
    )
    def retention_decay_grad_sums(dlogs, dq, dk, logs, ends, call, chunks):
        warps = cuda.shared.array(2 * BLOCK_WARPS, f32)
        tid, runs = i32(cuda.threadIdx.x), i32((chunks + (RUN - 1)) // RUN)
        head, chunk = i32(cuda.blockIdx.x // runs), i32(cuda.blockIdx.x % runs * RUN)
        b, h, end = i32(head // call.H), i32(head % call.H), min(i32(chunk + RUN), chunks)
        own = num.zero  # my share of B before my first chunk
        first_of_dq, first_of_dk = start(dq.states, b, h, 0), start(dk.states, b, h, 0)
        if ends.finishes == 0:
            for n in range(chunk * WARPS + tid, chunks * WARPS, CHUNK):
                own += dq.states.data[first_of_dq + n] - dk.states.data[first_of_dk + n]
        else:
            for n in range(tid, chunk * WARPS, CHUNK):
                own += dk.states.data[first_of_dk + n] - dq.states.data[first_of_dq + n]
            if ends.begins != 0:
                one, other = ends.initial, ends.final
                at = i64(b) * one.strides[0] + i64(h) * one.strides[1]
                there = i64(b) * other.strides[0] + i64(h) * other.strides[1]
                for d in range(call.D):
                    for e in range(tid, call.Dv, CHUNK):
                        x = one.data[at + d * one.strides[2] + e * one.strides[3]]
                        own += x * other.data[there + d * other.strides[2] + e * other.strides[3]]
        _, before = scan(warps, 0, own)
        while chunk < end:
            t, log, mine = i32(chunk * CHUNK + tid), num.zero, num.zero
            if t < call.rows:
                log = logs.data[start(logs, b, h, t)]
                log = log if log > SMALLEST else SMALLEST
            through, whole = scan(warps, BLOCK_WARPS, log)
            from_state, to_state = num.exp(through + through), num.exp((whole - through) + (whole - through))
            if t >= call.rows:
                from_state, to_state = num.zero, num.zero
            _, all_from = scan(warps, 0, from_state)
            _, all_to = scan(warps, BLOCK_WARPS, to_state)
            taken, given = of_chunk(dq.states, b, h, chunk), of_chunk(dk.states, b, h, chunk)
            if t < call.rows:
                of_dq = (taken - of_chunk(dq.rounded, b, h, chunk)) * (from_state / num.maximum(all_from, TINY))
                of_dk = (given - of_chunk(dk.rounded, b, h, chunk)) * (to_state / all_to)
                of_dq += dq.rows.data[start(dq.rows, b, h, t)]
                mine = of_dk + dk.rows.data[start(dk.rows, b, h, t)] - of_dq
            through, _ = scan(warps, 0, mine)
            if t < call.rows:
                dlogs.data[start(dlogs, b, h, t)] = before + (through - mine)
            before += given - taken
            chunk = i32(chunk + 1)

    return retention_decay_grad_sums
