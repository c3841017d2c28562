"""Retention's sm90 rung for wide heads: what no token may reach, layouts, blocks. Calls are in the table."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from tests.cuda.retention import calls_of, expected, held, numbers

run, gradient = calls_of("sm90")


def test_no_token_reaches_one_before_it():
    """In the second slice too, whose columns are others of V's."""
    q, k, v = numbers(1, 1, 70, 8, seed=0), numbers(1, 1, 70, 8, seed=1), numbers(1, 1, 70, 200, seed=2)
    v[0, 0, 50, [5, 190]] = k[0, 0, 67] = np.inf
    held(run(q, k, v), *next(expected((q, k, v))))


def test_no_gradient_reaches_a_token_that_is_not_seen():
    """Of halves of keys the sum is recomputed: dk's, which sees the tokens of its own and those behind them."""
    q, k, v, do = (numbers(1, 1, 40, width, seed=seed) for seed, width in enumerate((8, 8, 264, 264)))
    q[0, 0, 12, 5] = np.nan
    held(gradient(q, k, v, do)[1], *list(expected((q, k, v, do)))[1])


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
