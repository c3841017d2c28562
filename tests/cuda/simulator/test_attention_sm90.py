"""attention's sm90 rung: what its cases do not have. Layouts, varlen, what a mask hides, what it refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.flash_attention.sm90 import forward_steps
from dualops.cuda.flash_attention.sm90.config import configs
from dualops.cuda.flash_attention.walk import section_of
from dualops.cuda.offline import absent_problem
from dualops.spec import OPERATORS, Case, compare

SPEC = OPERATORS["flash_attention"]
BFLOAT16 = ml_dtypes.bfloat16


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(BFLOAT16)


def widened(value: Any) -> Any:
    """An array of floats as float64."""
    return value.astype(np.float64) if getattr(value, "dtype", None) in (BFLOAT16, np.float32) else value


def checked(found: np.ndarray, name: str, function: Any, *arrays: np.ndarray, **params: Any) -> None:
    """By the spec's rule of accuracy; NaN and infinities where truth has them."""
    truth = function(*map(widened, arrays), **{param: widened(value) for param, value in params.items()})
    baseline = function(*arrays, **params)
    result = compare(found, truth, baseline, dtype=str(arrays[0].dtype), floor=SPEC.floor, name=name)
    assert result.passed, result.message


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, **params: Any) -> Any:
    return dualops.cuda.flash_attention(q, k, v, kernel="sm90", **params)


def test_sm90_is_what_a_call_takes():
    q = numbers(1, 1, 8, 64)
    assert dualops.cuda.plan("flash_attention", q, q, q).choice.rung == "sm90"
    assert dualops.cuda.plan("flash_attention", *[q.astype(np.float32)] * 3).choice.rung == "simt"


def test_a_section_of_many_heads_has_a_number_of_32_bits():
    shapes = {"q": (1, 8192, 100, 8), "k": (1, 1, 1, 8), "v": (1, 1, 1, 8)}
    problem = absent_problem(SPEC, Case("", "bfloat16", shapes, {}))
    results = problem.outputs(SPEC.outputs)
    config, _ = next(configs(64, 64, ()))
    _, step = forward_steps(problem, results, config)
    assert step.args[6] == section_of(problem)
    assert 8192 <= section_of(problem) < 2**31


def test_tokens_before_heads():
    q, k, v = (numbers(2, S, H, 40, seed=S + H).transpose(0, 2, 1, 3) for S, H in ((70, 2), (90, 1), (90, 1)))
    checked(attend(q, k, v, causal=True), "o", reference.flash_attention, q, k, v, causal=True)


@pytest.mark.parametrize("width", [24, 7])  # rows of whole 16 bytes, as boxes; others one by one
def test_results_among_other_memory(width):
    q, k, v = numbers(1, 2, 70, 16), numbers(1, 1, 40, 16, seed=1), numbers(1, 1, 40, 32, seed=2)[..., :width]
    room = np.full((2, 80, 32), 7, BFLOAT16)
    out = room[None, :, 3:73, :width]
    attend(q, k, v, out=out)
    checked(out, "o", reference.flash_attention, q, k, v)
    around = room.copy()
    around[:, 3:73, :width] = 7
    assert (around == 7).all()


def test_sequences_one_after_another():
    """Empty ones, and ends within a tile: a sequence neither sees the next one's keys nor writes to its rows."""
    ends_q, ends_k = (np.array(ends, np.int32) for ends in ((0, 5, 5, 75, 140), (0, 30, 47, 47, 150)))
    q, k, v = numbers(140, 2, 16), numbers(150, 1, 16, seed=1), numbers(150, 1, 24, seed=2)
    v[47] = np.nan  # the first key of the last sequence, which its first query alone does not see
    arrays = (q, k, v, ends_q, ends_k)
    params: dict[str, Any] = {"causal": True, "max_seqlen_q": 70, "max_seqlen_k": 103}
    found = dualops.cuda.flash_attention_varlen(*arrays, kernel="sm90", **params)
    checked(found, "o", reference.flash_attention_varlen, *arrays, **params)
    assert np.isfinite(found[:75].astype(np.float32)).all()


@pytest.mark.parametrize("D", [32, 72])  # of whatever width, varlen has the same tiles
def test_rows_do_not_depend_on_what_is_beside_them(D):
    q, k, v = numbers(3, 2, 70, D), numbers(3, 1, 150, D, seed=1), numbers(3, 1, 150, D, seed=2)
    together = attend(q, k, v, causal=True, return_lse=True)
    alone = attend(q[1:2], k[1:2], v[1:2], causal=True, return_lse=True)
    ends = [np.array((0, n), np.int32) for n in (70, 150)]
    tokens = [x[1].transpose(1, 0, 2) for x in (q, k, v)]
    packed: dict[str, Any] = {"causal": True, "max_seqlen_q": 70, "max_seqlen_k": 150}
    one = dualops.cuda.flash_attention_varlen(
        tokens[0], tokens[1], tokens[2], ends[0], ends[1], kernel="sm90", **packed
    )
    assert all(np.array_equal(many[1:2], few) for many, few in zip(together, alone, strict=True))
    assert np.array_equal(attend(q, k, v, causal=True).view(np.uint16), together[0].view(np.uint16))
    assert np.array_equal(one.transpose(1, 0, 2)[None], alone[0])


def test_queries_that_see_nothing_after_some_that_do():
    """With a sink their sum is not 0, and what is divided by it must not be of the piece of work before."""
    q, k, v = numbers(1, 1, 260, 16), numbers(1, 1, 40, 16, seed=1), numbers(1, 1, 40, 24, seed=2)
    sinks = np.array([0.5], np.float32)
    found = attend(q, k, v, causal=True, sinks=sinks)
    checked(found, "o", reference.flash_attention, q, k, v, causal=True, sinks=sinks)
    assert not found[:, :, :220].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_a_mask_hides_stays_where_it_is(value):
    q, k, v = numbers(1, 1, 40, 16), numbers(1, 1, 50, 16, seed=1), numbers(1, 1, 50, 24, seed=2)
    v[0, 0, 30, 5] = k[0, 0, 45] = value
    for params in ({"causal": True}, {"mask_mod": lambda b, h, i, j: j != 30, "causal": True}):
        found = attend(q, k, v, **params)
        checked(found, "o", reference.flash_attention, q, k, v, **params)
        assert np.isfinite(found[:, :, :20].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("make", "params", "other"),
    [
        (lambda: [numbers(1, 1, 8, 16).astype(np.float32)] * 3, {}, "simt"),
        (lambda: [numbers(1, 1, 8, 24)[..., 4:20]] * 3, {}, "sm80"),  # rows at multiples of 8 bytes
        (lambda: [np.broadcast_to(numbers(1, 1, 1, 16), (1, 1, 8, 16))] * 3, {}, "sm80"),
        (lambda: [numbers(1, 1, 8, 264)] * 2 + [numbers(1, 1, 8, 16)], {}, "simt"),
        (lambda: [numbers(1, 1, 8, 16)] * 3, {"scale": 0.0}, "simt"),
        (lambda: [numbers(1, 1, 8, 16)] * 3, {"scale": -1.0}, "simt"),
    ],
)
def test_what_is_another_rungs(make, params, other):
    arrays = make()
    with pytest.raises(NotImplementedError, match="flash_attention: rung sm90 does not do"):
        attend(*arrays, **params)
    assert dualops.cuda.plan("flash_attention", *arrays, **params).choice.rung == other
