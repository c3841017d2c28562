"""The functions of arithmetic that compiled code and Python must compute alike, for float32 and for float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import e as EULER, inf, log2, nan, sqrt
from typing import Any

from ..compiler.backend import Namespace, f32, f64, u32, u64, verb
from ..ptx.arithmetic import (
    at_least_15_bits as at_least_15_bits,
    bits_of_f32,
    bits_of_f64,
    cospi_f64 as cospi_f64,
    erfc_f32,
    erfc_f64,
    ex2_approx_ftz,
    exp2_f64,
    exp_f64,
    fma_rn as fma_rn,
    lg2_approx,
    log2_f64,
    log_f64,
    max_f32,
    max_f64,
    mul_wide_u32 as mul_wide_u32,
    pow_f64 as pow_f64,
    rcp_approx_ftz,
    sinpi_f64 as sinpi_f64,
    tanh_f32,
    tanh_f64,
)
from ..ptx.async_copy import st_async_v2_f32, st_async_v2_f64
from ..ptx.memory import (
    ld_shared_v2_f64,
    ld_shared_v4_f32,
    st_shared_f32,
    st_shared_f64,
    st_shared_v2_f64,
    st_shared_v4_f32,
)
from ..ptx.warp import shfl_bfly_f32, shfl_bfly_f64, shfl_idx_f32, shfl_idx_f64

LOG2_E = log2(EULER)


class Numbers(Namespace):
    """Verbs on numbers of one arithmetic type, and those that every kernel needs."""

    zero: Any
    minus_zero: Any  # marks numbers that do not count
    one: Any
    minus_inf: Any
    nan: Any
    maximum: Callable[..., Any]  # (a, b): if one of them is NaN, the other
    base: Callable[..., Any]  # (maximum) -> the number to subtract from exponents: the maximum, or 0 for -inf
    exp: Callable[..., Any]
    exp2: Callable[..., Any]
    log: Callable[..., Any]
    log2: Callable[..., Any]
    tanh: Callable[..., Any]
    erfc: Callable[..., Any]
    reciprocal: Callable[..., Any]  # (x) -> 1 / x; for f32 to 1 ulp, denormals as zeros
    rsqrt: Callable[..., Any]  # (x) -> 1 / sqrt(x), with IEEE rounding of both operations; x not negative
    is_minus_zero: Callable[..., Any]  # (x) -> whether it is -0
    shuffle: Callable[..., Any]  # (x, distance, mask) -> x of the lane `lane ^ distance`
    of_lane: Callable[..., Any]  # (x, lane, mask) -> x of that lane
    add_compensated: Callable[..., Any]  # (total, rest, x) -> total, rest: Kahan's sum; rest is the excess of total
    send_pair: Callable[..., None]  # (to, index, rank, a, b, barrier, barrier_index): to block `rank`; asynchronous
    load_four: Callable[..., None]  # (frag, at, shared, index): four neighbours; index a multiple of four
    store_shared: Callable[..., None]  # (shared, index, x)
    vector: int  # numbers in 16 bytes
    store_vector: Callable[..., None]  # (shared, index, frag, at): `vector` neighbours; index a multiple of it


@cache
def numbers(number: Any) -> Numbers:
    """The verbs for f32 or f64."""
    return _double() if number is f64 else _single()


def _common(number: Any) -> dict[str, Any]:
    """Return the members that both kinds of numbers make in the same way."""
    constants = {"zero": 0, "minus_zero": -0.0, "one": 1, "minus_inf": -inf, "nan": nan}
    NOTHING, ZERO, ONE = number(-inf), number(0), number(1)

    @verb
    def base(maximum):
        return ZERO if maximum == NOTHING else maximum

    @verb
    def rsqrt(x):
        return ONE / number(sqrt(x))

    @verb
    def add_compensated(total, rest, x):
        x -= rest
        new = total + x
        rest = (new - total) - x
        return new, ZERO if rest != rest else rest  # an infinity has no rounding error to recover

    verbs = {"base": base, "rsqrt": rsqrt, "add_compensated": add_compensated}
    return {name: number(value) for name, value in constants.items()} | verbs


@verb
def _reciprocal_f64(x):
    return f64(1) / x


def _double() -> Numbers:
    @verb
    def load_four(frag, at, shared, index):
        frag[at], frag[at + 1] = ld_shared_v2_f64(shared, index)
        frag[at + 2], frag[at + 3] = ld_shared_v2_f64(shared, index + 2)

    @verb
    def store_vector(shared, index, frag, at):
        st_shared_v2_f64(shared, index, frag[at], frag[at + 1])

    MINUS_ZERO = u64(1 << 63)

    @verb
    def is_minus_zero(x):
        return bits_of_f64(x) == MINUS_ZERO

    return Numbers.from_locals(
        locals(),
        **_common(f64),
        maximum=max_f64,
        exp=exp_f64,
        exp2=exp2_f64,
        log=log_f64,
        log2=log2_f64,
        tanh=tanh_f64,
        erfc=erfc_f64,
        reciprocal=_reciprocal_f64,
        shuffle=shfl_bfly_f64,
        of_lane=shfl_idx_f64,
        send_pair=st_async_v2_f64,
        store_shared=st_shared_f64,
        vector=2,
    )


def _single() -> Numbers:
    SCALE, INVERSE, MINUS_ZERO = f32(LOG2_E), f32(1 / LOG2_E), u32(1 << 31)

    @verb
    def exp(x):
        return ex2_approx_ftz(x * SCALE)

    @verb
    def log(x):
        return lg2_approx(x) * INVERSE

    @verb
    def is_minus_zero(x):
        return bits_of_f32(x) == MINUS_ZERO

    @verb
    def load_four(frag, at, shared, index):
        frag[at], frag[at + 1], frag[at + 2], frag[at + 3] = ld_shared_v4_f32(shared, index)

    @verb
    def store_vector(shared, index, frag, at):
        st_shared_v4_f32(shared, index, frag[at], frag[at + 1], frag[at + 2], frag[at + 3])

    return Numbers.from_locals(
        locals(),
        **_common(f32),
        maximum=max_f32,
        exp2=ex2_approx_ftz,
        log2=lg2_approx,
        tanh=tanh_f32,
        erfc=erfc_f32,
        reciprocal=rcp_approx_ftz,
        shuffle=shfl_bfly_f32,
        of_lane=shfl_idx_f32,
        send_pair=st_async_v2_f32,
        store_shared=st_shared_f32,
        vector=4,
    )
