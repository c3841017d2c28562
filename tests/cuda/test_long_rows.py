"""Which Config rows of so many bytes take: no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest

import dualops.cuda  # noqa: F401  registers the operations
from dualops.cuda.device import known
from dualops.cuda.launch import OPERATIONS, Choice
from dualops.cuda.offline import absent_problem
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import itemsize

KIB = (128, 256, 512, 1024, 2048)
VECTORS = {"softmax": (), "rms_norm": ("w",), "layer_norm": ("w", "b")}


def chosen(operator: str, backward: bool, kib: int, dtype: str) -> Choice:
    N = kib * 1024 // itemsize(dtype)
    case = Case("long", dtype, {"x": (264, N), **dict.fromkeys(VECTORS[operator], (N,))})
    problem, operation = absent_problem(OPERATORS[operator], case, backward), OPERATIONS[operator][backward]
    return operation.choose(problem, problem.outputs(operation.outputs), known("sm_90a"))


def blocks(config: Any) -> tuple[int, int] | int:
    """Of a cluster, and of an SM; 0 of rows that are read again."""
    return (config.cluster, config.min_blocks) if hasattr(config, "cluster") else 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_clusters_by_bytes_of_a_row(dtype):
    def of(operator: str, backward: bool = False) -> list[tuple[int, int] | int]:
        return [blocks(chosen(operator, backward, kib, dtype).config) for kib in KIB]

    assert of("softmax") == [(2, 1), (8, 6), (16, 6), (8, 1), (16, 2)]
    assert of("softmax", True) == [(2, 1), (4, 1), (8, 1), (16, 1), (16, 1)]
    assert of("rms_norm") == [(4, 1), (8, 1), (16, 1), (16 if dtype == "float32" else 8, 1), (16, 1)]
    assert of("rms_norm", True) == [(8, 1), (16, 1), (16, 1), 0, 0]
    assert of("layer_norm") == [(8, 2), (8, 1), (16, 1), (8, 1), (16, 2)]
    assert of("layer_norm", True) == [(8, 1), (16, 1), 0, 0, 0]


@pytest.mark.parametrize(("kib", "kept"), [(1024, 13), (2048, 6), (4096, 12)])
def test_two_blocks_an_sm_keep_less_of_what_l2_holds(kib, kept):
    assert chosen("layer_norm", False, kib, "float32").config.kept == kept


def test_16_bit_rows_with_two_gradients_of_weights_do_not_overlap_where_512_threads_do():
    assert chosen("layer_norm", True, 64, "float32").config.overlap
    assert not chosen("layer_norm", True, 64, "bfloat16").config.overlap
    assert chosen("rms_norm", True, 64, "bfloat16").config.overlap
