"""Retention's sm90 rung: whole and ragged chunks, states, decays, layouts, and what later tokens must not reach."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.spec import Case, retention as SPEC
from dualops.spec.retention_cases import options_of
from tests.checks import check

STATES: dict[str, Any] = {"states": 1, "return_state": True}


def run(*arrays: Any, **params: Any) -> Any:
    return dualops.cuda.retention(*arrays, kernel="sm90", **params)


@pytest.mark.parametrize(
    ("q", "Dv", "options"),
    [
        ((1, 2, 300, 16), 72, {**STATES, "gamma": 1}),
        ((2, 1, 128, 128), 128, STATES),
        ((1, 2, 129, 64), 64, {"return_state": True, "gamma": 1}),
        ((1, 1, 40, 8), 8, {"scale": -0.7}),
    ],
)
def test_lengths_states_and_decays(q, Dv, options):
    """Under the accuracy rule; two heads with a gamma have 1 and 0.01."""
    shapes, params = options_of(q, Dv, **options)
    check(SPEC, Case("sm90", "bfloat16", shapes, params), run, ways=("given",))


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_token_reaches_one_before_it(value):
    q, k, v = (numbers(1, 1, 140, 8, seed=seed) for seed in range(3))
    v[0, 0, 30, 5] = k[0, 0, 133] = value
    found = run(q, k, v).astype(np.float32)
    expected = reference.retention(q, k, v).astype(np.float32)
    assert np.isfinite(found[0, 0, :30]).all() and np.array_equal(np.isfinite(found), np.isfinite(expected))
    there = np.isfinite(expected)
    np.testing.assert_allclose(found[there], expected[there], rtol=2**-7, atol=2**-5)


def test_tokens_first():
    """[B, S, H, D] in memory: the same bits."""
    q, k, v = (numbers(2, 40, 2, 16, seed=seed).transpose(0, 2, 1, 3) for seed in range(3))
    assert np.array_equal(run(q, k, v), run(*map(np.ascontiguousarray, (q, k, v))))


@pytest.mark.parametrize(
    ("D", "Dv", "params"),
    [(12, 8, {}), (8, 12, {}), (136, 8, {}), (8, 8, {"normalize": "signed"}), (8, 8, {"form": "recurrent"})],
)
def test_what_it_does_not_do(D, Dv, params):
    arrays = numbers(1, 1, 9, D, seed=0), numbers(1, 1, 9, D, seed=1), numbers(1, 1, 9, Dv, seed=2)
    with pytest.raises(NotImplementedError, match="rung sm90 does not do"):
        run(*arrays, **params)
    with pytest.raises(NotImplementedError, match="rung sm90 does not do"):
        run(*(x.astype(np.float16) for x in arrays), **params)


def test_enough_sequences_are_its_own():
    def rung(B: int, H: int) -> str:
        x = numbers(B, H, 8, 8, seed=0)
        return dualops.cuda.plan("retention", x, x, x).choice.rung

    assert (rung(4, 4), rung(1, 2)) == ("sm90", "simt")
