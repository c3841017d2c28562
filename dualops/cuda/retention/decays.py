"""What is left of a token at a later place: the decay of a head, or of each step.

A pass has places between its tokens: place n is before row n, and row r itself has the place r + later. A kernel calls
`between` for what is left at a later place of 1 at an earlier one:

    gamma^(later - earlier)                                 of a head
    exp(direction * (L[later token] - L[earlier token]))    of each step, with prefix sums L

In a pass back place n is that of token count - n, and what lies between two places is the same sum.

The prefix sums of log_decay are computed before any other launch of a call (`prefix_sums_steps`):

    sum n of a sequence = sum over its tokens t < n of max(log_decay_t, LEAST_LOG)        n = 0 .. count

Far into a sequence the difference of two prefix sums is a small difference of large numbers. So sums are computed in
float64 with the rounding error of each addition, and stored as two numbers of the problem's arithmetic. The difference
is then exact to its eps, and to about eps^2 of the sums.

A block of `build_prefix_sums` has a stretch of a head's sequence and reads it tile by tile, a few neighbouring
tokens a thread. The threads' sums meet in shared memory in log2(threads) steps. Each block sums up the tokens before
its stretch itself, so no block waits for another. The order of a sum depends on its own position alone.

Shared memory: 2 * 2 * threads numbers of float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import e, log2
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ...spec.retention import LEAST_LOG
from ..compiler.backend import Kernel, Members, Noun, builds, cuda, f32, f64, i64, kept_noun, kernel, members, verb
from ..launch.step import Step
from ..launch.views import absent, number_type, start
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import Call, call_type, is_varlen, span, workspace

EXACT_BELOW = 0.35  # -log_decay: with faster decays an error fades before it adds up
DEGREE = 7  # 0.35^8 / 8! is below any rounding error of float32
# log2 of a gamma; below it the rounding errors of neighbouring tokens' scores count. Emulated without them, at 0.96 one
# draw of fifty is beyond the accuracy rule; at 31 / 32, where RetNet's heads begin, one of a hundred, by 1.1 at most.
# RetNet's heads go without: the products of all heads took 12 % of the time (H200, 2026-11-26)
LEAST_KEPT = f32(log2(0.968))


@kept_noun
def decay(dtype: str) -> Members:
    """Verbs for the decay of a head, in the arithmetic of problems of this dtype."""
    number, DOUBLE = storage(dtype).number, dtype == "float64"
    num = numbers(number)
    HALF, TWO, SQRT_HALF = (number(x) for x in (0.5, 2, 0.5**0.5))
    # log2(1 + x) = 2 * log2(e) * atanh(x / (2 + x)), |x| < 0.42: the next term is below any rounding error
    C0, C1, C2, C3, C4, C5 = (number(2 * log2(e) / (2 * k + 1)) for k in range(6))

    @verb
    def less_than_one(h):
        """Return gamma - 1 for the default gamma: -2^(-5 - h)."""
        less = -num.one
        for _ in range(5 + h):
            less *= HALF
        return less

    @verb
    def log2_(gamma, call, h):
        """Return the logarithm of gamma, exact even if gamma is nearly 1."""
        if DOUBLE:
            return num.log2(gamma.data[h * gamma.strides[0]] if call.has_gamma != 0 else num.one + less_than_one(h))
        exponent = num.zero  # gamma = 2^exponent * (1 + less)
        if call.has_gamma != 0:
            mantissa = gamma.data[h * gamma.strides[0]]
            while (mantissa > num.zero) & (mantissa < SQRT_HALF):
                mantissa, exponent = mantissa * TWO, exponent - num.one
            less = mantissa - num.one
        else:
            less = less_than_one(h)
        s = less / (TWO + less)
        s2 = s * s
        return exponent + s * (C0 + s2 * (C1 + s2 * (C2 + s2 * (C3 + s2 * (C4 + s2 * C5)))))

    @verb
    def power(log2_gamma, n):
        """Return gamma^n."""
        return num.exp2(log2_gamma * number(n))

    @verb
    def of(gamma, call, b, h, first, count):
        """Return the decay of a head in a sequence of `count` tokens, for `between`."""
        return log2_(gamma, call, h)

    @verb
    def between(log2_gamma, earlier, later):
        """Return what is left between two places."""
        return power(log2_gamma, later - earlier)

    return members(
        locals(),
        argument=number_type(dtype, 1),  # the type of a kernel's argument `decay`
    )


class PrefixSums(NamedTuple):
    """Prefix sums of log_decay of a head in a sequence, two numbers each. That of place n is at first + n * step."""

    data: Any
    first: Any
    step: Any
    sign: Any  # 1, or -1 in a pass back


def decays_of(dtype: str, stepwise: bool) -> Noun:
    """Return the verbs for the kind of decay that a kernel is built for."""
    return step_decays(dtype) if stepwise else decay(dtype)


@kept_noun
def step_decays(dtype: str) -> Members:
    """Verbs for a decay of each step. Kernels that use many pairs of places read the prefix sums once (`sum_at`)."""
    number = storage(dtype).number
    num = numbers(number)

    @verb
    def of(prefix_sums, call, b, h, first, count):
        """Return the prefix sums of a head in a sequence of `count` tokens, for the other verbs."""
        step = prefix_sums.strides[2] * call.direction
        if call.direction < 0:
            first = first + count
        return PrefixSums(prefix_sums.data, start(prefix_sums, b, h, first), step, number(call.direction))

    @verb
    def sum_at(mine, n):
        """Return the sum at place n, two numbers."""
        at = mine.first + n * mine.step
        return mine.data[at], mine.data[at + 1]

    @verb
    def fade(mine, earlier, earlier_rest, later, later_rest):
        """Return what is left between two sums."""
        return num.exp(((later - earlier) + (later_rest - earlier_rest)) * mine.sign)

    @verb
    def between(mine, earlier, later):
        """Return what is left between two places."""
        a, a_rest = sum_at(mine, earlier)
        b, b_rest = sum_at(mine, later)
        return fade(mine, a, a_rest, b, b_rest)

    return members(locals(), argument=number_type(dtype, 3))


@cache
def exp_of_step(dtype: str) -> Callable[..., Any]:
    """Return the verb (log_decay) -> its exp, with one rounding near 1: a recurrence multiplies by it many times."""
    number, DOUBLE = storage(dtype).number, dtype == "float64"
    num, LEAST, NEAR = numbers(number), number(LEAST_LOG), number(-EXACT_BELOW)
    C2, C3, C4, C5, C6, C7 = (number(1 / k) for k in range(2, DEGREE + 1))

    @verb
    def exp_of(x):
        if DOUBLE or x < NEAR:
            return num.exp(x if x > LEAST else LEAST)
        tail = num.one + x * C5 * (num.one + x * C6 * (num.one + x * C7))
        return num.one + x * (num.one + x * C2 * (num.one + x * C3 * (num.one + x * C4 * tail)))

    return exp_of


def logs_of(metas: Mapping[str, ArrayMeta], name: str, varlen: bool) -> Strided:
    """Return log_decay or its gradient, [B, H, S] or of varlen [total, H], along batch, head and token."""
    if name not in metas:
        return absent(3)
    strides = metas[name].strides
    return Strided(name, (0, strides[1], strides[0]) if varlen else strides)


# --- prefix sums -------------------------------------------------------------------------------------

NOTHING, LEAST = f64(0), f64(LEAST_LOG)


@dataclass(frozen=True)
class PrefixSumsConfig:
    """Threads of a block, a power of two; tokens of a thread in a tile; tiles of a stretch."""

    threads: int = 128
    each: int = 8
    tiles: int = 8

    @cached_property
    def stretch(self) -> int:
        return self.threads * self.each * self.tiles


CONFIG = PrefixSumsConfig()


@verb
def add(total, rest, x):
    """Return total + x, and the rest plus its rounding error."""
    new = total + x
    of_x = new - total
    return new, rest + ((total - (new - of_x)) + (x - of_x))


@builds
def build_prefix_sums(config: PrefixSumsConfig, dtype: str) -> Kernel:
    """retention_prefix_sums(prefix_sums, logs, call, stretches). stretches: blocks for each head of a sequence."""
    number, THREADS, EACH = storage(dtype).number, config.threads, config.each
    TILE, STEPS = THREADS * EACH, THREADS.bit_length() - 1  # tokens; steps in which the threads' sums are added

    @verb
    def put(prefix_sums, at, total, rest):
        prefix_sums.data[at] = number(total)
        prefix_sums.data[at + 1] = number((total - f64(number(total))) + rest)

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

    @kernel(*[number_type(dtype, 3)] * 2, call_type(dtype), i64, threads=THREADS)
    def retention_prefix_sums(prefix_sums, logs, call, stretches):
        smem = cuda.shared.array(0, f64, alignment=16)
        tid = cuda.threadIdx.x
        head, begin = i64(cuda.blockIdx.x) // stretches, i64(cuda.blockIdx.x) % stretches * config.stretch
        b, h = head // call.H, head % call.H
        first, _, count = span(call, b)
        if (tid == 0) & (begin == 0):
            put(prefix_sums, start(prefix_sums, b, h, first), NOTHING, NOTHING)
        before, before_rest = NOTHING, NOTHING  # the sum of the tokens so far
        at = 0  # two places in turns: reads follow the barrier after the writes
        if (begin > 0) & (begin < count):
            total, rest = NOTHING, NOTHING
            for t0 in range(tid * EACH, begin, TILE):  # whole tiles
                for n in range(EACH):
                    total, rest = add(total, rest, log_of(logs, b, h, first + t0 + n))
            there, at = sums(smem, at, total, rest)
            before, before_rest = smem[there + THREADS - 1], smem[there + 2 * THREADS - 1]
        for t0 in range(begin, min(begin + config.stretch, count), TILE):
            mine = t0 + tid * EACH
            end = min(mine + EACH, count)
            total, rest = NOTHING, NOTHING
            for t in range(mine, end):
                total, rest = add(total, rest, log_of(logs, b, h, first + t))
            there, at = sums(smem, at, total, rest)
            total, rest = before, before_rest  # the sum of the tokens before mine
            if tid > 0:
                total, rest = add(before, before_rest + smem[there + THREADS + tid - 1], smem[there + tid - 1])
            for t in range(mine, end):
                total, rest = add(total, rest, log_of(logs, b, h, first + t))
                put(prefix_sums, start(prefix_sums, b, h, first + t + 1), total, rest)
            last = there + THREADS - 1
            before, before_rest = add(before, before_rest + smem[last + THREADS], smem[last])

    return retention_prefix_sums


def prefix_sums_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return two numbers for each token, and for the place after each sequence. Empty without log_decay."""
    p = problem
    if "log_decay" not in p.arrays:
        return {}
    places = (1, p.H, p.total + p.B) if is_varlen(p) else (p.B, p.H, p.Sk + 1)
    return {"prefix_sums": workspace(p, (*places, 2))}


def prefix_sums_of(problem: Problem) -> Strided:
    """Return the sums along batch, head and token. The first sum of sequence b of varlen is b places after its first
    token.
    """
    meta = prefix_sums_workspace(problem)["prefix_sums"]
    b, h, t, _ = meta.strides
    return Strided("prefix_sums", (t if is_varlen(problem) else b, h, t))


def prefix_sums_steps(problem: Problem, logs: Strided, call: Call) -> list[Step]:
    """Return the launch, if there is a log_decay. call: of any pass."""
    heads, stretches = problem.B * problem.H, problem.Sk // CONFIG.stretch + 1
    if not logs.data or not heads:
        return []
    kernel, args = build_prefix_sums(CONFIG, problem.dtype), (prefix_sums_of(problem), logs, call, stretches)
    return [Step(kernel, (heads * stretches,), args, 4 * CONFIG.threads * 8)]
