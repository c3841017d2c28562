"""softmax's ladder, step by step: ragged rows in every dtype, NaN and infinities in a row, what a step does not do."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from dualops import cuda, reference
from dualops.cuda import simulator
from dualops.spec import OPERATORS, Case
from examples.ladder.softmax import STEPS, run_step
from tests.checks import check

every_step = pytest.mark.parametrize("name", STEPS)
# whole vectors, in few, in many and in all of the threads; the other steps get one element less
COLUMNS = {"float64": 8, "float32": 264, "float16": 1000, "bfloat16": 2048}
LONGEST = {"tree": 65536, "shuffles": 65536, "registers": 16384, "vectors": 16384}


@every_step
@pytest.mark.parametrize("dtype", COLUMNS)
def test_step(name, dtype, order):
    """Into another array in one order of threads; in place, special values among the others, in the reverse."""
    columns = COLUMNS[dtype] - (name != "vectors")
    other = order == "reversed"
    ways = ("in place",) if other else ("given",)
    case = Case("ladder", dtype, {"x": (2, columns)})
    check(OPERATORS["softmax"], case, partial(run_step, name), special=other, ways=ways)


@pytest.mark.parametrize(("name", "longest"), LONGEST.items())
def test_a_step_says_which_rows_it_does_not_do(name, longest):
    wide = 2 if name in ("registers", "vectors") else 1  # a float64 takes two registers
    for dtype, most in ((np.float32, longest), (np.float64, longest // wide)):
        assert cuda.plan("softmax_ladder", np.zeros((1, most), dtype), kernel=name).choice.rung == name
        with pytest.raises(NotImplementedError, match=f"softmax_ladder: rung {name} does not do .*N={most + 8}"):
            run_step(name, np.zeros((1, most + 8), dtype))


def test_vectors_must_be_whole_and_aligned():
    flat = np.zeros(65, ml_dtypes.bfloat16)
    start = -(flat.ctypes.data // 2) % 8
    assert cuda.plan("softmax_ladder", flat[start : start + 16].reshape(2, 8), kernel="vectors").steps
    for wrong in (flat[start : start + 24].reshape(2, 12), flat[start + 1 : start + 17].reshape(2, 8)):
        with pytest.raises(NotImplementedError, match="rung vectors does not do"):
            run_step("vectors", wrong)


def test_a_tree_without_its_barriers_is_found_out(monkeypatch):
    """The barriers of the steps are needed: in one order of threads or the other the result is wrong without them."""
    x = np.random.default_rng(0).standard_normal((1, 600), np.float32)
    monkeypatch.setattr(type(simulator.cuda), "syncthreads", lambda self: None)
    for name in ("tree", "shuffles"):
        wrong = []
        for order in ("forward", "reversed"):
            with simulator.order(order):
                wrong.append(not np.allclose(run_step(name, x), reference.softmax(x), atol=1e-6))
        assert any(wrong), name
