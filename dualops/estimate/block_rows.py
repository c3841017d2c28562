"""Rows kept in the registers of a block, or of a part of it: softmax and its gradient, rms_norm and layer_norm.

A block loads its rows, synchronises its threads and writes. Then another block takes its place. Alone, a block takes

    turn = ARRIVES + MEETS * times that a row's warps meet * log2(these warps) + WEIGHS * vectors, of norms with weights

and blocks, as many as SMs have room for, share the bandwidth:

    kernel = rows in all / rows at once * max(turn, memory's time for these) + LAUNCH

Fitted to figures of softmax and layer_norm, in microseconds. Registers were read from compiled kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import log2
from typing import Any, NamedTuple

from ..cuda.launch.arrays import cdiv
from ..cuda.norm import rows_steps
from ..cuda.norm.arguments import Call as NormCall
from ..cuda.rows import registers
from ..cuda.rows.registers import RowsConfig
from ..cuda.softmax.arguments import Call as SoftmaxCall
from ..cuda.softmax.operator import Softmax
from ..cuda.tile.storage import storage
from ..spec import Problem
from ..spec.meta import itemsize
from .architectures import Architecture
from .candidates import Candidate, Part
from .model import LAUNCH, REACHED, Estimate
from .steps import by_registers

ARRIVES, MEETS, WEIGHS = 2.8, 0.09, 0.09
VECTORS, THREADS, ROW_THREADS = (1, 2, 4, 8, 16), (128, 256, 512), 1024  # of a thread; of a block; most of a row
MOST_OF_A_THREAD = 64  # numbers of a row; with 128, layer_norm takes two to three times as long


class Kind(NamedTuple):
    """What a kernel does with a row of x."""

    moved: int  # arrays
    meets: int  # times that a row's threads do
    weighs: bool  # by w
    registers: float  # besides its numbers
    number: float  # registers that each number of x takes
    least: int  # threads of a row, at least


def kind_of(p: Problem, backward: bool) -> Kind:
    """Of a problem; backward: of softmax."""
    if p.spec.name == "softmax":
        return Kind(3, 1, False, 22, 2, 32) if backward else Kind(2, 1, False, 22, 1.08, 32)
    added = "residual" in p.arrays
    meets, registers = (1, 19) if p.spec.name == "rms_norm" else (2, 21)
    return Kind(4 if added else 2, meets, "w" in p.arrays, registers, 1.32 + added, 8)


def candidates(p: Problem, backward: bool, gpu: Architecture, own: RowsConfig) -> Iterator[Candidate]:
    """The operator's own, and every block that holds a row of which registers hold its numbers."""
    kind, makes = kind_of(p, backward), "dx" if backward else "y"
    for config in dict.fromkeys((own, *_grid(own, p, kind))):
        steps = partial(_steps, p, backward, config)
        yield Candidate("simt", (Part(makes, config),), rows_estimate(config, p, backward, gpu), 0, steps)


def rows_estimate(config: RowsConfig, p: Problem, backward: bool, gpu: Architecture) -> Estimate:
    """Of one Config."""
    kind, bandwidth = kind_of(p, backward), REACHED * gpu.memory_bandwidth
    row_bytes = kind.moved * p.N * itemsize(p.dtype)
    at_once = max(min(p.M, gpu.sms * blocks_of(config, p, kind, gpu) * config.rows), 1)
    meets = MEETS * kind.meets * log2(max(1, config.row_threads / 32))
    turn = 1e-6 * (ARRIVES + meets + WEIGHS * config.vectors * kind.weighs)
    turns = p.M / at_once
    seconds = turns * max(turn, at_once * row_bytes / bandwidth) + LAUNCH
    return Estimate(seconds, {"memory": p.M * row_bytes / bandwidth}, {"waits": turns * turn, "launches": LAUNCH})


def blocks_of(config: RowsConfig, p: Problem, kind: Kind, gpu: Architecture) -> int:
    """Blocks that an SM has at once."""
    registers = kind.registers + kind.number * config.vectors * storage(p.dtype).vector
    return max(1, by_registers(gpu, config.threads, registers, config.min_blocks))


def _grid(own: RowsConfig, p: Problem, kind: Kind) -> Iterator[RowsConfig]:
    vector = storage(p.dtype).vector
    for vectors, threads in product(VECTORS, THREADS):
        row_threads = max(kind.least, 1 << (cdiv(p.N, vectors * vector) - 1).bit_length())
        if vectors * vector > MOST_OF_A_THREAD:
            continue
        if row_threads <= threads or (row_threads == ROW_THREADS and threads == THREADS[-1]):
            yield replace(
                own, row_threads=row_threads, vectors=vectors, rows=max(1, threads // row_threads), min_blocks=1
            )


def _steps(p: Problem, backward: bool, config: RowsConfig) -> Any:
    results = p.outputs(p.spec.gradients) if backward else p.outputs()
    if p.spec.name != "softmax":
        return rows_steps(config, NormCall(p, results, backward=False))
    call = SoftmaxCall(p, results)
    return registers.steps_of(config, Softmax(call.dtype, backward), call.arguments)
