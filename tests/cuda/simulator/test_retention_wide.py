"""Retention's sm90 rung where heads are wide: slices of V's columns, keys in halves, segments, what nobody may see."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.retention import sm90
from dualops.spec import Case, retention as SPEC
from dualops.spec.retention_cases import options_of
from tests.checks import check
from tests.cuda.configs import changed
from tests.cuda.simulator.test_retention_sm90 import STATES, gradient, held, numbers, run


@pytest.mark.parametrize(
    ("q", "Dv", "options"),
    [
        ((1, 1, 70, 16), 136, {**STATES, "gamma": 1}),
        ((1, 2, 130, 200), 72, {}),
        ((1, 1, 64, 256), 8, {"return_state": True, "scale": -0.7}),
    ],
)
def test_slices_of_columns(q, Dv, options):
    """One, or two, of which the second has a few columns; chunks that are whole, and not."""
    shapes, params = options_of(q, Dv, **options)
    check(SPEC, Case("sm90", "bfloat16", shapes, params), run, ways=("given",))


@pytest.mark.parametrize(
    ("q", "Dv", "options"),
    [((1, 1, 70, 136), 40, STATES), ((1, 1, 66, 8), 264, {"states": 1, "gamma": 1}), ((1, 1, 10, 136), 264, {})],
)
def test_gradients(q, Dv, options):
    """Where Dv is more than 256 two warpgroups have half of the keys each."""
    shapes, params = options_of(q, Dv, **options)
    check(SPEC, Case("sm90", "bfloat16", shapes, params), gradient, backward=True, ways=("given",))


@pytest.mark.parametrize(("function", "Dv"), [(run, 136), (gradient, 264)])
def test_segments(function, Dv):
    """The last one has a few tokens."""
    shapes, params = options_of((1, 1, 142, 8), Dv, **STATES, gamma=1)
    with changed("retention", (sm90, {"segments_of": lambda *_: 2})):
        check(SPEC, Case("sm90", "bfloat16", shapes, params), function, backward=function is gradient, ways=("given",))


def test_no_token_reaches_one_before_it():
    """In the second slice too, whose columns are others of V's."""
    q, k, v = numbers(1, 1, 70, 8, seed=0), numbers(1, 1, 70, 8, seed=1), numbers(1, 1, 70, 200, seed=2)
    v[0, 0, 50, [5, 190]] = k[0, 0, 67] = np.inf
    held(run(q, k, v), reference.retention(*(x.astype(np.float64) for x in (q, k, v))), reference.retention(q, k, v))


def test_no_gradient_reaches_a_token_that_is_not_seen():
    """Of halves of keys the sum is made anew: dk's, which sees the tokens of its own and those behind them."""
    q, k, v, do = (numbers(1, 1, 40, width, seed=seed) for seed, width in enumerate((8, 8, 264, 264)))
    q[0, 0, 12, 5] = np.nan
    truth = reference.retention_backward(*(x.astype(np.float64) for x in (q, k, v, do)))
    held(gradient(q, k, v, do)[1], truth[1], reference.retention_backward(q, k, v, do)[1])


def test_tokens_first():
    """[B, S, H, D] in memory: the same bits."""
    arrays = [numbers(1, 20, 2, width, seed=seed).transpose(0, 2, 1, 3) for seed, width in enumerate((16, 16, 264))]
    assert np.array_equal(run(*arrays), run(*map(np.ascontiguousarray, arrays)))


@pytest.mark.parametrize(
    ("shape", "Dv", "forward", "backward"),
    [
        ((2, 8, 8192, 256), 512, (2, [64, 8192, 128]), (1, [64, 64, 64])),  # two, or three passes at once
        ((1, 4, 8192, 256), 512, (8, [112, 2048, 128]), (8, [112, 2048, 128] * 3)),
        ((4, 8, 2048, 256), 256, (2, [64, 8192, 128]), (1, [64, 64, 64])),
        ((4, 16, 2048, 64), 264, (1, [192]), (1, [64, 192, 64])),
    ],
)
def test_blocks(shape, Dv, forward, backward):
    """A block for each slice, and for each segment of it; of the gradient dq, dv and dk."""
    q, v = np.empty(shape, ml_dtypes.bfloat16), np.empty((*shape[:3], Dv), ml_dtypes.bfloat16)
    plans = dualops.cuda.plan("retention", q, q, v), dualops.cuda.plan("retention", q, q, v, do=v, backward=True)
    for plan, (segments, blocks) in zip(plans, (forward, backward), strict=True):
        config: Any = plan.choice.config
        assert plan.choice.rung == "sm90" and config.segments == segments
        assert [step.grid[0] for step in plan.steps] == blocks
