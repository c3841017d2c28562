"""Retention's sm90 rung and its gradient: the table of calls, decays, layouts."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from dualops.cuda import simulator
from dualops.spec import Case, retention as SPEC, retention_cases
from dualops.spec.retention_cases import options_of
from tests.checks import check
from tests.cuda.configs import changed
from tests.cuda.retention import ROWS, WIDE_ROWS, calls_of, expected, held, numbers

run, gradient = calls_of("sm90")


@pytest.mark.parametrize("row", [*ROWS, *WIDE_ROWS], ids=str)
def test_each_row(row):
    with changed("retention", *row.changes):
        check(SPEC, row.case, gradient if row.backward else run, backward=row.backward, ways=("given",))


@pytest.mark.parametrize("least", [-0.001, -30.0, -1e30])
def test_steps_from_slow_to_sudden(least):
    """Of each eight of tokens some forget all, some nothing, wherever the logarithms lie."""
    arrays = [numbers(1, 2, 261, 64, seed=seed) for seed in range(3)]
    logs = (least * np.random.default_rng(3).random((1, 261, 2)) ** 4).astype(np.float32).transpose(0, 2, 1)
    logs[..., ::5] = 0
    held(run(*arrays, log_decay=logs), *next(expected(arrays, log_decay=logs)))


@pytest.mark.parametrize("Dv", [16, 264])
def test_tokens_first(Dv):
    q, k, v, do = (numbers(1, 40, 2, width, seed=n).transpose(0, 2, 1, 3) for n, width in enumerate((16, 16, Dv, Dv)))
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
    ("B", "H", "S", "forward", "backward", "with_log_decay"),
    [
        (4, 4, 8, ("sm90", 1), ("sm90", 1), ("sm90", 1)),
        (1, 2, 8, ("simt", 0), ("simt", 0), ("simt", 0)),
        (1, 8, 256, ("sm80", 0), ("sm80", 0), ("sm80", 0)),  # others need one launch a pass
        (1, 8, 257, ("sm90", 1), ("sm90", 1), ("sm90", 1)),
        (1, 8, 512, ("sm90", 1), ("sm90", 1), ("sm90", 1)),
        (1, 8, 1536, ("sm80", 0), ("sm90", 1), ("sm90", 1)),
        (1, 4, 4096, ("sm80", 0), ("sm80", 0), ("sm90", 1)),
        (1, 2, 4097, ("sm80", 0), ("sm80", 0), ("sm80", 0)),
        (2, 16, 8192, ("sm90", 4), ("sm90", 1), ("sm90", 1)),  # three passes at once are enough for the gradient
        (1, 8, 16384, ("sm90", 16), ("sm90", 16), ("sm90", 16)),
    ],
)
def test_enough_blocks_or_short_sequences_are_its_own(B, H, S, forward, backward, with_log_decay):
    x, logs = np.empty((B, H, S, 24), ml_dtypes.bfloat16), np.zeros((B, H, S), np.float32)
    do = {"do": x, "backward": True}
    for options, wanted in (({}, forward), (do, backward), ({**do, "log_decay": logs}, with_log_decay)):
        choice = dualops.cuda.plan("retention", x, x, x, **options).choice
        assert (choice.rung, getattr(choice.config, "segments", 0)) == wanted


def test_no_token_of_wide_heads_reaches_one_before_it():
    """In the second slice too, whose columns are others of V's."""
    q, k, v = numbers(1, 1, 70, 8, seed=0), numbers(1, 1, 70, 8, seed=1), numbers(1, 1, 70, 200, seed=2)
    v[0, 0, 50, [5, 190]] = k[0, 0, 67] = np.inf
    held(run(q, k, v), *next(expected((q, k, v))))


def test_no_gradient_of_wide_heads_reaches_a_token_that_is_not_seen():
    """Of halves of keys the sum is recomputed: dk's, which sees the tokens of its own and those behind them."""
    q, k, v, do = (numbers(1, 1, 40, width, seed=seed) for seed, width in enumerate((8, 8, 264, 264)))
    q[0, 0, 12, 5] = np.nan
    held(gradient(q, k, v, do)[1], *list(expected((q, k, v, do)))[1])


@pytest.mark.parametrize(
    ("shape", "Dv", "forward", "backward"),
    [
        ((2, 8, 8192, 256), 512, (2, [64, 8192, 128]), (1, [64, 64, 64])),  # two, or three passes at once
        ((1, 4, 8192, 256), 512, (8, [112, 2048, 128]), (8, [112, 2048, 128] * 3)),
        ((4, 8, 2048, 256), 256, (2, [64, 8192, 128]), (1, [64, 64, 64])),
        ((4, 16, 2048, 64), 264, (1, [192]), (1, [64, 192, 64])),
    ],
)
def test_blocks_of_wide_heads(shape, Dv, forward, backward):
    """A block for each slice, and for each segment of it; of the gradient dq, dv and dk."""
    q, v = np.empty(shape, ml_dtypes.bfloat16), np.empty((*shape[:3], Dv), ml_dtypes.bfloat16)
    plans = dualops.cuda.plan("retention", q, q, v), dualops.cuda.plan("retention", q, q, v, do=v, backward=True)
    for plan, (segments, blocks) in zip(plans, (forward, backward), strict=True):
        config: Any = plan.choice.config
        assert plan.choice.rung == "sm90" and config.segments == segments
        assert [step.grid[0] for step in plan.steps] == blocks


@pytest.mark.parametrize(
    ("function", "q", "Dv"),
    [
        (run, (1, 1, 900, 8), 72),
        (run, (1, 1, 900, 8), 136),
        (gradient, (1, 1, 300, 8), 72),
        (gradient, (1, 1, 300, 136), 8),
        (gradient, (1, 1, 300, 8), 264),
    ],
)
def test_tokens_that_keep_all(function, q, Dv, monkeypatch):
    """The last state, and the gradient of the first: narrow heads, and wide ones, by one slice, two and three."""
    monkeypatch.setattr(retention_cases, "_decays", lambda heads, _: np.ones(heads))
    shapes, params = options_of(q, Dv, gamma=1, states=1, return_state=function is run)
    case = Case("sm90", "bfloat16", shapes, params)
    with simulator.toward_zero():
        check(SPEC, case, function, backward=function is gradient, ways=("given",))


def test_sums_are_cut_off_where_they_are_asked_to_be():
    last = 2.0**-23  # of 1
    totals = np.array([1 + 0.9 * last, -1 - 0.9 * last, 1 + 1.1 * last, 1.0, np.inf, np.nan])
    near = np.array([1 + last, -1 - last, 1 + last, 1, np.inf, np.nan], np.float32)
    assert np.array_equal(simulator.rounded_sums(totals), near, equal_nan=True)
    with simulator.toward_zero():
        cut = np.array([1, -1, 1 + last, 1, np.inf, np.nan], np.float32)
        assert np.array_equal(simulator.rounded_sums(totals), cut, equal_nan=True)
        assert len(simulator.added_at_once(16)) == 4
    assert simulator.added_at_once(16) == [slice(None)]
