"""What retention's rungs on tensor cores have in common: what no token may reach, and a head that forgets at once."""

import numpy as np
import pytest

from tests.cuda.configs import changed
from tests.cuda.retention import SMALL, calls_of, expected, held, numbers

# tokens of more than a chunk, and the Config with such chunks
RUNGS = {"sm80": (100, (SMALL,)), "sm90": (140, ())}
every_rung = pytest.mark.parametrize("rung", RUNGS)


@every_rung
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_token_reaches_one_before_it(value, steps, rung):
    (S, changes), (run, _) = RUNGS[rung], calls_of(rung)
    arrays = [numbers(1, 1, S, 8, seed=seed) for seed in range(3)]
    arrays[2][0, 0, 30, 5] = arrays[1][0, 0, S - 7] = value
    given = {"log_decay": -np.random.default_rng(3).random((1, 1, S), np.float32)} if steps else {}
    with changed("retention", *changes):
        held(run(*arrays, **given), *next(expected(arrays, **given)))


@every_rung
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_gradient_reaches_a_token_that_is_not_seen(value, rung):
    """To dk and dv none comes from a token before, to dq none from one behind."""
    (S, changes), (_, gradient) = RUNGS[rung], calls_of(rung)
    q, k, v, do = (numbers(1, 1, S, 8, seed=seed) for seed in range(4))
    q[0, 0, 30, 5] = do[0, 0, 20, 3] = v[0, 0, S - 7, 1] = value
    with changed("retention", *changes):
        for found, each in zip(gradient(q, k, v, do), expected((q, k, v, do)), strict=True):
            held(found, *each)


@every_rung
def test_a_gradient_of_a_head_that_forgets_at_once(rung):
    """Of this draw dq and dk are beyond the rule where nothing is added of what rounding takes from P."""
    arrays, logs = [numbers(1, 1, 64, 16, seed=100 + n) for n in range(4)], np.full((1, 1, 64), -4.0, np.float32)
    *found, _ = calls_of(rung)[1](*arrays, log_decay=logs)
    for result, each in zip(found, expected(arrays, log_decay=logs)):
        held(result, *each)
