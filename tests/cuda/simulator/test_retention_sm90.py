"""Retention's sm90 rung and its gradient: the table of calls, decays, layouts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from dualops.spec import retention as SPEC
from tests.checks import check
from tests.cuda.configs import changed
from tests.cuda.retention import ROWS, WIDE_ROWS, calls_of, expected, held, numbers

run, gradient = calls_of("sm90")


@pytest.mark.parametrize("row", [*ROWS, *WIDE_ROWS], ids=str)
def test_each_row(row):
    """Under the accuracy rule."""
    with changed("retention", *row.changes):
        check(SPEC, row.case, gradient if row.backward else run, backward=row.backward, ways=("given",))


@pytest.mark.parametrize("least", [-0.001, -30.0, -1e30])
def test_steps_from_slow_to_sudden(least):
    """Of each eight of tokens some forget all, some nothing, wherever the logarithms lie."""
    arrays = [numbers(1, 2, 261, 64, seed=seed) for seed in range(3)]
    logs = (least * np.random.default_rng(3).random((1, 261, 2)) ** 4).astype(np.float32).transpose(0, 2, 1)
    logs[..., ::5] = 0
    held(run(*arrays, log_decay=logs), *next(expected(arrays, log_decay=logs)))


def test_steps_of_one_size_are_a_gamma():
    """Nearly: sums are made by eights, powers are not."""
    q, k, v = (numbers(1, 1, 300, 16, seed=seed) for seed in range(3))
    gamma, logs = np.full(1, 0.97, np.float32), np.full((1, 1, 300), np.log(np.float32(0.97)), np.float32)
    ours, others = run(q, k, v, log_decay=logs), run(q, k, v, gamma=gamma)
    assert (
        np.abs(ours.astype(np.float32) - others.astype(np.float32)) <= 2**-7 * np.abs(others.astype(np.float32)).max()
    ).all()


def test_tokens_first():
    """[B, S, H, D] in memory: the same bits."""
    q, k, v, do = (numbers(1, 40, 2, 16, seed=seed).transpose(0, 2, 1, 3) for seed in range(4))
    assert np.array_equal(run(q, k, v), run(*map(np.ascontiguousarray, (q, k, v))))
    ours, others = gradient(q, k, v, do), gradient(*map(np.ascontiguousarray, (q, k, v, do)))
    assert all(np.array_equal(mine, other) for mine, other in zip(ours, others, strict=True))


def test_heads_that_share_keys_and_queries():
    """As Mamba-2's SSD has them: one in memory, the same bits."""
    shared = [np.broadcast_to(numbers(2, 1, 40, 16, seed=seed), (2, 3, 40, 16)) for seed in range(2)]
    v, do = (numbers(2, 3, 40, 8, seed=seed) for seed in (2, 3))
    logs = -np.random.default_rng(4).random((2, 3, 40), np.float32)
    own = [*map(np.ascontiguousarray, shared), v]
    assert np.array_equal(run(*shared, v, log_decay=logs), run(*own, log_decay=logs))
    assert np.array_equal(run(v, v, shared[0]), run(v, v, own[0]))
    for ours, others in zip(gradient(*shared, v, do, log_decay=logs), gradient(*own, do, log_decay=logs), strict=True):
        assert np.array_equal(ours, others)
    wide = np.broadcast_to(numbers(2, 1, 40, 136, seed=5), (2, 3, 40, 136))
    with pytest.raises(NotImplementedError, match="rung sm90 does not do"):
        run(wide, wide, v)


@pytest.mark.parametrize(
    ("D", "Dv", "params"),
    [
        (12, 8, {}),
        (8, 12, {}),
        (8, 8, {"normalize": "signed"}),
        (8, 8, {"form": "recurrent"}),
        (136, 8, {"log_decay": np.zeros((1, 1, 9), np.float32)}),
    ],
)
def test_what_it_does_not_do(D, Dv, params):
    arrays = numbers(1, 1, 9, D, seed=0), numbers(1, 1, 9, D, seed=1), numbers(1, 1, 9, Dv, seed=2)
    with pytest.raises(NotImplementedError, match="rung sm90 does not do"):
        run(*arrays, **params)
    with pytest.raises(NotImplementedError, match="rung sm90 does not do"):
        run(*(x.astype(np.float16) for x in arrays), **params)


@pytest.mark.parametrize(
    ("B", "H", "S", "rung", "forward", "backward"),
    [
        (4, 4, 8, "sm90", 1, 1),
        (1, 2, 8, "simt", 0, 0),
        (2, 16, 8192, "sm90", 4, 1),  # three passes at once are enough for the gradient
        (1, 8, 16384, "sm90", 16, 16),
    ],
)
def test_enough_blocks_are_its_own(B, H, S, rung, forward, backward):
    """Of sequences, or of segments of two chunks and more."""
    x = np.empty((B, H, S, 8), ml_dtypes.bfloat16)
    plans = dualops.cuda.plan("retention", x, x, x), dualops.cuda.plan("retention", x, x, x, do=x, backward=True)
    for plan, segments in zip(plans, (forward, backward), strict=True):
        assert plan.choice.rung == rung and getattr(plan.choice.config, "segments", 0) == segments
