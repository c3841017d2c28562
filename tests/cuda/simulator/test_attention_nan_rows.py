"""Gradients of attention where a row is NaN: what it reaches are the keys that it sees, also with scores of -inf."""

from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference, spec
from dualops.cuda.flash_attention.saved_lse import exponent_less, lowered
from tests.cuda.simulator.attention import BFLOAT16, FLOOR, named, numbers, widened
from tests.cuda.simulator.gradients import served

SQ, SK, ROW, NOT_SCORED, HIDDEN = 20, 24, 7, 5, 11  # the NaN row; a key of score -inf, and one that a mask hides


def hides_one(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j != HIDDEN


def cut(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * score if j != NOT_SCORED else -np.inf


def cut_slope(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 2 * score if j != NOT_SCORED else np.nan


def bias_with_a_hole() -> np.ndarray:
    bias = numbers(SQ, SK, seed=9)
    bias[:, NOT_SCORED] = -np.inf
    return bias


CASES: dict[str, dict[str, Any]] = {
    "bias": {"bias": bias_with_a_hole()},
    "bias, mask_mod": {"bias": bias_with_a_hole(), "mask_mod": hides_one},
    "bias, softcap, causal": {"bias": bias_with_a_hole(), "softcap": 2.0, "causal": True},
    "bias, padding": {"bias": bias_with_a_hole(), "key_padding_mask": (np.arange(SK) != HIDDEN)[None]},
    "causal": {"causal": True},
    "score_mod": {"score_mod": (cut, cut_slope), "mask_mod": hides_one},
}
RUNGS = [("naive", np.float32), ("simt", np.float32), ("simt", np.float64), ("sm80", BFLOAT16), ("sm90", BFLOAT16)]
by_rung = pytest.mark.parametrize(("rung", "dtype"), RUNGS, ids=lambda value: value if isinstance(value, str) else "")


def arrays_of(dtype: Any) -> list[np.ndarray]:
    shapes = ((1, 1, SQ, 16), (1, 1, SK, 16), (1, 1, SK, 16), (1, 1, SQ, 16))
    return [numbers(*shape, seed=seed).astype(dtype) for seed, shape in enumerate(shapes)]


def checked(rung: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, **params: Any) -> list[np.ndarray]:
    """The gradients, compared with truth; NaN where truth has them."""
    params = {name: value.astype(q.dtype) if name == "bias" else value for name, value in params.items()}
    arrays = (q, k, v, *reference.flash_attention(q, k, v, return_lse=True, **params), do)
    found = dualops.cuda.flash_attention_backward(*arrays, kernel=rung, **params)
    wide = {name: widened(value) for name, value in params.items()}
    truths = reference.flash_attention_backward(*map(widened, arrays), **wide)
    baselines = reference.flash_attention_backward(*arrays, **params)
    for name, actual, truth, baseline in zip(("dq", "dk", "dv", "dbias"), found, truths, baselines):
        result = spec.compare(actual, truth, baseline, dtype=str(q.dtype), floor=FLOOR, name=name)
        assert result.passed, result.message
    return [x.astype(np.float64) for x in found]


@by_rung
@pytest.mark.parametrize("case", CASES)
def test_a_nan_row_reaches_all_that_it_sees(case, rung, dtype):
    params = dict(CASES[case])
    q, k, v, do = arrays_of(dtype)
    if "bias" in params:  # a NaN in q would be in all scores of the row: none would be -inf
        params["bias"] = params["bias"].copy()
        params["bias"][ROW, 3] = np.inf if case == "bias" else np.nan
    else:
        q[0, 0, ROW, 3] = np.nan
    seen = np.ones(SK, bool)
    if "causal" in params:
        seen = np.arange(SK) <= ROW + SK - SQ
    elif case != "bias":  # in which no mask is
        seen[HIDDEN] = False
    dq, dk, dv, *dbias = checked(rung, q, k, v, do, **params)
    assert np.array_equal(np.isnan(dq[0, 0]).all(axis=-1), np.arange(SQ) == ROW) and np.isnan(dq).sum() == 16
    for found in (dk, dv):
        assert np.array_equal(np.isnan(found[0, 0]), np.broadcast_to(seen[:, None], (SK, 16)))
    for found in dbias:
        assert np.array_equal(np.isnan(found), (np.arange(SQ) == ROW)[:, None] & seen)


@pytest.mark.parametrize("case", ["bias, mask_mod", "score_mod"])
def test_the_same_of_two_kernels(case):
    with served():
        test_a_nan_row_reaches_all_that_it_sees(case, "sm90", BFLOAT16)


@by_rung
def test_a_score_of_infinity_makes_a_row_nan(rung, dtype):
    """Of a key that has scores of -inf in all other rows, which leave it out. Another one has no other scores."""
    q, k, v, do = arrays_of(dtype)
    q[0, 0, :, 2:4] = 1, -1
    q[0, 0, ROW, 3] = 1
    k[0, 0, HIDDEN, 2], k[0, 0, NOT_SCORED, 3] = -np.inf, np.inf
    dq, dk, dv = checked(rung, q, k, v, do)
    assert np.array_equal(np.isnan(dq[0, 0]), np.broadcast_to((np.arange(SQ) == ROW)[:, None], (SQ, 16)))
    assert np.isnan(dk).all() and np.isnan(dv).all()


@by_rung
@pytest.mark.parametrize("params", [CASES["bias"], CASES["score_mod"]], ids=named)
def test_a_row_of_numbers_leaves_scores_of_minus_infinity_out(params, rung, dtype):
    """A NaN in such a key's value does not reach it."""
    q, k, v, do = arrays_of(dtype)
    v[0, 0, NOT_SCORED] = np.nan
    dq, dk, dv, *dbias = checked(rung, q, k, v, do, **params)
    assert np.isfinite(dq).all() and np.isfinite(dk).all() and np.isfinite(dv).all()
    assert not dk[0, 0, NOT_SCORED].any() and not dv[0, 0, NOT_SCORED].any()
    assert all(np.isfinite(found).all() for found in dbias)


def test_what_is_taken_from_lse_leaves_it_finite():
    """-inf - (-inf) would be NaN in a row that is none."""
    most = np.float32(np.finfo(np.float32).max)
    with np.errstate(over="ignore"):
        assert lowered(-most) == -most and lowered(most) < most
        assert exponent_less(np.float32(-np.inf), lowered(-most)) == -np.inf
    assert lowered(np.float32(-np.inf)) == 0
    assert np.isnan(lowered(np.float32(np.nan)))
