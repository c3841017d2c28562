"""Users' functions on arrays: the same numbers as one by one, whether they take arrays or not."""

import math
from functools import partial

import numpy as np
import pytest

from dualops.reference._functions import elementwise
from dualops.spec.attention.function import UserFunction
from tests.user_functions import MASK, MASK_MODS, SCORE, SCORE_MODS

# as in attention: [B, H, Sq, Sk], [B, 1, 1, 1], [H, 1, 1], [Sq, 1], [Sk]
SHAPE = (2, 2, 6, 5)
PLACES = (np.arange(2)[:, None, None, None], np.arange(2)[:, None, None], np.arange(6)[:, None], np.arange(5))
SCORES = np.random.default_rng(0).uniform(0.1, 0.9, SHAPE)
NUMBER = partial(np.asarray, dtype=np.float64)
USERS = {name: UserFunction(function, SCORE) for name, function in SCORE_MODS.items()}
USERS |= {f"{name}_slope": user.derivative for name, user in USERS.items()}

pytestmark = pytest.mark.filterwarnings("error")


def one_by_one(user: UserFunction, *arrays: np.ndarray) -> np.ndarray:
    rows = zip(*(array.ravel() for array in np.broadcast_arrays(*arrays)), strict=True)
    return np.array([user.function(*row) for row in rows]).reshape(SHAPE)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", USERS)
def test_scores(name, dtype):
    user, scores = USERS[name], SCORES.astype(dtype)
    found = elementwise(user, partial(np.asarray, dtype=dtype))(scores, *PLACES)
    assert found.shape == SHAPE and found.dtype == dtype
    expected = one_by_one(user, scores, *PLACES)
    # float32 arithmetic on values of one magnitude: some dozens of roundings
    np.testing.assert_allclose(found, expected, rtol=64 * np.finfo(dtype).eps, atol=64 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", MASK_MODS)
def test_masks(name):
    user = UserFunction(MASK_MODS[name], MASK)
    found = elementwise(user, partial(np.asarray, dtype=np.float32))(*PLACES)
    assert found.shape == SHAPE and found.dtype == bool
    np.testing.assert_array_equal(found, one_by_one(user, *PLACES))


def calls(function, names=SCORE, scores=SCORES):
    """How often a function is called for all scores."""
    count = 0

    def counted(*args):
        nonlocal count
        count += 1
        return function(*args)

    user = UserFunction(function, names)
    user.function = counted
    on_arrays = elementwise(user, NUMBER)
    count = 0
    result = on_arrays(*([scores] if names is SCORE else []), *PLACES)
    return count, result


def test_a_function_that_takes_arrays_is_called_once():
    assert calls(lambda score, b, h, i, j: score * 2 - np.tanh(score) * abs(i - j))[0] == 1
    assert calls(MASK_MODS["causal"], MASK)[0] == 1
    assert calls(SCORE_MODS["branches"])[0] == SCORES.size
    assert calls(SCORE_MODS["softcap"])[0] == SCORES.size


def test_a_branch_on_an_array_of_one_element_decides_for_that_element_alone():
    user = UserFunction(lambda score, b, h, i, j: score if i > 1 else -score, SCORE)
    scores = np.full((1, 1, 4, 1), 2.0)
    found = elementwise(user, NUMBER)(scores, *(np.zeros(1, int), np.zeros(1, int), np.arange(4)[:, None], np.zeros(1)))
    assert found.ravel().tolist() == [-2, -2, 2, 2]


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, i, j: np.max(score),
        lambda score, b, h, i, j: score - np.mean(score),
        lambda score, b, h, i, j: np.sort(np.atleast_1d(score))[0],
    ],
)
def test_what_means_something_else_on_arrays_is_called_one_by_one(function):
    count, found = calls(function)
    assert count == SCORES.size
    np.testing.assert_array_equal(
        found, [[[[function(x, 0, 0, 0, 0) for x in c] for c in b] for b in a] for a in SCORES]
    )


def test_numbers_are_numpys_where_a_function_is_called_one_by_one():
    seen = set()

    def watched(*args):
        seen.add(tuple(map(type, args)))
        return SCORE_MODS["branches"](*args)

    user = UserFunction(SCORE_MODS["branches"], SCORE)
    user.function = watched  # type: ignore[assignment]
    on_arrays = elementwise(user, partial(np.asarray, dtype=np.float32))
    seen.clear()
    on_arrays(SCORES.astype(np.float32), *PLACES)
    assert seen == {(np.float32, *[np.int64] * 4)}


def test_overflow_and_division_by_zero_are_infinite_without_a_warning():
    scores = np.full(SHAPE, 1e3)
    for function in (
        lambda score, b, h, i, j: np.exp(score) + np.where(score > 0, score, np.log(score)),
        lambda score, b, h, i, j: score / (score * 0) if i >= 0 else score,
    ):
        assert (calls(function, scores=scores)[1] == np.inf).all()


def test_errors_of_the_function_come_through():
    user = UserFunction(lambda score, b, h, i, j: math.exp(score), SCORE)
    with pytest.raises(OverflowError):
        elementwise(user, NUMBER)(np.full(SHAPE, 1e3), *PLACES)


def test_empty_arrays():
    for name in ("integers", "branches"):
        found = elementwise(USERS[name], partial(np.asarray, dtype=np.float32))(
            np.zeros((2, 2, 6, 0), np.float32), *PLACES[:3], np.arange(0)
        )
        assert found.shape == (2, 2, 6, 0) and found.dtype == np.float32
