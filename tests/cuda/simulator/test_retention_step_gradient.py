"""log_decay's own gradient on Hopper's tensor cores: decays of all sizes, layouts, NaN. Calls are in the table."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.spec import retention as SPEC
from dualops.testing.terms.retention import gradient_terms
from dualops.testing.truth import bind, expected, held
from tests.cuda.retention import calls_of, expected as every_expected, numbers

Arrays = tuple[np.ndarray, ...]


def inputs(B: int, H: int, S: int, D: int, Dv: int) -> Arrays:
    """q, k, v and do."""
    return tuple(numbers(B, H, S, width, seed=seed) for seed, width in enumerate((D, D, Dv, Dv)))


def logs_of(B: int, H: int, S: int, least: float = -1.0) -> np.ndarray:
    return (least * np.random.default_rng(S).random((B, H, S)) ** 3).astype(np.float32)


def gradient(arrays: Arrays, **named: Any) -> np.ndarray:
    """That of log_decay."""
    return calls_of("sm90")[1](*arrays, **named)[-1]


def hold(arrays: Arrays, logs: np.ndarray) -> None:
    """All gradients, by the spec's rule of accuracy."""
    given, names = {**dict(zip(("q", "k", "v", "do"), arrays)), "log_decay": logs}, ("dq", "dk", "dv", "dlog_decay")
    found = dict(zip(names, calls_of("sm90")[1](*arrays, log_decay=logs), strict=True))
    terms = gradient_terms(given, bind(SPEC, given, {}, True))
    for result in held(SPEC, "bfloat16", found, *expected(SPEC, given, {}, True, names), terms).values():
        assert result.passed, result.message


@pytest.mark.parametrize("least", [0.0, -1e-4, -3.0, -40.0, -1e30])
def test_decays_of_all_sizes(least):
    arrays, logs = inputs(1, 1, 261, 32, 16), logs_of(1, 1, 261, least)
    logs[..., ::5] = 0
    hold(arrays, logs)


@pytest.mark.parametrize(("name", "token"), [("q", 130), ("k", 130), ("v", 0), ("do", 260)])
def test_a_nan_stays_in_its_head(name, token):
    """It reaches every step that it passes over; dq, dk and dv have it where the reference has it."""
    arrays, logs = inputs(1, 2, 261, 8, 8), logs_of(1, 2, 261)
    clean = gradient(arrays, log_decay=logs)
    arrays[("q", "k", "v", "do").index(name)][0, 1, token, 3] = np.nan
    *results, found = calls_of("sm90")[1](*arrays, log_decay=logs)
    reached = np.arange(261) > token if name in "kv" else (np.arange(261) <= token) & (np.arange(261) > 0)
    assert np.isnan(found[0, 1][reached]).all() and np.array_equal(found[0, 0], clean[0, 0])
    for result, other in zip(results, reference.retention_backward(*arrays, log_decay=logs)):
        assert np.array_equal(np.isnan(result), np.isnan(other))


def test_the_same_bits_with_other_heads_and_in_every_layout():
    """A head's result is its own, wherever it lies, and shared heads are as good as their copies."""
    q, k, v, do = inputs(1, 2, 140, 16, 24)
    logs = logs_of(1, 2, 140)
    whole = gradient((q, k, v, do), log_decay=logs)
    last = gradient(tuple(np.ascontiguousarray(x[:, 1:]) for x in (q, k, v, do)), log_decay=logs[:, 1:].copy())
    assert np.array_equal(whole[:, 1:], last)
    tokens_first = tuple(np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v, do))
    strided = np.ascontiguousarray(logs.transpose(0, 2, 1)).transpose(0, 2, 1)
    assert np.array_equal(whole, gradient(tokens_first, log_decay=strided))
    shared = [np.broadcast_to(x[:, :1], x.shape) for x in (q, k)]
    ours, others = (gradient((*each, v, do), log_decay=logs) for each in (shared, map(np.ascontiguousarray, shared)))
    assert np.array_equal(ours, others)


def test_what_a_call_launches():
    """Those of gamma and one more, where there are segments the sums of log_decay too."""
    for S, count in ((300, 4), (16384, 1 + 3 * 3 + 1)):
        x, logs = np.empty((1, 8, S, 64), ml_dtypes.bfloat16), np.zeros((1, 8, S), np.float32)
        plan = dualops.cuda.plan("retention", x, x, x, do=x, log_decay=logs, backward=True, kernel="sm90")
        identities = [step.kernel.identity for step in plan.steps]
        names = [identity.partition("(")[0].rpartition(".")[2] for identity in identities]
        assert len(names) == count and "build_step_gradient" not in names and "build_state_terms" not in names, names
        assert names[-1] == "build_decay_grad_sums" and sum("decay_grad=True" in each for each in identities) == 2


def test_a_step_that_forgets_nearly_all_costs_those_behind_it_no_digits():
    """Within an eight of tokens, and where all pairs but those of a token with itself are almost 0."""
    arrays, logs = inputs(1, 16, 64, 64, 64), logs_of(1, 16, 64, least=-60.0)
    hold(arrays, logs)


def test_a_long_sequence_is_no_less_exact_than_chunks_with_states_in_memory():
    """The reference has these, as flash-linear-attention does. In one sum over all chunks rounded states would add up:
    emulated, five times the error of chunks.
    """
    arrays, logs = inputs(1, 1, 900, 16, 16), -0.2 * np.random.default_rng(5).random((1, 1, 900), np.float32)
    ((truth, baseline),) = list(every_expected(arrays, log_decay=logs))[3:]
    ours, theirs = (np.sqrt(((x - truth) ** 2).mean()) for x in (gradient(arrays, log_decay=logs), baseline))
    assert ours <= theirs
