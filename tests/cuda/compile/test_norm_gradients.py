"""Rings that no COMPILE case takes, built: those of Hoppers with fast memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import dualops.cuda  # noqa: F401  registers the operations
from dualops.cuda.compiler.binaries import binary
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.device import known
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.norm.gradient_configs import FAST, FAST_WITH_BOTH
from dualops.cuda.norm.staging import RingConfig
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import itemsize

H200 = known("sm_90a")
WEIGHTS = {"rms_norm": "w", "layer_norm": "wb", "layer_norm without b": "w", "layer_norm with residual": "wb"}
# by how many axes they have, which are permuted, so that they do not become one
ROWS, ORDERS = {1: (300,), 3: (2, 5, 30)}, {1: (0, 1), 3: (2, 1, 0, 3)}
NARROW = {"bfloat16": True, "float32": False, "float64": False}  # whether it is of 16 bits
BUILDS = [
    ("rms_norm", dtype, axes, vectors, config)
    for dtype, narrow in NARROW.items()
    for axes in ROWS
    for vectors, config in FAST[False, narrow].items()
] + [
    (operator, dtype, 1, vectors, config)
    for dtype, narrow in NARROW.items()
    for operator, taken in {
        "layer_norm": FAST[True, narrow] | (FAST_WITH_BOTH[narrow, False] if dtype != "float64" else {}),
        "layer_norm without b": FAST[True, narrow],
        "layer_norm with residual": FAST_WITH_BOTH.get((narrow, True), {}),
    }.items()
    for vectors, config in taken.items()
]
# which take what an H100 does: dw, db and w have too few registers
BUILDS += [("layer_norm", "float64", 1, vectors, None) for vectors in FAST_WITH_BOTH[False, False]]


@pytest.mark.parametrize(("operator", "dtype", "axes", "vectors", "config"), BUILDS)
def test_they_spill_no_registers(operator: str, dtype: str, axes: int, vectors: int, config: RingConfig | None):
    N = vectors * (16 // itemsize(dtype))
    weights = WEIGHTS[operator]
    shapes: dict[str, Any] = {"x": (*ROWS[axes], N), **dict.fromkeys(weights, (N,))}
    if operator == "layer_norm with residual":
        shapes["residual"] = shapes["x"]
    case = Case("rows", dtype, shapes, dtypes=dict.fromkeys(weights, dtype), orders={"x": ORDERS[axes]})
    name = operator.split()[0]
    problem = absent_problem(OPERATORS[name], case, True)
    operation = OPERATIONS[name][True]
    choice = operation.choose(problem, problem.outputs(operation.outputs), H200)
    if config:
        assert replace(choice.config, stages=config.stages, w_shared=config.w_shared) == config
    step = choice.steps()[0]
    report = binary(step.kernel, H200.arch, step.shared_bytes).report
    assert report.allowed and not report.spill_bytes, report
