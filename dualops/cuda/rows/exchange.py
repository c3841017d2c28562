"""Exchange two numbers per warp among all warps that share a row."""

from __future__ import annotations

from typing import Any

from ..compiler.backend import Members, cuda, i32, kept_noun, members, u32, verb
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank, parts
from ..tile.rows import lane_reductions
from ..tile.unrolled import nothing


@kept_noun
def in_block(number: Any, row_threads: int, rows: int) -> Members:
    """The verbs for `rows` rows per block, each shared by `row_threads` threads. All threads must call them.

    sent: the shared array; row_round: 0, 1, 0, 1, ...
    """
    PARTS = max(row_threads // 32, 1)  # warps that share a row
    ALL, LANE_PARTS = rows * PARTS, 1
    LANES, WARPS, THREADS = u32(32), u32(PARTS), u32(32 * PARTS)
    in_warp, lanes = lane_reductions(number, min(row_threads, 32)), lane_reductions(number, PARTS)

    @verb
    def smem():
        """Return the shared array; once in a kernel, by all threads."""
        return cuda.shared.array(4 * ALL, number)

    @verb
    def _put(sent, at, x):
        tid = u32(cuda.threadIdx.x)  # unsigned: no sign handling
        if tid % LANES == 0:
            sent[at + i32(tid // LANES)] = x

    @verb
    def send(sent, row_round, a, b):
        """Send my warp's numbers to all warps of the row."""
        _put(sent, row_round * (2 * ALL), a)
        _put(sent, row_round * (2 * ALL) + ALL, b)

    @verb
    def wait(sent, row_round):
        """Wait until all warps have sent their numbers. Return the index at which the row's numbers begin."""
        cuda.syncthreads()
        return row_round * (2 * ALL) + i32(u32(cuda.threadIdx.x) // THREADS * WARPS)

    @verb
    def a(sent, at, k):
        """Return the first number of my lane's k-th warp. Each lane has LANE_PARTS of the row's warps."""
        return sent[at + i32(u32(cuda.threadIdx.x) % WARPS)]

    @verb
    def b(sent, at, k):
        """Return the second number of my lane's k-th warp."""
        return sent[at + ALL + i32(u32(cuda.threadIdx.x) % WARPS)]

    @verb
    def part(k):
        """Return the number of my lane's k-th warp in the row."""
        return u32(cuda.threadIdx.x) % WARPS

    @verb
    def my_part():
        """Return the number of my warp in the row."""
        return u32(cuda.threadIdx.x) // LANES % WARPS

    @verb
    def given(k):
        """Return whether my lane has a k-th warp."""
        return True

    @verb
    def meet():
        """Wait for all threads of the block."""
        cuda.syncthreads()

    @verb
    def sum(sent, at):
        """Return the sum of all first numbers, to all lanes."""
        return lanes.sum(a(sent, at, 0))

    @verb
    def sum_of_row(x, row_round, sent):
        """Return the sum of x over all threads of the row."""
        x = in_warp.sum(x)
        if PARTS > 1:
            _put(sent, row_round * (2 * ALL), x)
            x = lanes.sum(a(sent, wait(sent, row_round), 0))
        return x

    return members(
        locals(),
        in_warp=in_warp,  # reductions over the lanes of my warp that share my row
        lanes=lanes,  # reductions over lanes, of each lane's numbers of warps
    )


@kept_noun
def in_cluster(number: Any, row_threads: int, rows: int, cluster: int, kept: int = 2) -> Members:
    """The verbs for `rows` rows per block, each shared by `row_threads` threads in each of `cluster` blocks.

    A warp sends its numbers to every block (`parts`). sent: `PartsSmem`; row_round: the number of the row, from 0 on.
    kept: an argument of `parts`.
    """
    WARPS = max(row_threads // 32, 1)
    PARTS = WARPS * cluster  # warps that share a row
    STEP, WHOLE, LANE_PARTS = min(PARTS, 32), PARTS & (PARTS - 1) == 0, -(-PARTS // 32)
    in_warp = lane_reductions(number, min(row_threads, 32))
    lanes = lane_reductions(number, STEP if WHOLE else 32)
    num, LANES = numbers(number), u32(STEP if WHOLE else 32)
    pairs = parts(number, num.send_pair, WARPS, cluster, rows, kept)

    @verb
    def part(k):
        """Return the number of my lane's k-th warp in the row. Each lane has LANE_PARTS warps."""
        return u32(k * 32 + u32(cuda.threadIdx.x) % LANES)

    @verb
    def my_part():
        """Return the number of my warp in the row."""
        return cluster_ctarank() * WARPS + cuda.threadIdx.x // 32 % WARPS

    @verb
    def given(k):
        """Return whether my lane has a k-th warp."""
        return WHOLE or part(k) < PARTS

    @verb
    def a(sent, at, k):
        """Return the first number of my lane's k-th warp."""
        return sent.pairs[u32(at + 2 * part(k))]

    @verb
    def b(sent, at, k):
        """Return the second number of my lane's k-th warp."""
        return sent.pairs[u32(at + 2 * part(k) + 1)]

    @verb
    def _mine(sent, at):
        total = num.zero
        for k in range(LANE_PARTS):
            if given(k):
                total += a(sent, at, k)
        return total

    @verb
    def sum(sent, at):
        """Return the sum of every second number from there on, to all lanes."""
        return lanes.sum(_mine(sent, at))

    @verb
    def sum_two(sent, at):
        """Return the sum of a's parts, and of b's."""
        return lanes.sum_two(_mine(sent, at), _mine(sent, at + 1))

    return members(
        locals(),
        in_warp=in_warp,  # reductions over the lanes of my warp that share my row
        lanes=lanes,  # reductions over lanes, of each lane's numbers of warps
        meet=nothing(0),  # the cluster meets in `start_mbarriers`
        smem=pairs.smem,
        init=pairs.init,  # (sent)
        send=pairs.send,  # (sent, row_round, a, b)
        wait=pairs.wait,  # (sent, row_round) -> where a's parts begin in sent.pairs; one further on, b's
    )
