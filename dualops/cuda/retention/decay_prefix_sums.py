"""The prefix sums of log_decay, which a call computes before any other launch.

    mark n of a sequence = sum over its tokens t < n of max(log_decay_t, LEAST_LOG)        n = 0 .. count

Weights are exp of a difference of two marks. Far into a sequence this is a small difference of large numbers. So sums
are computed in float64 with the rounding error of each addition, and stored as two numbers of the problem's arithmetic.
The difference of two marks is then exact to its eps, and to about eps^2 of the marks.

A block has a stretch of a head's sequence and reads it tile by tile, a few neighbouring tokens a thread. The threads'
sums meet in shared memory in log2(threads) steps. Each block sums up the tokens before its stretch itself, so no block
waits for another. The order of a sum depends on its own position alone.

Shared memory: 2 * 2 * threads numbers of float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ...spec.retention import LEAST_LOG
from ..compiler.backend import Kernel, builds, cuda, f64, i64, kernel, verb
from ..launch.step import Step
from ..launch.views import number_type, start
from ..tile.storage import storage
from .arguments import Call, call_type, is_varlen, span, workspace

NOTHING, LEAST = f64(0), f64(LEAST_LOG)


@dataclass(frozen=True)
class PrefixSumsConfig:
    """Threads of a block, a power of two; tokens of a thread in a tile; tiles of a stretch."""

    threads: int = 128
    each: int = 8
    tiles: int = 8

    @cached_property
    def steps(self) -> int:
        """Steps in which the threads' sums are added."""
        return self.threads.bit_length() - 1

    @cached_property
    def tile(self) -> int:
        return self.threads * self.each

    @cached_property
    def stretch(self) -> int:
        return self.tile * self.tiles

    @property
    def shared_bytes(self) -> int:
        return 4 * self.threads * 8


CONFIG = PrefixSumsConfig()


@verb
def add(total, rest, x):
    """Return total + x, and the rest plus its rounding error."""
    new = total + x
    of_x = new - total
    return new, rest + ((total - (new - of_x)) + (x - of_x))


@builds
def build_prefix_sums(config: PrefixSumsConfig, dtype: str) -> Kernel:
    """retention_marks(marks, logs, call, stretches). stretches: blocks for each head of a sequence."""
    number, THREADS, EACH, STEPS = storage(dtype).number, config.threads, config.each, config.steps

    @verb
    def put(marks, at, total, rest):
        marks.data[at] = number(total)
        marks.data[at + 1] = number((total - f64(number(total))) + rest)

    @verb
    def log_of(logs, b, h, token):
        x = f64(logs.data[start(logs, b, h, token)])
        return x if x > LEAST else LEAST

    @verb
    def sums(smem, at, total, rest):
        """Return two places: the one with the inclusive prefix sums of all threads, and the other one."""
        tid, other = cuda.threadIdx.x, 2 * THREADS - at
        for step in range(STEPS + 1):
            smem[at + tid] = total
            smem[at + THREADS + tid] = rest
            cuda.syncthreads()
            at, other = other, at
            there = tid - (1 << step)
            if (step < STEPS) & (there >= 0):
                total, rest = add(smem[other + there], rest + smem[other + THREADS + there], total)
        return other, at

    @kernel(*[number_type(dtype, 3)] * 2, call_type(dtype), i64, threads=config.threads)
    def retention_marks(marks, logs, call, stretches):
        smem = cuda.shared.array(0, f64, alignment=16)
        tid = cuda.threadIdx.x
        head, begin = i64(cuda.blockIdx.x) // stretches, i64(cuda.blockIdx.x) % stretches * config.stretch
        b, h = head // call.H, head % call.H
        first, _, count = span(call, b)
        if (tid == 0) & (begin == 0):
            put(marks, start(marks, b, h, first), NOTHING, NOTHING)
        before, before_rest = NOTHING, NOTHING  # the sum of the tokens so far
        at = 0  # two places in turns: reads follow the barrier after the writes
        if (begin > 0) & (begin < count):
            total, rest = NOTHING, NOTHING
            for t0 in range(tid * EACH, begin, config.tile):  # whole tiles
                for n in range(EACH):
                    total, rest = add(total, rest, log_of(logs, b, h, first + t0 + n))
            there, at = sums(smem, at, total, rest)
            before, before_rest = smem[there + THREADS - 1], smem[there + 2 * THREADS - 1]
        for t0 in range(begin, min(begin + config.stretch, count), config.tile):
            mine = t0 + tid * config.each
            end = min(mine + config.each, count)
            total, rest = NOTHING, NOTHING
            for t in range(mine, end):
                total, rest = add(total, rest, log_of(logs, b, h, first + t))
            there, at = sums(smem, at, total, rest)
            total, rest = before, before_rest  # the sum of the tokens before mine
            if tid > 0:
                total, rest = add(before, before_rest + smem[there + THREADS + tid - 1], smem[there + tid - 1])
            for t in range(mine, end):
                total, rest = add(total, rest, log_of(logs, b, h, first + t))
                put(marks, start(marks, b, h, first + t + 1), total, rest)
            last = there + THREADS - 1
            before, before_rest = add(before, before_rest + smem[last + THREADS], smem[last])

    return retention_marks


def prefix_sums_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return two numbers for each token, and for the place after each sequence. Empty without log_decay."""
    p = problem
    if "log_decay" not in p.arrays:
        return {}
    places = (1, p.H, p.total + p.B) if is_varlen(p) else (p.B, p.H, p.Sk + 1)
    return {"marks": workspace(p, (*places, 2))}


def prefix_sums_of(problem: Problem) -> Strided:
    """Return the marks along batch, head and token. The first mark of sequence b of varlen is b places after its first
    token.
    """
    meta = prefix_sums_workspace(problem)["marks"]
    b, h, t, _ = meta.strides
    return Strided("marks", (t if is_varlen(problem) else b, h, t))


def prefix_sums_steps(problem: Problem, logs: Strided, call: Call) -> list[Step]:
    """Return the launch, if there is a log_decay. call: of any pass."""
    heads, stretches = problem.B * problem.H, problem.Sk // CONFIG.stretch + 1
    if not logs.data or not heads:
        return []
    kernel, args = build_prefix_sums(CONFIG, problem.dtype), (prefix_sums_of(problem), logs, call, stretches)
    return [Step(kernel, (heads * stretches,), args, CONFIG.shared_bytes)]
