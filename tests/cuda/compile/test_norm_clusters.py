"""Clusters of rms_norm that no COMPILE case takes, built: each with one block more on an SM spilled registers."""

from __future__ import annotations

from typing import Any

import pytest

import dualops.cuda  # noqa: F401  registers the operations
from dualops.cuda.compiler.binaries import binary
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.device import known
from dualops.cuda.launch.operation import OPERATIONS
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import itemsize

H200, THREADS = known("sm_90a"), 256
# by how many axes rows lie along: of two they are permuted, so that they do not become one
ROWS, ORDERS = {1: (300,), 2: (5, 30)}, {1: (0, 1), 2: (1, 0, 2)}
BUILDS = [  # dtype, axes, w, residual, rstd; blocks of a cluster, vectors of a thread; blocks of an SM
    ("bfloat16", 1, False, False, False, 16, 7, 2),
    ("bfloat16", 1, True, False, False, 16, 16, 1),
    ("bfloat16", 1, False, False, True, 16, 16, 1),
    ("float16", 1, True, False, True, 16, 16, 1),
    ("float16", 2, False, False, True, 16, 16, 1),
    ("float32", 2, False, False, False, 16, 12, 2),
    ("float32", 2, True, True, True, 8, 4, 3),
    ("float64", 2, True, False, True, 16, 12, 1),
]


@pytest.mark.parametrize(("dtype", "axes", "w", "residual", "rstd", "cluster", "vectors", "blocks"), BUILDS)
def test_they_spill_no_registers(
    dtype: str, axes: int, w: bool, residual: bool, rstd: bool, cluster: int, vectors: int, blocks: int
):
    N = cluster * vectors * THREADS * (16 // itemsize(dtype))
    shapes: dict[str, Any] = {"x": (*ROWS[axes], N)}
    orders = {"x": ORDERS[axes]}
    if w:
        shapes["w"] = (N,)
    if residual:
        shapes["residual"], orders["residual"] = shapes["x"], orders["x"]
    case = Case("rows", dtype, shapes, {"return_rstd": rstd}, dtypes={"w": dtype} if w else {}, orders=orders)
    problem, operation = absent_problem(OPERATORS["rms_norm"], case), OPERATIONS["rms_norm"][False]
    choice = operation.choose(problem, problem.outputs(operation.outputs), H200)
    assert (choice.config.cluster, choice.config.vectors, choice.config.min_blocks) == (cluster, vectors, blocks)
    step = choice.steps()[0]
    report = binary(step.kernel, H200.arch, step.shared_bytes).report
    assert report.allowed and not report.spill_bytes, report
