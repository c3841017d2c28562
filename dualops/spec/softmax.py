"""The spec of softmax(x, axis=-1). Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from .base import Case, Cost, Input, Output, Param, Problem, Spec, Tag, standard_normal
from .domains import integer
from .draws import Drawn, random_size
from .meta import FLOATS, ArrayMeta


def measure(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Measure M rows of N elements along any axis; `params["axis"]` becomes its non-negative form."""
    name, x = next(iter(arrays.items()))
    for other, meta in arrays.items():
        if meta.shape != x.shape:
            raise ValueError(f"{op}: {other} has shape {meta.shape}, {name} has shape {x.shape}, expected the same")
    rank, axis = len(x.shape), params["axis"]
    if rank == 0:
        raise ValueError(f"{op}: {name} has no axes, expected at least one")
    if not -rank <= axis < rank:
        raise ValueError(f"{op}: axis is {axis}, expected {-rank} to {rank - 1} for {name} of shape {x.shape}")
    params["axis"] = axis % rank
    return {"M": prod(x.shape[:axis]) * prod(x.shape[axis:][1:]), "N": x.shape[axis]}


def _elements(problem: Problem) -> int:
    return problem.M * problem.N


def _cases() -> tuple[Case, ...]:
    cases = []

    def add(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], tags: set[Tag], **params: Any) -> None:
        cases.extend(Case(name, dtype, {"x": shape}, params, frozenset(tags)) for dtype in dtypes)

    half = ("bfloat16",)
    # common problems
    for columns, rows in ((1024, 32768), (4096, 32768), (16384, 32768), (65536, 8192), (262144, 2048)):
        add(f"rows{rows}x{columns}", (rows, columns), half, {Tag.BENCH})
    add("rows512x1048576", (512, 1048576), half, {Tag.COMPARE})
    add("rows32768x4096", (32768, 4096), ("float32", "float16"), {Tag.BENCH})
    add("rows8192x4096", (8192, 4096), ("float32", "bfloat16"), {Tag.DEMO})
    # every range of row lengths: a warp, a block or a cluster per row, and two passes
    for columns, rows in ((1, 70), (31, 5), (128, 33), (1000, 7), (4097, 6), (5120, 5), (16384, 4), (50257, 3)):
        add(f"rows{rows}x{columns}", (rows, columns), FLOATS, {Tag.TEST, Tag.EDGE})
    add("rows3x65536", (3, 65536), FLOATS, {Tag.TEST})
    add("rows2x262144", (2, 262144), FLOATS, {Tag.TEST})
    add("rows1x1048576", (1, 1048576), FLOATS, {Tag.TEST})
    # any axis
    add("axis0", (300, 70), FLOATS, {Tag.TEST, Tag.EDGE}, axis=0)
    add("axis1of3", (5, 129, 34), FLOATS, {Tag.TEST, Tag.EDGE}, axis=1)
    add("axis-3of4", (3, 17, 4, 33), FLOATS, {Tag.TEST, Tag.EDGE}, axis=-3)
    add("no_rows", (0, 64), FLOATS, {Tag.TEST, Tag.EDGE, Tag.SIM})
    add("no_columns", (64, 0), FLOATS, {Tag.TEST, Tag.EDGE, Tag.SIM})
    # small enough for a simulator
    add("sim_rows", (5, 67), FLOATS, {Tag.SIM})
    add("sim_wide", (2, 600), FLOATS, {Tag.SIM})
    add("sim_aligned", (3, 512), FLOATS, {Tag.SIM})
    add("sim_ring", (3, 3072), ("float32", "bfloat16"), {Tag.SIM})
    add("sim_axis0", (40, 35), FLOATS, {Tag.SIM}, axis=0)
    # one of each kernel variant, for the offline compiler
    for columns in (128, 1024, 4096, 16384, 65536, 262144):
        add(f"columns{columns}", (1024, columns), half, {Tag.COMPILE})
    add("columns4096", (1024, 4096), ("float64", "float32", "float16"), {Tag.COMPILE})
    add("columns4097", (1024, 4097), FLOATS, {Tag.COMPILE})
    add("columns1048576", (1, 1048576), FLOATS, {Tag.COMPILE})
    add("strided", (128, 1024), FLOATS, {Tag.COMPILE}, axis=0)
    return tuple(cases)


def generate(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal logits, four times as wide as usual: a row has both large and vanishing probabilities."""
    arrays = standard_normal(spec, case, rng)
    return {name: (array * array.dtype.type(4)).astype(array.dtype) for name, array in arrays.items()}


def draw(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw any axis of one to five. The row length is drawn first, since kernels depend on it most."""
    rank = int(rng.integers(1, 6))
    axis = int(rng.integers(-rank, rank))
    shape, left = [1] * rank, max_elements
    for place in [axis % rank, *(place for place in range(rank) if place != axis % rank)]:
        shape[place] = random_size(rng, left)
        left = max(left // max(shape[place], 1), 1)
    return {"x": tuple(shape)}, {"axis": axis}


def gradient_terms(arrays: Mapping[str, np.ndarray], problem: Problem) -> dict[str, float]:
    """Terms of dx = y * (dy - dot): the largest |y| * (|dy| + sum |y * dy|) of a row whose values are finite."""
    y, dy = (np.abs(np.moveaxis(array.astype(np.float64), problem.axis, -1)) for array in arrays.values())
    with np.errstate(over="ignore", invalid="ignore"):
        terms = y * (dy + (y * dy).sum(axis=-1, keepdims=True))
    return {"dx": float(terms[np.isfinite(terms)].max(initial=0.0))}


SPEC = Spec(
    name="softmax",
    formula="y = exp(x - max(x)) / sum(exp(x - max(x)));  dx = y * (dy - sum(y * dy))",
    paper="Milakov & Gimelshein 2018, arXiv:1805.02867, Algorithm 3",
    inputs=(Input("x", None),),
    params=(Param("axis", -1, integer, "the axis that sums to 1"),),
    outputs=(Output("y", lambda p: p.arrays["x"].shape, lambda p: p.dtype, like="x"),),
    gradient_inputs=(Input("y", None), Input("dy", None)),
    gradients=(Output("dx", lambda p: p.arrays["y"].shape, lambda p: p.dtype, like="y"),),
    saved=("y",),
    measure=measure,
    forward_cost=Cost(
        flops=lambda p: 5 * _elements(p),
        bytes_read=lambda p: _elements(p) * p.itemsize,
        bytes_written=lambda p: _elements(p) * p.itemsize,
    ),
    backward_cost=Cost(
        flops=lambda p: 4 * _elements(p),
        bytes_read=lambda p: 2 * _elements(p) * p.itemsize,
        bytes_written=lambda p: _elements(p) * p.itemsize,
    ),
    rounding="y once, to the storage dtype; dx once; all else in float32 (float64 for float64)",
    floor=8.0,
    rungs=("naive", "simt", "sm90"),
    cases=_cases(),
    generate=generate,
    draw=draw,
    special_gradients=(np.nan, np.inf, 0.0),
    gradient_terms=gradient_terms,
)
