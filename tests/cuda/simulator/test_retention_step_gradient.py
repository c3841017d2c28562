"""log_decay's own gradient on Hopper's tensor cores: chunks, segments and states, decays of all sizes, layouts, NaN."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.retention import sm90
from dualops.spec import compare, retention as SPEC
from dualops.testing.terms.retention import gradient_terms
from dualops.testing.truth import bind, expected
from tests.cuda.configs import changed

Arrays = tuple[np.ndarray, ...]


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def inputs(B: int, H: int, S: int, D: int, Dv: int) -> Arrays:
    """q, k, v and do."""
    return tuple(numbers(B, H, S, width, seed=seed) for seed, width in enumerate((D, D, Dv, Dv)))


def logs_of(B: int, H: int, S: int, least: float = -1.0) -> np.ndarray:
    return (least * np.random.default_rng(S).random((B, H, S)) ** 3).astype(np.float32)


def states_of(B: int, H: int, D: int, Dv: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(D)
    return {name: rng.standard_normal((B, H, D, Dv)).astype(np.float32) for name in ("initial_state", "dstate")}


def gradient(arrays: Arrays, **named: Any) -> np.ndarray:
    """That of log_decay."""
    return dualops.cuda.retention_backward(*arrays, kernel="sm90", **named)[-1]


def held(found: np.ndarray, arrays: Arrays, **named: np.ndarray) -> None:
    """By the spec's rule of accuracy, as `tests.checks` asks it."""
    given = dict(zip(("q", "k", "v", "do"), arrays)) | named
    names = ("dq", "dk", "dv", *(["dinitial_state"] if "initial_state" in named else []), "dlog_decay")
    truths, baselines = expected(SPEC, given, {}, True, names)
    terms = gradient_terms(given, bind(SPEC, given, {}, True))["dlog_decay"]
    rule = {"dtype": "bfloat16", "floor": SPEC.floor, "terms": terms}
    result = compare(found, truths["dlog_decay"], baselines["dlog_decay"], **rule)
    assert result.passed, result.message


@pytest.mark.parametrize(
    ("shape", "states"),
    [
        ((1, 1, 1, 8, 8), False),
        ((1, 1, 1, 8, 8), True),
        ((1, 1, 128, 128, 128), True),
        ((1, 2, 300, 16, 72), False),
        ((2, 1, 129, 72, 8), True),
        ((1, 1, 256, 64, 128), False),
    ],
)
def test_whole_and_ragged_chunks(shape, states):
    arrays, logs = inputs(*shape), logs_of(*shape[:3])
    named = {"log_decay": logs} | (states_of(*shape[:2], *shape[3:]) if states else {})
    held(gradient(arrays, **named), arrays, **named)


@pytest.mark.parametrize(("S", "segments", "states"), [(390, 3, False), (390, 2, True), (140, 3, True)])
def test_segments(S, segments, states):
    """Of a chunk or two, the last one of a few tokens, or of none."""
    arrays, logs = inputs(1, 1, S, 16, 24), logs_of(1, 1, S)
    named = {"log_decay": logs} | (states_of(1, 1, 16, 24) if states else {})
    with changed("retention", (sm90, {"segments_of": lambda *_: segments})):
        held(gradient(arrays, **named), arrays, **named)


@pytest.mark.parametrize("least", [0.0, -1e-4, -3.0, -40.0, -1e30])
def test_decays_of_all_sizes(least):
    """Among them steps that keep all."""
    arrays, logs = inputs(1, 1, 261, 32, 16), logs_of(1, 1, 261, least)
    logs[..., ::5] = 0
    held(gradient(arrays, log_decay=logs), arrays, log_decay=logs)


@pytest.mark.parametrize(("name", "token"), [("q", 130), ("k", 130), ("v", 0), ("do", 260)])
def test_a_nan_stays_in_its_head(name, token):
    """It reaches every step that it passes over; dq, dk and dv have it where the reference has it."""
    arrays, logs = inputs(1, 2, 261, 8, 8), logs_of(1, 2, 261)
    clean = gradient(arrays, log_decay=logs)
    arrays[("q", "k", "v", "do").index(name)][0, 1, token, 3] = np.nan
    *results, found = dualops.cuda.retention_backward(*arrays, kernel="sm90", log_decay=logs)
    reached = np.arange(261) > token if name in "kv" else (np.arange(261) <= token) & (np.arange(261) > 0)
    assert np.isnan(found[0, 1][reached]).all() and np.array_equal(found[0, 0], clean[0, 0])
    expected = reference.retention_backward(*arrays, log_decay=logs)
    for result, other in zip(results, expected[:3], strict=True):
        assert np.array_equal(np.isnan(result), np.isnan(other))


def test_the_same_bits_beside_other_heads_and_in_every_layout():
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
        names = [step.kernel.identity.partition("(")[0].rpartition(".")[2] for step in plan.steps]
        assert len(names) == count and "build_step_gradient" not in names and "build_met" not in names, names
        assert names[-1] == "build_decay_grad_sums" and names.count("build_decay_grad_chunks") == 2


def test_a_step_that_forgets_nearly_all_costs_those_behind_it_no_digits():
    """Within an eight of tokens, and where all pairs but those of a token with itself are almost 0."""
    arrays, logs = inputs(1, 16, 64, 64, 64), logs_of(1, 16, 64, least=-60.0)
    held(gradient(arrays, log_decay=logs), arrays, log_decay=logs)
