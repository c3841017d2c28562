"""rope_tables: cos and sin of position * frequency, in float64 for every dtype of the result.

    1  f = base ** (-2i / R), the thread's frequency, then scaled
    2  for each of its tokens: cos and sin of position * f / 2 pi turns, times the magnitude

An angle of 100,000 radians has an error of hundredths in float32, of 1e-11 in float64. In turns, cos and sin can drop
whole turns exactly and need no reduction of large numbers. A thread has one frequency and `tokens` tokens.

All scalings are one formula of seven numbers (`Scaling`), so that there is one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import pi
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ...spec.rope_scaling import yarn_range
from ..compiler.backend import Kernel, builds, cuda, f64, i64, kernel, types
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..launch.views import strided
from ..tile.numbers import cospi_f64, numbers, pow_f64, sinpi_f64
from ..tile.storage import storage
from .arguments import start


@dataclass(frozen=True)
class TablesConfig:
    """How frequencies and tokens are distributed to threads."""

    threads: int = 128  # per block
    tokens: int = 8  # per thread


class Scaling(NamedTuple):
    """A scaling of frequencies f of this base: (1 - kept) * f / factor + kept * f.

    kept is (turns * f / 2 pi + pair * i - low) / (high - low), clipped to 0 ... 1.
    """

    base: Any
    factor: Any
    turns: Any  # positions in which turns are counted
    pair: Any  # 1 to count pairs instead, else 0
    low: Any
    high: Any
    magnitude: Any  # factor of cos and sin


def _argument_types(dtype: str, positions_dtype: str) -> tuple[Any, ...]:
    """Return the types of cos, sin, positions, four sizes and the scaling."""
    table, scaling = strided(dtype, 2), types.NamedUniTuple(f64, len(Scaling._fields), Scaling)
    return table, table, strided(positions_dtype, 2), *[i64] * 4, scaling


@builds
def build(config: TablesConfig, dtype: str, positions_dtype: str) -> Kernel:
    """Build rope_tables(cos, sin, positions, tokens, S, half, shares, scaling). shares: threads of a frequency."""
    mem, num = storage(dtype), numbers(f64)
    TWO, TWO_PI = f64(2), f64(2 * pi)

    @kernel(*_argument_types(dtype, positions_dtype), threads=config.threads)
    def rope_tables(cos, sin, positions, tokens, S, half, shares, scaling):
        index = i64(cuda.blockIdx.x) * config.threads + cuda.threadIdx.x
        i, share = index % half, index // half
        if share < shares:
            frequency = pow_f64(scaling.base, -(f64(i) / f64(half)))
            measure = scaling.turns * frequency / TWO_PI + scaling.pair * f64(i)
            kept = min(max((measure - scaling.low) / (scaling.high - scaling.low), num.zero), num.one)
            frequency = (num.one - kept) * frequency / scaling.factor + kept * frequency
            for j in range(config.tokens):
                token = share + j * shares
                if token < tokens:
                    b, s = token // S, token % S
                    position = f64(positions.data[start(positions, b, s)])
                    half_turns = TWO * (position * (frequency / TWO_PI))
                    x, y = cospi_f64(half_turns), sinpi_f64(half_turns)
                    mem.store(cos.data, start(cos, b, s) + i, mem.number(scaling.magnitude * x))
                    mem.store(sin.data, start(sin, b, s) + i, mem.number(scaling.magnitude * y))

    return rope_tables


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel for tables."""
    config = TablesConfig()
    yield Choice("simt", config, "a thread has a frequency", partial(_steps, problem, results, config))


def _steps(problem: Problem, results: Mapping[str, ArrayMeta], config: TablesConfig) -> list[Step]:
    """Return the launch."""
    p, positions = problem, problem.arrays["positions"]
    shares = cdiv(p.tokens, config.tokens)
    tables = [_rows(name, meta.strides[:-1]) for name, meta in results.items()]
    args = (*tables, _rows("positions", positions.strides), p.tokens, positions.shape[-1], p.half, shares)
    kernel = build(config, p.dtype, positions.dtype)
    return [Step(kernel, (cdiv(shares * p.half, config.threads),), (*args, scaling_of(p)))]


def _rows(name: str, strides: tuple[int, ...]) -> Strided:
    return Strided(name, (0, *strides)[-2:])


def scaling_of(problem: Problem) -> Scaling:
    """Return the numbers of a call's scaling."""
    options, R = dict(problem.scaling or ()), 2 * problem.half
    name, base = options.get("rope_type", "default"), problem.theta
    every = Scaling(base, 1.0, 0.0, 0.0, 1.0, 2.0, options.get("attention_factor", 1.0))  # kept is 0, nothing divided
    if name in ("default", "dynamic"):
        return every
    every = every._replace(factor=options["factor"])
    if name == "yarn":
        first, last = yarn_range(R, base, options)  # `kept` decreases with i, so the last pair is the lower end
        return every._replace(pair=1.0, low=last, high=first)
    if name == "llama3":
        low, high = options["low_freq_factor"], options["high_freq_factor"]
        return every._replace(turns=options["original_max_position_embeddings"], low=low, high=high)
    return every
