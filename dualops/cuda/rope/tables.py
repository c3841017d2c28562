"""rope_tables: cos and sin of position * frequency, in float64 for every dtype of the result.

    1  f = base ** (-2i / dim), my frequency, after the scaling
    2  for my tokens: cos and sin of as many turns as position * f / 2 pi is

An angle of 100,000 radians in float32 is wrong by hundredths; in float64 by 1e-11. Counting it in turns, of which the
whole ones do not matter, leaves cos and sin no large number to reduce. A thread has one frequency and `tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import Any

from ...spec import ArrayMeta, Problem
from ..arrays import cdiv
from ..backend import Kernel, builds, cuda, f64, i32, i64, kernel, pointer, types
from ..step import Step
from ..tile import cospi_f64, pow_f64, sinpi_f64, storage
from .call import Rows


@dataclass(frozen=True)
class TablesConfig:
    """How frequencies are dealt to threads."""

    threads: int = 128  # of a block
    tokens: int = 8  # of a thread


@builds
def build(config: TablesConfig, dtype: str, positions_dtype: str) -> Kernel:
    """rope_tables(cos, sin, positions, tokens, S, half, shares, base, factor, low, high, original)."""
    stored, given = storage(dtype), i32 if positions_dtype == "int32" else i64
    number, store = stored.number, stored.store
    table, places = (types.NamedTuple((pointer(element), i64, i64), Rows) for element in (stored.element, given))
    THREADS, TOKENS = config.threads, config.tokens
    ZERO, ONE, TWO, TWO_PI = f64(0), f64(1), f64(2), f64(2 * pi)

    @kernel(table, table, places, *[i64] * 4, *[f64] * 5, threads=config.threads)
    def rope_tables(cos, sin, positions, tokens, S, half, shares, base, factor, low, high, original):
        index = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        i, share = index % half, index // half
        if share < shares:
            frequency = pow_f64(base, -(f64(i) / f64(half)))
            kept = min(max((original * frequency / TWO_PI - low) / (high - low), ZERO), ONE)
            frequency = (ONE - kept) * frequency / factor + kept * frequency
            for j in range(TOKENS):
                token = share + j * shares
                if token < tokens:
                    b, s = token // S, token % S
                    position = f64(positions.data[b * positions.batch + s * positions.token])
                    half_turns = TWO * (position * (frequency / TWO_PI))
                    store(cos.data, b * cos.batch + s * cos.token + i, number(cospi_f64(half_turns)))
                    store(sin.data, b * sin.batch + s * sin.token + i, number(sinpi_f64(half_turns)))

    return rope_tables


def steps(problem: Problem, results: Mapping[str, ArrayMeta], config: TablesConfig) -> list[Step]:
    """The launch."""
    p, positions = problem, problem.arrays["positions"]
    shares = cdiv(p.tokens, config.tokens)
    tables = [_rows(name, meta.strides[:-1]) for name, meta in results.items()]
    args = (*tables, _rows("positions", positions.strides), p.tokens, positions.shape[-1], p.half, shares)
    kernel = build(config, p.dtype, positions.dtype)
    return [Step(kernel, (cdiv(shares * p.half, config.threads),), (*args, p.base, *blend(p.scaling)))]


def _rows(name: str, strides: tuple[int, ...]) -> Rows:
    batch, token = (0, *strides)[-2:]
    return Rows(name, batch, token)


def blend(scaling: tuple[Any, ...] | None) -> tuple[float, ...]:
    """factor, low, high and original, with which each scaling is a case of llama3's: in 0 positions nothing turns."""
    if scaling is None:
        return 1.0, 1.0, 2.0, 0.0
    name, factor, *rest = scaling
    return (factor, 1.0, 2.0, 0.0) if name == "linear" else (factor, *rest)
