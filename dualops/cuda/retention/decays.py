"""What is left of a token at a later place: the decay of a head, or of each step.

A pass has places between its tokens: place n is before row n, and row r itself has the place r + later. A kernel calls
`between` for what is left at a later place of 1 at an earlier one:

    gamma^(later - earlier)                                 of a head
    exp(direction * (L[later token] - L[earlier token]))    of each step, L from `decay_prefix_sums`

In a pass back place n is that of token count - n, and what lies between two places is the same sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import e, log2
from typing import Any, NamedTuple

from ...spec import ArrayMeta
from ...spec.meta import Strided
from ...spec.retention import LEAST_LOG
from ..compiler.backend import Members, Noun, members, noun, verb
from ..launch.views import absent, number_type, start
from ..tile.numbers import numbers
from ..tile.storage import storage

Decays = Noun  # what `decay` and `step_decays` make
EXACT_BELOW = 0.35  # -log_decay: with faster decays an error fades before it adds up
DEGREE = 7  # 0.35^8 / 8! is below any rounding error of float32


@cache
@noun
def decay(dtype: str) -> Members:
    """Verbs for the decay of a head, in the arithmetic of problems of this dtype."""
    number = storage(dtype).number
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
    def value(gamma, call, h):
        """Return gamma. Each step multiplies by it. The error of a rounded logarithm's power would add up."""
        return gamma.data[h * gamma.strides[0]] if call.has_gamma != 0 else num.one + less_than_one(h)

    @verb
    def _log2_double(gamma, call, h):
        return num.log2(value(gamma, call, h))

    @verb
    def _log2_single(gamma, call, h):
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

    own_log2 = _log2_double if dtype == "float64" else _log2_single

    @verb
    def power(log2_gamma, n):
        """Return gamma^n."""
        return num.exp2(log2_gamma * number(n))

    @verb
    def of(gamma, call, b, h, first, count):
        """Return the decay of a head in a sequence of `count` tokens, for `between`."""
        return own_log2(gamma, call, h)

    @verb
    def between(log2_gamma, earlier, later):
        """Return what is left between two places."""
        return power(log2_gamma, later - earlier)

    return members(
        locals(),
        argument=number_type(dtype, 1),  # the type of a kernel's argument `decay`
        log2=own_log2,  # (gamma, call, h) -> its logarithm, exact even if gamma is nearly 1
    )


class Marks(NamedTuple):
    """Prefix sums of log_decay of a head in a sequence, two numbers each. That of place n is at first + n * step."""

    data: Any
    first: Any
    step: Any
    sign: Any  # 1, or -1 in a pass back


def decays_of(dtype: str, stepwise: bool) -> Decays:
    """Return the verbs for the kind of decay that a kernel is built for."""
    return step_decays(dtype) if stepwise else decay(dtype)


@cache
@noun
def step_decays(dtype: str) -> Members:
    """Verbs for a decay of each step. A difference of two sums is exact to its eps: each sum to eps^2. Kernels that use
    many pairs of places read the prefix sums once (`mark`).
    """
    number = storage(dtype).number
    num = numbers(number)

    @verb
    def of(marks, call, b, h, first, count):
        """Return the prefix sums of a head in a sequence of `count` tokens, for the other verbs."""
        step = marks.strides[2] * call.direction
        if call.direction < 0:
            first = first + count
        return Marks(marks.data, start(marks, b, h, first), step, number(call.direction))

    @verb
    def mark(mine, n):
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
        a, a_rest = mark(mine, earlier)
        b, b_rest = mark(mine, later)
        return fade(mine, a, a_rest, b, b_rest)

    return members(locals(), argument=number_type(dtype, 3))


@cache
def exp_of_step(dtype: str) -> Callable[..., Any]:
    """Return the verb (log_decay) -> its exp, with one rounding near 1: a recurrence multiplies by it many times."""
    number = storage(dtype).number
    num, LEAST = numbers(number), number(LEAST_LOG)
    NEAR = number(-EXACT_BELOW)
    C2, C3, C4, C5, C6, C7 = (number(1 / k) for k in range(2, DEGREE + 1))

    @verb
    def double(x):
        return num.exp(x if x > LEAST else LEAST)

    @verb
    def single(x):
        if x < NEAR:
            return num.exp(x if x > LEAST else LEAST)
        tail = num.one + x * C5 * (num.one + x * C6 * (num.one + x * C7))
        return num.one + x * (num.one + x * C2 * (num.one + x * C3 * (num.one + x * C4 * tail)))

    return double if dtype == "float64" else single


@cache
@noun
def step_factors(dtype: str, stepwise: bool) -> Members:
    """Verbs for the factor of a state at a token, by each step's decay or by a head's. `read` starts the load, `factor`
    waits for it.
    """
    num, exp_of, own = numbers(storage(dtype).number), exp_of_step(dtype), decay(dtype)

    @verb
    def _read_log(logs, call, b, h, token):
        return logs.data[start(logs, b, h, token)]

    @verb
    def _exp_of_log(log, call, h):
        return exp_of(log)

    @verb
    def _read_gamma(gamma, call, b, h, token):
        value = num.one
        if call.has_gamma != 0:
            value = gamma.data[h * gamma.strides[0]]
        return value

    @verb
    def _or_default(value, call, h):
        return value if call.has_gamma != 0 else num.one + own.less_than_one(h)

    return members(
        locals(),
        read=_read_log
        if stepwise
        else _read_gamma,  # (decay, call, b, h, token) -> a number; decay: log_decay, or gamma
        factor=_exp_of_log if stepwise else _or_default,  # (number, call, h)
    )


def logs_of(metas: Mapping[str, ArrayMeta], name: str, varlen: bool) -> Strided:
    """Return log_decay or its gradient, [B, H, S] or of varlen [total, H], along batch, head and token."""
    if name not in metas:
        return absent(3)
    strides = metas[name].strides
    return Strided(name, (0, strides[1], strides[0]) if varlen else strides)
