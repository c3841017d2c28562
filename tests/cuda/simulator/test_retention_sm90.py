"""Retention's sm90 rung and its gradient: whole and ragged chunks, states, decays, layouts, what no token may reach."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.retention import sm90
from dualops.spec import Case, compare, retention as SPEC
from dualops.spec.retention_cases import options_of
from tests.checks import check
from tests.cuda.configs import changed

STATES: dict[str, Any] = {"states": 1, "return_state": True}


def run(*arrays: Any, **params: Any) -> Any:
    return dualops.cuda.retention(*arrays, kernel="sm90", **params)


def gradient(*arrays: Any, **params: Any) -> Any:
    return dualops.cuda.retention_backward(*arrays, kernel="sm90", **params)


@pytest.mark.parametrize(
    ("q", "Dv", "options"),
    [
        ((1, 2, 300, 16), 72, {**STATES, "gamma": 1}),
        ((2, 1, 128, 128), 128, STATES),
        ((1, 2, 129, 64), 64, {"return_state": True, "gamma": 1}),
        ((1, 1, 40, 8), 8, {"scale": -0.7}),
        ((1, 2, 300, 16), 72, {**STATES, "steps": 1}),
        ((1, 1, 129, 64), 64, {"return_state": True, "steps": 1}),
    ],
)
def test_lengths_states_and_decays(q, Dv, options):
    """Under the accuracy rule; two heads with a gamma have 1 and 0.01."""
    shapes, params = options_of(q, Dv, **options)
    check(SPEC, Case("sm90", "bfloat16", shapes, params), run, ways=("given",))


@pytest.mark.parametrize(
    ("q", "Dv", "options"),
    [
        ((1, 2, 130, 16), 72, {**STATES, "gamma": 1}),
        ((1, 1, 257, 72), 8, {"states": 1}),
        ((2, 1, 40, 64), 64, {"return_state": True, "scale": -0.7}),
        ((1, 1, 128, 128), 128, {}),
        ((1, 1, 257, 72), 8, {"states": 1, "steps": 1}),
        ((2, 1, 40, 64), 64, {"return_state": True, "scale": -0.7, "steps": 1}),
    ],
)
def test_gradients(q, Dv, options):
    """With an initial state, a gradient of the last one, both and neither."""
    shapes, params = options_of(q, Dv, **options)
    check(SPEC, Case("sm90", "bfloat16", shapes, params), gradient, backward=True, ways=("given",))


@pytest.mark.parametrize(
    ("function", "Sq", "segments", "options"),
    [
        (run, 270, 2, {**STATES, "gamma": 1}),
        (gradient, 270, 2, {**STATES, "gamma": 1}),
        (run, 390, 3, {}),
        (run, 270, 2, {**STATES, "steps": 1}),
        (gradient, 270, 2, {**STATES, "steps": 1}),
    ],
)
def test_segments(function, Sq, segments, options):
    """The last one has a few tokens, or none."""
    shapes, params = options_of((1, 1, Sq, 32), 24, **options)
    case = Case("sm90", "bfloat16", shapes, params)
    with changed("retention", (sm90, {"segments_of": lambda *_: segments})):
        check(SPEC, case, function, backward=function is gradient, ways=("given",))


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def held(found: np.ndarray, truth: np.ndarray, baseline: np.ndarray) -> None:
    """By the spec's rule of accuracy; what is not finite in truth is not here: by other chunks an infinity is a NaN."""
    there = np.isfinite(truth)
    assert np.array_equal(np.isfinite(found.astype(np.float64)), there) and 0 < there.sum() < there.size
    result = compare(found[there], truth[there], baseline[there], dtype="bfloat16", floor=SPEC.floor)
    assert result.passed, result.message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_token_reaches_one_before_it(value):
    arrays = [numbers(1, 1, 140, 8, seed=seed) for seed in range(3)]
    arrays[2][0, 0, 30, 5] = arrays[1][0, 0, 133] = value
    held(run(*arrays), reference.retention(*(x.astype(np.float64) for x in arrays)), reference.retention(*arrays))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_gradient_reaches_a_token_that_is_not_seen(value):
    """To dk and dv none comes from a token before, to dq none from one behind."""
    q, k, v, do = (numbers(1, 1, 140, 8, seed=seed) for seed in range(4))
    q[0, 0, 30, 5] = do[0, 0, 20, 3] = v[0, 0, 133, 1] = value
    truths = reference.retention_backward(*(x.astype(np.float64) for x in (q, k, v, do)))
    for each in zip(gradient(q, k, v, do), truths, reference.retention_backward(q, k, v, do), strict=True):
        held(*each)


@pytest.mark.parametrize(
    ("function", "least"), [(run, -0.001), (run, -30.0), (run, -1e30), (gradient, -30.0), (gradient, -1e30)]
)
def test_steps_from_slow_to_sudden(function, least):
    """Of each eight of tokens some forget all, some nothing, wherever the logarithms lie."""
    q, k, v, do = (numbers(1, 2, 261, 64, seed=seed) for seed in range(4))
    logs = (least * np.random.default_rng(3).random((1, 261, 2)) ** 4).astype(np.float32).transpose(0, 2, 1)
    logs[..., ::5] = 0
    arrays, reach = ([q, k, v, do], reference.retention_backward) if function is gradient else ([q, k, v], truth_of)
    found = function(*arrays, log_decay=logs)
    truths = reach(*(x.astype(np.float64) for x in arrays), log_decay=logs.astype(np.float64))
    for each in zip(found if function is gradient else (found,), truths, reach(*arrays, log_decay=logs), strict=True):
        result = compare(*each, dtype="bfloat16", floor=SPEC.floor)
        assert result.passed, result.message


def test_a_gradient_of_a_head_that_forgets_at_once():
    """Of this draw dq and dk are beyond the rule where nothing is added of what rounding takes from P."""
    arrays, logs = [numbers(1, 1, 64, 16, seed=100 + n) for n in range(4)], np.full((1, 1, 64), -4.0, np.float32)
    found, baseline = gradient(*arrays, log_decay=logs), reference.retention_backward(*arrays, log_decay=logs)
    truths = reference.retention_backward(*(x.astype(np.float64) for x in arrays), log_decay=logs.astype(np.float64))
    for each in zip(found, truths, baseline, strict=True):
        result = compare(*each, dtype="bfloat16", floor=SPEC.floor)
        assert result.passed, result.message


def truth_of(*arrays: np.ndarray, log_decay: np.ndarray) -> tuple[np.ndarray]:
    return (reference.retention(*arrays, log_decay=log_decay),)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_token_reaches_one_before_it_by_steps(value):
    arrays = [numbers(1, 1, 140, 8, seed=seed) for seed in range(3)]
    arrays[2][0, 0, 30, 5] = arrays[1][0, 0, 133] = value
    logs = -np.random.default_rng(3).random((1, 1, 140), np.float32)
    truth = reference.retention(*(x.astype(np.float64) for x in arrays), log_decay=logs.astype(np.float64))
    held(run(*arrays, log_decay=logs), truth, reference.retention(*arrays, log_decay=logs))


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
