"""Clusters and rings of norms that no COMPILE case takes, built: on Hoppers with fast memory none spills registers."""

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

H200, THREADS = known("sm_90a"), 256
# by how many axes rows lie along, which are permuted, so that they do not become one
ROWS, ORDERS = {1: (300,), 2: (5, 30), 3: (2, 5, 30)}, {1: (0, 1), 2: (1, 0, 2), 3: (2, 1, 0, 3)}


def built(
    operator: str, dtype: str, axes: int, N: int, weights: str, residual: bool, *, backward: bool = False, **params: Any
) -> Any:
    """The Config of a call on rows of N elements, whose kernel spills no register."""
    x, order = (*ROWS[axes], N), ORDERS[axes]
    shapes: dict[str, Any] = {"x": x, **dict.fromkeys(weights, (N,)), **({"residual": x} if residual else {})}
    orders: dict[str, Any] = dict.fromkeys(("x", "residual") if residual and not backward else ("x",), order)
    case = Case("rows", dtype, shapes, params, dtypes=dict.fromkeys(weights, dtype), orders=orders)
    problem, operation = absent_problem(OPERATORS[operator], case, backward), OPERATIONS[operator][backward]
    choice = operation.choose(problem, problem.outputs(operation.outputs), H200)
    step = choice.steps()[0]
    report = binary(step.kernel, H200.arch, step.shared_bytes).report
    assert report.allowed and not report.spill_bytes, report
    return choice.config


# dtype, axes, weights, residual, rstd; blocks of a cluster, vectors of a thread, blocks of an SM: with one more of
# these registers would be spilled
CLUSTERS = [
    ("bfloat16", 1, "", False, False, 16, 7, 2),
    ("bfloat16", 1, "w", False, False, 16, 16, 1),
    ("bfloat16", 1, "", False, True, 16, 16, 1),
    ("float16", 1, "w", False, True, 16, 16, 1),
    ("float16", 2, "", False, True, 16, 16, 1),
    ("float16", 2, "w", False, False, 16, 10, 1),
    ("float16", 2, "w", False, False, 16, 11, 1),
    ("float32", 1, "w", False, True, 16, 10, 2),
    ("float32", 2, "", False, False, 16, 12, 2),
    ("float32", 2, "w", True, True, 8, 4, 3),
    ("float64", 2, "w", False, True, 16, 12, 1),
]


@pytest.mark.parametrize(("dtype", "axes", "weights", "residual", "rstd", "cluster", "vectors", "blocks"), CLUSTERS)
def test_clusters(
    dtype: str, axes: int, weights: str, residual: bool, rstd: bool, cluster: int, vectors: int, blocks: int
):
    N = cluster * vectors * THREADS * (16 // itemsize(dtype))
    config = built("rms_norm", dtype, axes, N, weights, residual, return_rstd=rstd)
    assert (config.cluster, config.vectors, config.min_blocks) == (cluster, vectors, blocks)


WEIGHTS = {"rms_norm": "w", "layer_norm": "wb", "layer_norm without b": "w", "layer_norm with residual": "wb"}
NARROW = {"bfloat16": True, "float32": False, "float64": False}  # whether it is of 16 bits
RINGS: list[tuple[str, str, int, int, RingConfig | None]] = [
    ("rms_norm", dtype, axes, vectors, config)
    for dtype, narrow in NARROW.items()
    for axes in (1, 3)
    for vectors, config in FAST[False, narrow].items()
]
RINGS += [
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
RINGS += [("layer_norm", "float64", 1, vectors, None) for vectors in FAST_WITH_BOTH[False, False]]


@pytest.mark.parametrize(("operator", "dtype", "axes", "vectors", "config"), RINGS)
def test_rings_of_gradients(operator: str, dtype: str, axes: int, vectors: int, config: RingConfig | None):
    N, residual = vectors * (16 // itemsize(dtype)), "residual" in operator
    found = built(operator.split()[0], dtype, axes, N, WEIGHTS[operator], residual, backward=True)
    if config:
        assert replace(found, stages=config.stages, w_shared=config.w_shared) == config
