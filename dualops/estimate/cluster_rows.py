"""Rows kept in the registers of clusters: softmax and its gradient, rms_norm and layer_norm.

Blocks of a cluster load their parts of a row, synchronise, and write. Alone, a cluster takes

    turn = ARRIVES + MEETS * log2(blocks) + LOADS * vectors that a thread loads, of 256 threads + BEGINS / rows

and as many clusters as SMs have room for share the bandwidth. With a row each, they take the time that memory needs for
all of these rows, if that is longer. A cluster computes `rows` rows and ends; the last clusters run alone for a while.

    kernel = (rows in all / clusters at once + ALONE * rows) * longer + LAUNCH

These were fitted to figures of layer_norm and softmax: microseconds, and ALONE, of clusters one after another. What a
kernel has in registers, and with it how many blocks an SM has, was read from compiled ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import log2
from typing import Any, NamedTuple

from ..cuda.launch.arrays import cdiv
from ..cuda.norm import cluster_steps
from ..cuda.norm.arguments import Call as NormCall
from ..cuda.rows import cluster
from ..cuda.rows.cluster import ClusterRowsConfig
from ..cuda.softmax.arguments import Call as SoftmaxCall
from ..cuda.softmax.operator import Softmax
from ..spec import Problem
from ..spec.meta import itemsize
from .architectures import Architecture
from .candidates import Candidate, Part
from .model import LAUNCH, REACHED, Estimate
from .steps import by_registers, resident

ARRIVES, MEETS, LOADS, BEGINS, ALONE = 1.7, 0.38, 0.14, 0.26, 0.7
SHARP = 12  # how sudden it is that memory decides: turn and memory's time add up by this power
THREADS, VECTOR = 256, 16  # of a block; bytes that a thread loads at once
STATIC = 1024  # bytes of shared memory besides the weights, of a block
MOST_BLOCKS = 8  # of an SM
CLUSTERS, ROWS = (2, 4, 8, 16), (2, 4, 8)


class Kind(NamedTuple):
    """What a kernel does with a row of x."""

    loaded: int  # arrays
    moved: int  # the same, and those that are written
    weights: int  # w and b
    registers: int  # besides a row's vectors
    least: int  # the same where the compiler has no more
    vector: int  # registers that a vector of each loaded array takes
    most: int  # vectors of a thread


def kind_of(p: Problem, backward: bool) -> Kind:
    """Of a problem; backward: of softmax."""
    if p.spec.name == "softmax":
        return Kind(2, 3, 0, 30, 28, 4, 8) if backward else Kind(1, 2, 0, 30, 28, 4, 16)
    added, weights = "residual" in p.arrays, sum(name in p.arrays for name in ("w", "b"))
    loaded, moved, most = (2, 4, 8) if added else (1, 2, 16)
    if p.spec.name == "rms_norm":
        return Kind(loaded, moved, weights, 42, 28, 4, most)
    if added or itemsize(p.dtype) > 2:
        return Kind(loaded, moved, weights, 54, 40, 4, most)
    return Kind(loaded, moved, weights, 40, 40, 12, most)  # numbers of a vector are kept, where there is room


def candidates(p: Problem, backward: bool, gpu: Architecture, own: ClusterRowsConfig) -> Iterator[Candidate]:
    """The operator's own, and every cluster that holds a row of which registers hold its vectors."""
    kind, seen = kind_of(p, backward), set[Any]()
    for config in (own, *_grid(own, p, kind, gpu)):
        work = replace(config, min_blocks=1), blocks_of(config, kind, gpu)
        if work in seen:  # registers that are left would not be taken
            continue
        seen.add(work)
        makes = "dx" if backward else "y"
        steps, shared = partial(_steps, p, backward, config, gpu), _shared_bytes(config, kind)
        yield Candidate("sm90", (Part(makes, config),), rows_estimate(config, p, backward, gpu), shared, steps)


def rows_estimate(config: ClusterRowsConfig, p: Problem, backward: bool, gpu: Architecture) -> Estimate:
    """Of one Config."""
    kind, micro = kind_of(p, backward), 1e-6
    bandwidth, rows = REACHED * gpu.memory_bandwidth, config.rows
    row_bytes = kind.moved * p.N * itemsize(p.dtype)
    at_once = gpu.sms * blocks_of(config, kind, gpu) / config.cluster
    loads = LOADS * config.vectors * kind.loaded * config.threads / THREADS
    turn = micro * (ARRIVES + MEETS * log2(config.cluster) + loads + BEGINS / rows)
    memory = at_once * row_bytes / bandwidth
    row = (turn**SHARP + memory**SHARP) ** (1 / SHARP)
    even, alone = p.M / at_once * row, ALONE * rows * row
    lost = {"waits": p.M / at_once * turn, "waves": alone, "launches": LAUNCH}
    return Estimate(even + alone + LAUNCH, {"memory": p.M * row_bytes / bandwidth}, lost)


def blocks_of(config: ClusterRowsConfig, kind: Kind, gpu: Architecture) -> int:
    """Blocks that an SM has at once: by what the compiler takes, at most what a Config leaves it."""
    registers = kind.registers + kind.vector * config.vectors * kind.loaded
    most = min(by_registers(gpu, config.threads, registers, config.min_blocks), MOST_BLOCKS)
    return max(config.min_blocks, resident(gpu, _shared_bytes(config, kind) + STATIC, most))


def _grid(own: ClusterRowsConfig, p: Problem, kind: Kind, gpu: Architecture) -> Iterator[ClusterRowsConfig]:
    step = THREADS * VECTOR // itemsize(p.dtype)
    clusters = [each for each in CLUSTERS if each <= gpu.device.max_cluster]
    for blocks_of_row, blocks in product(clusters, range(1, 5)):
        vectors = cdiv(p.N, blocks_of_row * step)
        room = gpu.registers_per_sm // (THREADS * blocks) // 8 * 8
        if not 2 <= vectors <= kind.most or kind.least + 4 * vectors * kind.loaded > room:
            continue
        config = replace(own, vectors=vectors, cluster=blocks_of_row, min_blocks=blocks)
        for each in [config] if p.spec.name == "softmax" else [replace(config, rows=rows) for rows in ROWS]:
            if resident(gpu, _shared_bytes(each, kind) + STATIC, blocks) == blocks:
                yield each


def _shared_bytes(config: ClusterRowsConfig, kind: Kind) -> int:
    return kind.weights * config.threads * config.vectors * VECTOR


def _steps(p: Problem, backward: bool, config: ClusterRowsConfig, gpu: Architecture) -> Any:
    results = p.outputs(p.spec.gradients) if backward else p.outputs()
    if p.spec.name != "softmax":
        return cluster_steps(config, NormCall(p, results, backward=False), gpu.device)
    call = SoftmaxCall(p, results)
    return cluster.steps_of(config, Softmax(call.dtype, backward), call.arguments, gpu.device)
