"""The gradient of matmul's bias, sums of columns: 16 bytes at a time and by elements, in a slab and in several."""

from typing import Any

import numpy as np
import pytest

from dualops.cuda.launch import device as devices
from dualops.cuda.launch.step import prepare
from dualops.cuda.matmul import gradient
from dualops.spec import OPERATORS, ArrayMeta, Case, Problem
from dualops.spec.meta import contiguous_strides
from tests.checks import check
from tests.problems import Layout

SPEC = OPERATORS["matmul"]
ONLY_BIAS = {"a_gradient": False, "b_gradient": False}


def absent(dtype: str, *shape: int, strides: tuple[int, ...] | None = None, pointer: int = 0) -> ArrayMeta:
    return ArrayMeta(shape, dtype, strides or contiguous_strides(shape), "cuda:0", pointer)


def problem_of(dy: ArrayMeta) -> Problem:
    """The gradient of the bias alone, of a product of one term."""
    *batch, M, N = dy.shape
    arrays = {"a": absent(dy.dtype, *batch, M, 1), "b": absent(dy.dtype, 1, N), "bias": absent(dy.dtype, N)}
    there = {name: meta._replace(device=dy.device) for name, meta in arrays.items()}
    return SPEC.bind_backward({**there, "dy": dy}, ONLY_BIAS)


def steps_of(dy: ArrayMeta) -> list[Any]:
    return gradient.column_sums_steps(problem_of(dy), absent(dy.dtype, dy.shape[-1]))


def read_wide(steps: list[Any]) -> list[bool]:
    return ["aligned=True" in step.kernel.identity for step in steps]


def launch(dy: np.ndarray, dbias: np.ndarray) -> None:
    """What the gradient's public function launches; what is between launches is NaN until it is written."""
    given = {"dy": dy, "dbias": dbias}
    metas = {name: ArrayMeta.of_numpy(array) for name, array in given.items()}
    problem = problem_of(metas["dy"])
    for name, meta in gradient.partial_sums(problem).items():
        given[name] = np.full(meta.shape, np.nan, meta.dtype)
        metas[name] = ArrayMeta.of_numpy(given[name])
    for step in gradient.column_sums_steps(problem, metas["dbias"]):
        prepare(step, list(given), devices.current())(list(given.values()))


def sums(dy: np.ndarray) -> np.ndarray:
    launch(dy, dbias := np.full(dy.shape[-1], np.nan, dy.dtype))
    return dbias


DENSE, PADDED = Layout((0, 1), (0, 0)), Layout((0, 1), (0, 8))
# rows, columns: 128 rows a slab, the last of fewer; more columns than a block has, the last block's of fewer
PLACES = {
    "bfloat16": ("bfloat16", (277, 264), DENSE, True),
    "float32": ("float32", (150, 132), DENSE, True),
    "float64": ("float64", (139, 130), DENSE, True),
    "a block's columns": ("float64", (131, 64), DENSE, True),
    "padded rows": ("float16", (131, 40), PADDED, True),
    "a row more than a slab": ("bfloat16", (129, 8), DENSE, True),
    "a slab": ("bfloat16", (128, 8), DENSE, True),
    "a row": ("float32", (1, 4), DENSE, True),
    "the same row again and again": ("bfloat16", (130, 16), Layout((0, 1), (0, 0), 1, frozenset({0})), True),
    "ragged columns": ("bfloat16", (131, 33), DENSE, False),
    "ragged rows": ("float32", (131, 40), Layout((0, 1), (0, 3)), False),
    "shifted": ("bfloat16", (130, 40), Layout((0, 1), (0, 8), misalignment=1), False),
    "columns apart": ("float64", (67, 34), Layout((0, 1), (0, 0), step=2), False),
    "columns first": ("float32", (136, 36), Layout((1, 0), (0, 0)), False),
}


@pytest.mark.parametrize("name", PLACES)
def test_sums(name, order):
    dtype, (M, N), layout, wide = PLACES[name]

    def run(a, b, dy, *, bias, out, **params):
        assert read_wide(steps_of(ArrayMeta.of_numpy(dy))) == ([wide, False] if M > 128 else [wide])
        launch(dy, out)

    case = Case(name, dtype, {"a": (M, 1), "b": (1, N), "bias": (N,)})
    check(SPEC, case, run, backward=True, layouts={"dy": layout}, ways=("given",), extra=ONLY_BIAS)


@pytest.mark.parametrize(
    ("dy", "wide"),
    [
        (absent("bfloat16", 3, 40, 16), True),
        (absent("bfloat16", 3, 40, 16, strides=(16, 48, 1)), True),
        (absent("bfloat16", 3, 40, 16, strides=(0, 16, 1)), True),
        (absent("bfloat16", 3, 40, 16, strides=(644, 16, 1)), False),
        (absent("bfloat16", 3, 40, 16, strides=(640, 20, 1)), False),
        (absent("bfloat16", 3, 40, 16, strides=(640, 16, 0)), False),
        (absent("bfloat16", 3, 40, 16, pointer=8), False),
        (absent("float32", 3, 40, 16, pointer=48), True),
        (absent("bfloat16", 3, 40, 12, strides=(640, 16, 1)), False),
        (absent("float32", 3, 40, 12, strides=(640, 16, 1)), True),
    ],
)
def test_rows_are_read_wide_where_each_is_whole_vectors(dy, wide):
    assert read_wide(steps_of(dy)) == [wide]


@pytest.mark.parametrize("columns", [36, 35])
def test_sums_are_the_same_bits_wherever_rows_lie(columns, order):
    dense = np.random.default_rng(0).standard_normal((3, 50, columns)).astype("float32")
    found = sums(dense)
    np.testing.assert_allclose(found, dense.sum((0, 1), np.float64), rtol=1e-6, atol=1e-6)
    across = np.ascontiguousarray(dense.swapaxes(0, 1)).swapaxes(0, 1)
    for dy in (dense, across):
        assert sums(dy).tobytes() == found.tobytes()


def test_what_a_plain_sum_loses_is_kept():
    """Each of a thread's rows is half a unit in the last place of what it has by then, and would leave no trace."""
    dy = np.full((128, 4), 2.0**-24, "float32")
    dy[:8] = 1.0
    np.testing.assert_allclose(sums(dy), np.full(4, 8 + 120 * 2.0**-24), rtol=2.0**-23)


def test_the_result_may_be_strided():
    dy = np.random.default_rng(2).standard_normal((131, 8)).astype("float32")
    every_third = np.full(24, np.nan, "float32")
    launch(dy, every_third[::3])
    assert every_third[::3].tobytes() == sums(dy).tobytes()
    assert np.isnan(every_third.reshape(8, 3)[:, 1:]).all()


def test_a_nan_and_an_infinity_stay_in_their_columns(order):
    dy = np.ones((140, 16), "float32")
    dy[131, 3], dy[5, 7], dy[139, 8] = np.nan, np.inf, -np.inf
    expected = np.full(16, 140.0)
    expected[[3, 7, 8]] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(sums(dy), expected)


@pytest.mark.parametrize(
    ("dy", "slab", "blocks"),
    [
        (absent("bfloat16", 8192, 4096), 128, [64 * 16, 128]),
        (absent("bfloat16", 8192, 4104), 160, [52 * 17, 129]),
        (absent("bfloat16", 8192, 4097), 1024, [8 * 129, 129]),
        (absent("float32", 4, 2048, 4096), 256, [32 * 32, 128]),
        (absent("bfloat16", 1 << 20, 128), 1024, [1024, 4]),
        (absent("float64", 300, 1 << 17), 320, [2048]),  # columns enough for all blocks
        (absent("bfloat16", 128, 64), 128, [1]),
        (absent("bfloat16", 0, 64), 128, [1]),
    ],
)
def test_blocks_share_the_rows(dy, slab, blocks):
    problem, steps = problem_of(dy), steps_of(dy)
    rows = gradient.rows_of(problem)
    assert (rows.slab, [step.grid[0] for step in steps]) == (slab, blocks)
    between = [meta.shape for meta in gradient.partial_sums(problem).values()]
    assert between == [(rows.slabs, dy.shape[-1])] * (len(blocks) - 1)


def test_a_slab_of_several_rounds(order, monkeypatch):
    monkeypatch.setattr(gradient, "SUM_BLOCKS", 2)
    dy = np.random.default_rng(1).standard_normal((299, 8)).astype("float32")
    assert gradient.rows_of(problem_of(ArrayMeta.of_numpy(dy))).slab == 160
    np.testing.assert_allclose(sums(dy), dy.sum(0, np.float64), rtol=1e-6, atol=1e-6)
