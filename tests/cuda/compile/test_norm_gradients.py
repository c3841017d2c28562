"""Rings that no COMPILE case takes, built: those of Hoppers with fast memory."""

from __future__ import annotations

from typing import Any

import pytest

import dualops.cuda  # noqa: F401  registers the operations
from dualops.cuda.compile import binary
from dualops.cuda.device import known
from dualops.cuda.launch import OPERATIONS
from dualops.cuda.norm.gradient_configs import FAST, FAST_WITH_BOTH
from dualops.cuda.offline import absent_problem
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import itemsize

H200 = known("sm_90a")
WEIGHTS = {"rms_norm": "w", "layer_norm": "wb", "layer_norm without b": "w", "layer_norm with residual": "wb"}
# by how many axes they have, which are permuted, so that they do not become one
ROWS, ORDERS = {1: (300,), 3: (2, 5, 30)}, {1: (0, 1), 3: (2, 1, 0, 3)}
DTYPES = {True: "bfloat16", False: "float32"}
RMS = [("rms_norm", vectors, narrow, axes) for narrow in DTYPES for vectors in FAST[False, narrow] for axes in ROWS]
LAYER = [
    (operator, vectors, narrow, 1)
    for narrow in DTYPES
    for operator, taken in {
        "layer_norm": FAST[True, narrow] | FAST_WITH_BOTH[narrow, False],
        "layer_norm without b": FAST[True, narrow],
        "layer_norm with residual": FAST_WITH_BOTH.get((narrow, True), {}),
    }.items()
    for vectors in taken
]


@pytest.mark.parametrize(("operator", "vectors", "narrow", "axes"), [*RMS, *LAYER])
def test_they_spill_no_registers(operator: str, vectors: int, narrow: bool, axes: int):
    dtype = DTYPES[narrow]
    N = vectors * (16 // itemsize(dtype))
    weights = WEIGHTS[operator]
    shapes: dict[str, Any] = {"x": (*ROWS[axes], N), **dict.fromkeys(weights, (N,))}
    if operator == "layer_norm with residual":
        shapes["residual"] = shapes["x"]
    case = Case("rows", dtype, shapes, dtypes=dict.fromkeys(weights, dtype), orders={"x": ORDERS[axes]})
    name = operator.split()[0]
    problem = absent_problem(OPERATORS[name], case, True)
    operation = OPERATIONS[name][True]
    step = operation.choose(problem, problem.outputs(operation.outputs), H200).steps()[0]
    report = binary(step.kernel, H200.arch, step.shared_bytes).report
    assert report.allowed and not report.spill_bytes, report
