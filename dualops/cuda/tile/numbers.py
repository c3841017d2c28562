"""The functions of arithmetic that compiled code and Python must compute alike, for float32 and for float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import e as EULER
from math import inf, log2
from typing import Any, NamedTuple

from ..backend import f32, f64, verb
from ..ptx import (
    ex2_approx_ftz,
    exp_f64,
    ld_shared_v2_f64,
    ld_shared_v4_f32,
    lg2_approx,
    log_f64,
    max_f32,
    max_f64,
    shfl_bfly_f32,
    shfl_bfly_f64,
    st_async_v2_f32,
    st_async_v2_f64,
)

LOG2_E = log2(EULER)


class Numbers(NamedTuple):
    """Verbs on numbers of one arithmetic type."""

    maximum: Callable[..., Any]  # (a, b): a NaN gives way to a number
    base: Callable[..., Any]  # (maximum): what exponents are taken against: 0 where nothing but -inf was seen
    exp: Callable[..., Any]
    log: Callable[..., Any]
    shuffle: Callable[..., Any]  # (x, distance, mask): what lane ^ distance has
    send_pair: Callable[..., None]  # (to, index, rank, a, b, barrier, barrier_index): to block `rank`'s array, later
    load_four: Callable[..., None]  # (frag, at, shared, index): four neighbours; index a multiple of four


@cache
def numbers(number: Any) -> Numbers:
    """The verbs for f32 or f64."""
    return _double() if number is f64 else _single()


def _base(number: Any) -> Callable[..., Any]:
    NOTHING, ZERO = number(-inf), number(0)

    @verb
    def base(maximum):
        return ZERO if maximum == NOTHING else maximum

    return base


def _double() -> Numbers:
    @verb
    def load_four(frag, at, shared, index):
        frag[at], frag[at + 1] = ld_shared_v2_f64(shared, index)
        frag[at + 2], frag[at + 3] = ld_shared_v2_f64(shared, index + 2)

    return Numbers(
        maximum=max_f64,
        base=_base(f64),
        exp=exp_f64,
        log=log_f64,
        shuffle=shfl_bfly_f64,
        send_pair=st_async_v2_f64,
        load_four=load_four,
    )


def _single() -> Numbers:
    SCALE, INVERSE = f32(LOG2_E), f32(1 / LOG2_E)

    @verb
    def exp(x):
        return ex2_approx_ftz(x * SCALE)

    @verb
    def log(x):
        return lg2_approx(x) * INVERSE

    @verb
    def load_four(frag, at, shared, index):
        frag[at], frag[at + 1], frag[at + 2], frag[at + 3] = ld_shared_v4_f32(shared, index)

    return Numbers(
        maximum=max_f32,
        base=_base(f32),
        exp=exp,
        log=log,
        shuffle=shfl_bfly_f32,
        send_pair=st_async_v2_f32,
        load_four=load_four,
    )
