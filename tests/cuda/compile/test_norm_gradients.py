"""Rings that no COMPILE case takes, built: those of Hoppers with fast memory."""

from __future__ import annotations

from typing import Any

import pytest

import dualops.cuda  # noqa: F401  registers the operations
from dualops.cuda.compile import binary
from dualops.cuda.device import known
from dualops.cuda.launch import OPERATIONS
from dualops.cuda.norm.gradient_configs import FAST
from dualops.cuda.offline import absent_problem
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import itemsize

H200 = known("sm_90a")
VECTORS = {"rms_norm": ("w",), "layer_norm": ("w", "b")}
# by how many axes they have, which are permuted, so that they do not become one
ROWS, ORDERS = {1: (300,), 3: (2, 5, 30)}, {1: (0, 1), 3: (2, 1, 0, 3)}
CASES = [
    *(("rms_norm", vectors, "bfloat16", axes) for vectors in FAST[False] for axes in ROWS),
    *(("layer_norm", vectors, "bfloat16", 1) for vectors in FAST[True]),
    ("layer_norm", 4096, "float32", 1),
]


@pytest.mark.parametrize(("operator", "vectors", "dtype", "axes"), CASES)
def test_they_spill_no_registers(operator: str, vectors: int, dtype: str, axes: int):
    N = vectors * (16 // itemsize(dtype))
    shapes: dict[str, Any] = {"x": (*ROWS[axes], N), **dict.fromkeys(VECTORS[operator], (N,))}
    case = Case("rows", dtype, shapes, dtypes=dict.fromkeys(VECTORS[operator], dtype), orders={"x": ORDERS[axes]})
    problem = absent_problem(OPERATORS[operator], case, True)
    operation = OPERATIONS[operator][True]
    step = operation.choose(problem, problem.outputs(operation.outputs), H200).steps()[0]
    report = binary(step.kernel, H200.arch, step.shared_bytes).report
    assert report.allowed and not report.spill_bytes, report
