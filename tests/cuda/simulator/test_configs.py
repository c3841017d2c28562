"""softmax's kernels by Configs that the SIM cases are too small for: clusters, several rows a block, rings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.launch.step import flat
from dualops.cuda.rows import chunks, cluster, registers, reread
from dualops.cuda.rows.chunks import ChunksConfig
from dualops.cuda.rows.cluster import ClusterRowsConfig, share_of
from dualops.cuda.rows.operator import RowArrays, Rows
from dualops.cuda.rows.registers import RowsConfig
from dualops.cuda.rows.reread import LongRowsConfig
from dualops.cuda.softmax.operator import Softmax
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import Strided, itemsize
from tests.checks import check
from tests.problems import Layout

DIRECTIONS = ("forward", "backward")


def in_turns(configs: Sequence[Any], ways: Sequence[str] = DIRECTIONS) -> Any:
    """Each Config in each way and dtype, threads forward in one dtype and reversed in the other, by turns: the steps
    of a kernel are those of its Config, and `tests/wrong` has them in every order.
    """

    def params() -> Iterator[Any]:
        for number, (config, way) in enumerate(product(configs, ways)):
            for dtype, order in zip(("float64", "bfloat16"), ("forward", "reversed")[:: (-1) ** number], strict=True):
                yield pytest.param(order, config, way, dtype, id=f"{order}-{config}-{way}-{dtype}")

    return pytest.mark.parametrize(("order", "config", "way", "dtype"), list(params()), indirect=["order"])


def hold(
    shape: tuple[int, int], dtype: str, backward: bool, launch: Callable[..., None], aligned: bool, special: bool
) -> None:
    """Check what `launch(results and inputs by name, M, N, strides between their rows)` does.

    special: with NaN, infinities and extremes among the values.
    """

    names: list[str] = ["y", "dy"] if backward else ["x"]

    def run(*arrays: np.ndarray, out: np.ndarray) -> None:
        strides = [array.strides[0] // array.itemsize for array in (out, *arrays)]
        pointers = [flat(array, name) for name, array in zip(["out", *names], (out, *arrays), strict=True)]
        launch(pointers, *shape, strides)

    padded = Layout((0, 1), (0, 16 if aligned else 3), misalignment=0 if aligned else 1)
    check(
        OPERATORS["softmax"],
        Case("config", dtype, {"x": shape}, seed=shape[1]),
        run,
        backward=backward,
        layouts=dict.fromkeys(names, padded),
        out_layout=padded,
        special=special,
        ways=("given",),
    )


def arguments(pointers: list[Any], M: int, N: int, strides: list[int]) -> list[Any]:
    """The arguments (arrays, params, rows) of a kernel of rows."""
    y, *inputs = (Strided(x, (step,)) for x, step in zip(pointers, strides, strict=True))
    return [RowArrays(y, y, *inputs, *[y] * (2 - len(inputs))), (), Rows(M, N, (M,))]


def start(kernel: Kernel, blocks: int, args: list[Any], shared_bytes: int = 0) -> None:
    kernel[blocks, kernel.threads, 0, shared_bytes](*args)


@in_turns(
    [
        RowsConfig(32, 1, 3),
        RowsConfig(64, 1, 2),
        RowsConfig(128, 2, 1),
        RowsConfig(128, 1, 1, aligned=False),
        RowsConfig(32, 3, 2, aligned=False),
    ]
)
def test_rows(config, dtype, way, order):
    backward = way == "backward"
    vector = 16 // itemsize(dtype)
    longest = config.columns(dtype)
    kernel = registers.build(config, Softmax(dtype, backward))

    def launch(pointers, M, N, strides):
        start(kernel, -(-M // config.rows), arguments(pointers, M, N, strides))

    for columns in (longest, longest // 2 + vector, vector):
        hold((config.rows + 1, columns), dtype, backward, launch, config.aligned, special=order == "reversed")


@in_turns([LongRowsConfig(64, 2), LongRowsConfig(128, 1, aligned=False)])
def test_long_rows(config, dtype, way, order):
    backward = way == "backward"
    kernel = reread.build(config, Softmax(dtype, backward))

    def launch(pointers, M, N, strides):
        start(kernel, M, arguments(pointers, M, N, strides))

    for columns in (8, 1600, 1608):
        hold((2, columns), dtype, backward, launch, config.aligned, special=order == "reversed")


@in_turns(
    [
        ChunksConfig(warps=1, vectors=1, stages=3, cluster=1, chunks=2),
        ChunksConfig(warps=2, vectors=1, stages=4, cluster=1, chunks=3),
        ChunksConfig(warps=1, vectors=2, stages=3, cluster=2, chunks=1),
        ChunksConfig(warps=2, vectors=1, stages=2, cluster=4, chunks=1),
        ChunksConfig(warps=1, vectors=1, stages=2, cluster=16, chunks=1),
    ]
)
def test_ring(config, way, dtype, order):
    """Fewer clusters than rows: each takes one row after another, and the ring runs ahead of the row."""
    backward = way == "backward"
    kernel = chunks.build(config, Softmax(dtype, backward))

    def launch(pointers, M, N, strides):
        blocks, share = min(M, 2) * config.cluster, share_of(N, config.cluster, N, dtype)
        shared_bytes = config.staged(dtype, 2 if backward else 1).nbytes
        start(kernel, blocks, [*arguments(pointers, M, N, strides), share], shared_bytes)

    longest = config.kept(dtype)
    more = longest + config.cluster * config.chunk(dtype), 3 * longest - 8  # than is kept
    for columns in (longest, longest - 8, 8, *more):
        hold((5, columns), dtype, backward, launch, aligned=True, special=order == "reversed")


@in_turns([ClusterRowsConfig(64, 2, 2), ClusterRowsConfig(32, 4, 4), ClusterRowsConfig(32, 1, 16)])
def test_cluster_rows(config, way, dtype, order):
    """A row that fills every block, one that is shorter, and one that leaves all but the first nothing."""
    backward = way == "backward"

    def launch(pointers, M, N, strides):
        share = share_of(N, config.cluster, config.columns(dtype), dtype)
        kernel = cluster.build(config, Softmax(dtype, backward))
        start(kernel, M * config.cluster, [*arguments(pointers, M, N, strides), share])

    longest = config.cluster * config.columns(dtype)
    for columns in (longest, longest - 8, 8):
        hold((3, columns), dtype, backward, launch, aligned=True, special=order == "reversed")


def test_a_config_has_one_kernel_a_dtype():
    config = RowsConfig(32, 1, 4)
    first = registers.build(config, Softmax("float32"))
    assert registers.build(replace(config), Softmax("float32")) is first
    assert registers.build(replace(config, rows=2), Softmax("float32")) is not first
    assert registers.build(config, Softmax("float64")) is not first
    assert "RowsConfig(row_threads=32" in first.identity and "'float32'" in first.identity


@pytest.mark.parametrize("backward", [False, True], ids=DIRECTIONS)
def test_many_small_terms_along_a_strided_axis_are_not_lost(backward):
    """1, and thousands of 2**-28: a plain float32 sum would lose batches of them, each less than half a last bit."""
    N = 8192
    terms = np.full((N, 2), 2.0**-28, np.float32)
    terms[0] = 1
    total = 1 + (N - 1) * 2.0**-28
    if backward:
        dx = dualops.cuda.softmax_backward(np.ones_like(terms), terms, 0, kernel="simt")
        found = terms[1:] - dx[1:]
    else:
        found = 1 / dualops.cuda.softmax(np.log(terms), 0, kernel="simt")[0]
    assert np.abs(found / total - 1).max() < 4 * np.finfo(np.float32).eps
