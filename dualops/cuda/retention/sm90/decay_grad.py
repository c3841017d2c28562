"""log_decay's gradient from sums that the passes of dq and dk leave.

    dq   q, k, v, y = do, v, k, q        rows_i = q_i . dq_i      of a chunk: <S, (w dO).T @ Q>, S: before the chunk
    dk   q, k, v, y = v, do, q, k        rows_j = k_j . dk_j      of a chunk: <dS, (w V).T @ K>, dS: after the chunk

(w Q).T @ Y is what the other pass adds to its own state, with the same rounded factors w, those from the state to each
row. So `states`, its products with the state, give the change of <S, dS> over a chunk to float32's precision. `rounded`
is the part of `rows` from the rounded state. `chunks` stores all three (`decay_grad_parts`), rows before dq or dk is
rounded, states and rounded as one number per warp.

    dlog_decay_t = sum_(i >= t) (q_i . dq_i - k_i . dk_i) + <S, dS> after the last token

is exact, but the errors of rounded states add up over the chunks (README.md, 4). So each chunk begins with its own
B = <S, dS>, the product of the state before it and that state's gradient. Its rows also get the rounding errors of its
states:

    B_0 = <initial_state, dinitial_state>, or 0           B_(c+1) = B_c + states of dk - states of dq
    dlog_decay_t = B_c + sum_(first token <= i < t) (k_i . dk_i + share of dk - q_i . dq_i - share of dq)

Without a gradient of the last state, B is 0 after the last chunk, and the sum goes back from there. The share of a
token is its part of `states - rounded` of a pass. The parts are proportional to the square of the decay between token
and state, which is the expected squared error of a token.

A block has some chunks of a head, and a thread has one token of each. The block itself adds up all chunks before its
own, or after them, so no block waits for another.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, Members, Noun, builds, cuda, f32, i32, i64, kernel, members, noun, u32, verb
from ...launch.views import number_type, start
from ...ptx.convert import unpack_bf16x2
from ...tile.a_fragment import words_of_rows
from ...tile.numbers import numbers
from ...tile.rows import FULL_WARP, lane_reductions, shfl_idx_f32
from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS, my_warpgroup
from ..arguments import call_type, state_type
from .chunk_decay import LEAST
from .config import CHUNK, DECAY_GRAD, DTYPE, WARPS
from .state_sums import weighted_sums
from .states import my_row, my_thread_again

LANES, WORDS = 4, 4  # of a row; of a thread, for 16 columns
WARP = 32
BLOCK_WARPS = CHUNK // WARP


@noun
def decay_grad_parts(q: Operand, y: Operand, decays: Noun) -> Members:
    """The verbs for Q and Y in boxes of bfloat16. Y has the rows and columns of the accumulators o. Called by a
    warpgroup.
    """
    words_of, num = words_of_rows(y), numbers(f32)
    lanes, of_warp = lane_reductions(f32, LANES), lane_reductions(f32, WARP)
    steps = words_of.steps

    @verb
    def _weight(args, token):
        """Return the factor that the other pass gives this token: the same float32 number."""
        mine, count, scale = args
        return decays.of_row(mine, token, count) * scale

    product = weighted_sums(q, y, _weight)

    @verb
    def _put(to, x, place):
        """Write the sum of my warp's x. to: [B, H, chunks * WARPS]. place: batch, head, the chunk's first token."""
        (b, h, m0), tid = place, u32(my_thread_again())
        total = of_warp.sum(x)
        if tid % u32(WARP) == u32(0):
            to.data[start(to, b, h, i32(u32(m0) // u32(CHUNK) * u32(WARPS) + tid // u32(WARP)))] = total

    @verb
    def _sum_rows(sums, o, smem, y_at, tid):
        """Compute my share of the sums of Y * o of my two rows."""
        first, words = words_of.first(i32(y_at + my_warpgroup() * ROWS * y.span), tid), cuda.local.array(WORDS, u32)
        sums[0], sums[1] = num.zero, num.zero
        for step in range(steps):
            words_of.load(words, 0, smem, first, step)
            for word in range(WORDS):
                low, high = unpack_bf16x2(words[word])
                e = 2 * (WORDS * step + word)
                sums[word % 2] += o[e] * low + o[e + 1] * high

    @verb
    def put_rows(to, o, smem, y_at, place, count):
        """Write the sums of my rows. to: [B, H, S]. place: batch, head, the first token of the chunk, which has `count`
        tokens, and the warpgroup's first row.
        """
        (b, h, m0, row), tid, sums = place, my_thread_again(), cuda.local.array(2, f32)
        _sum_rows(sums, o, smem, y_at, tid)
        for half in range(2):
            total, r = lanes.sum(sums[half]), i32(row + my_row() + 8 * half)
            if r < count and tid % LANES == 0:
                to.data[start(to, b, h, m0 + r)] = total

    @verb
    def put_total(to, o, smem, y_at, place):
        """Write the sum of my warp's rows."""
        sums = cuda.local.array(2, f32)
        _sum_rows(sums, o, smem, y_at, my_thread_again())
        _put(to, sums[0] + sums[1], place)

    @verb
    def multiply(acc, smem, places, args):
        """acc = (decayed Q).T @ Y. places: of Q and Y. args: the chunk's decay, its tokens, the factor of a row."""
        product.start(acc, smem, places, args, 0)
        product.wait(acc)

    @verb
    def put_product(to, acc, state, place):
        """Write the sum of my warp's products of the state with acc."""
        total = num.zero
        for e in range(product.size):
            total += acc[e] * state[e]
        _put(to, total, place)

    return members(
        locals(),
        fragment=product.fragment,  # () -> a local array for `multiply`
    )


@builds
def build_decay_grad_sums(run: int) -> Kernel:
    """retention_decay_grad_sums(dlogs, dq, dk, logs, ends, call, chunks). chunks: those of a sequence.

    dq, dk: `DecayGrad`. ends: the initial state and its gradient; whether there is an initial state, and a gradient of
    the last one.
    """
    num, RUN, SMALLEST, TINY = numbers(f32), run, f32(LEAST), f32(1e-30)

    @verb
    def scan(warps, at, x):
        """Return the sum of x up to this thread, and the sum of all. warps[at:]: not the half of the previous scan,
        which other threads may still read.
        """
        tid = i32(cuda.threadIdx.x)
        lane, warp, through = i32(u32(tid) % u32(WARP)), i32(u32(tid) // u32(WARP)), x
        for step in range(5):
            there = i32(lane - (1 << step))
            other = shfl_idx_f32(through, i32(there & (WARP - 1)), FULL_WARP)
            through += other if there >= 0 else num.zero
        if lane == WARP - 1:
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
