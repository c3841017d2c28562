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
    """By the spec's rule of accuracy; what is not finite must be where it is in truth."""
    wide = {name: x.astype(np.float64) for name, x in named.items()}
    truth = reference.retention_backward(*(x.astype(np.float64) for x in arrays), **wide)[-1]
    baseline, there = reference.retention_backward(*arrays, **named)[-1], np.isfinite(truth)
    assert np.array_equal(np.isfinite(found), there) and there.any()
    result = compare(found[there], truth[there], baseline[there], dtype="bfloat16", floor=SPEC.floor)
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


@pytest.mark.parametrize(("name", "token"), [("q", 130), ("k", 130), ("v", 0), ("do", 260), ("q", 0), ("k", 260)])
def test_a_nan_reaches_what_it_passes_over(name, token):
    """No step before a key, none behind a query, none at all where there is no other token."""
    arrays, logs = inputs(1, 1, 261, 8, 8), logs_of(1, 1, 261)
    arrays[("q", "k", "v", "do").index(name)][0, 0, token, 3] = np.nan
    found = gradient(arrays, log_decay=logs)
    reached = np.arange(261) > token if name in "kv" else (np.arange(261) <= token) & (np.arange(261) > 0)
    assert np.array_equal(np.isnan(found[0, 0]), reached)
    if not reached.all():
        held(found, arrays, log_decay=logs)


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
    """No kernel of the CUDA cores' but the sums of log_decay's launch, where there are segments; dv and dk have one
    state before each of them.
    """
    for S, count in ((300, 4), (16384, 1 + 3 + 3 + 1 + 1)):
        x, logs = np.empty((1, 8, S, 64), ml_dtypes.bfloat16), np.zeros((1, 8, S), np.float32)
        plan = dualops.cuda.plan("retention", x, x, x, do=x, log_decay=logs, backward=True, kernel="sm90")
        names = [step.kernel.identity.partition("(")[0].rpartition(".")[2] for step in plan.steps]
        assert len(names) == count and "build_step_gradient" not in names and "build_met" not in names, names
        assert names[-1] == "build_decay_grad_pairs" and names.count("build_decay_grad_chunks") == 2


def test_a_step_that_forgets_nearly_all_costs_those_behind_it_no_digits():
    """In its eight of tokens, where sums from the eight's beginning would differ by less than they are rounded."""
    arrays, logs = inputs(1, 16, 64, 64, 64), logs_of(1, 16, 64, least=-60.0)
    held(gradient(arrays, log_decay=logs), arrays, log_decay=logs)
