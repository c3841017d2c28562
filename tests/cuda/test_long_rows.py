"""Which Config rows of a given number of bytes take: no GPU is needed."""

from typing import Any

import pytest

import dualops.cuda  # noqa: F401  registers the operations
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.device import known
from dualops.cuda.launch.operation import OPERATIONS, Choice
from dualops.cuda.rows.reread import LongRowsConfig
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import itemsize

KIB = (128, 256, 512, 1024, 2048)
VECTORS = {"softmax": (), "rms_norm": ("w",), "layer_norm": ("w", "b")}


def chosen(operator: str, backward: bool, kib: int, dtype: str, narrow: bool = False) -> Choice:
    """Of weights of float32, or if narrow of dtype."""
    N, vectors = kib * 1024 // itemsize(dtype), VECTORS[operator]
    dtypes = dict.fromkeys(vectors, dtype) if narrow else {}
    case = Case("long", dtype, {"x": (264, N), **dict.fromkeys(vectors, (N,))}, dtypes=dtypes)
    problem, operation = absent_problem(OPERATORS[operator], case, backward), OPERATIONS[operator][backward]
    return operation.choose(problem, problem.outputs(operation.outputs), known("sm_90a"))


def blocks(config: Any) -> tuple[int, int] | int:
    """Of a cluster, and of an SM; 0 of rows that are read again."""
    return (config.cluster, config.min_blocks) if hasattr(config, "cluster") else 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_clusters_by_bytes_of_a_row(dtype):
    def of(operator: str, backward: bool = False) -> list[tuple[int, int] | int]:
        return [blocks(chosen(operator, backward, kib, dtype).config) for kib in KIB]

    assert of("softmax") == [(4, 4), (8, 4), (16, 4), (16, 2), (16, 2)]
    assert of("softmax", True) == [(8, 3), (16, 3), (16, 2), (16, 1), (16, 1)]
    wide = dtype == "bfloat16"  # as weights are float32
    rings, clusters = [(4, 1), (8, 1), (16, 1), 0, 0], [(8, 3), (16, 3), (16, 3), (16, 2), 0]
    assert of("rms_norm") == (rings if wide else clusters)
    assert of("rms_norm", True) == [(8, 1), (16, 1), (16, 1), 0, 0]
    assert of("layer_norm") == ([(8, 2), (8, 1), (16, 1), 0, 0] if wide else [(8, 4), (16, 4), (16, 1), 0, 0])
    assert of("layer_norm", True) == [(8, 1), (16, 1), 0, 0, 0]


@pytest.mark.parametrize(
    ("operator", "backward", "kib", "expected"),
    [
        ("layer_norm", False, 33, (2, 5, 3)),
        ("layer_norm", False, 96, (4, 6, 3)),
        ("layer_norm", False, 97, (8, 4, 4)),
        ("layer_norm", False, 384, (16, 6, 3)),
        ("rms_norm", False, 97, (8, 4, 3)),
        ("rms_norm", False, 800, (16, 13, 2)),
        ("softmax", True, 48, (2, 6, 3)),
        ("softmax", True, 49, (4, 4, 3)),
        ("softmax", True, 400, (16, 7, 2)),
    ],
)
def test_other_rows_take_the_smallest_cluster_that_holds_them_in_few_vectors(operator, backward, kib, expected):
    config = chosen(operator, backward, kib, "bfloat16", narrow=True).config
    assert (config.cluster, config.vectors, config.min_blocks) == expected


@pytest.mark.parametrize(
    ("operator", "backward", "narrow", "longest"),
    [
        ("rms_norm", False, True, 1024),
        ("rms_norm", False, False, 512),
        ("rms_norm", True, True, 512),
        ("layer_norm", False, True, 512),
        ("layer_norm", False, False, 512),
        ("layer_norm", True, True, 256),
    ],
)
def test_rows_longer_than_a_cluster_holds_are_read_again(operator, backward, narrow, longest):
    assert chosen(operator, backward, longest, "bfloat16", narrow).rung == "sm90"
    for kib in (longest + 4, 4 * longest, 16384):
        again = chosen(operator, backward, kib, "bfloat16", narrow)
        assert (again.rung, again.config) == ("simt", LongRowsConfig(512, 2)), kib
