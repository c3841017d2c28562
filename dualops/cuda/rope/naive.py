"""rope, the plainest kernel: one thread per pair, which loads its own cos and sin.

    1  x1, x2 = the pair's two elements; cos, sin = those of the token's row
    2  x1' = x1 * cos - x2 * sin
       x2' = x2 * cos + x1 * sin

Each element from R on has a thread that copies it. All heads of a token load the same row of the tables again, and a
thread moves as few as two bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, builds, cuda, i64, kernel
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import Variant, argument_types, arguments, find, start, starts, table_rows, variant, width


@dataclass(frozen=True)
class NaiveConfig:
    """One thread per pair."""

    threads: int = 256


@builds
def build(config: NaiveConfig, variant: Variant) -> Kernel:
    """Build rope_naive(rotated, x, tables, sizes, turn, width). width: D - R/2, in place R/2."""
    mem, table_mem = storage(variant.dtype), storage(variant.table_dtype)
    num, rows = numbers(mem.number), table_rows(variant.positions)

    @kernel(*argument_types(variant), i64, threads=config.threads)
    def rope_naive(rotated, x, tables, sizes, turn, width):
        index = i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        i = index % width
        token = index // width % sizes.tokens
        h = index // width // sizes.tokens
        if h < sizes.heads:
            b, s = token // sizes.S, token % sizes.S
            x_mem, x_at = find(x, starts(x, b, s), h, sizes)
            y_mem, y_at = find(rotated, starts(rotated, b, s), h, sizes)
            if i < sizes.half:
                first, second = (2 * i, 2 * i + 1) if variant.interleaved else (i, i + sizes.half)
                row, there = rows.of(tables.positions, b, s, sizes)
                c, d = num.nan, num.nan
                if there:
                    c = table_mem.load(tables.cos.data, start(tables.cos, b, row) + i)
                    d = table_mem.load(tables.sin.data, start(tables.sin, b, row) + i) * turn
                x1, x2 = mem.load(x_mem, x_at + first), mem.load(x_mem, x_at + second)
                mem.store(y_mem, y_at + first, x1 * c - x2 * d)
                mem.store(y_mem, y_at + second, x2 * c + x1 * d)
            else:
                mem.store(y_mem, y_at + i + sizes.half, mem.load(x_mem, x_at + i + sizes.half))

    return rope_naive


def choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device, turn: float) -> Iterator[Choice]:
    """Yield the rotation, one thread per pair. turn: see `arguments`."""
    config = NaiveConfig()
    yield Choice("naive", config, "one thread per pair", partial(_steps, problem, results, turn, config))


def _steps(problem: Problem, results: Mapping[str, ArrayMeta], turn: float, config: NaiveConfig) -> list[Step]:
    """Return the launch, none for an empty call."""
    p = problem
    blocks = cdiv(p.B * p.S * (p.H + p.Hkv) * width(p), config.threads)
    args = (*arguments(problem, results, turn), width(p))
    if not blocks:  # in place, and R is 0
        return []
    return [Step(build(config, variant(problem)), (blocks,), args)]
