"""Attention in NumPy: plain against blocked, rounding, NaN. `_options` has the formula."""

from typing import Any

import numpy as np
import pytest

from dualops.reference import flash_attention, flash_attention_blocked
from dualops.spec import OPERATORS, Tag, compare
from dualops.spec.meta import numpy_dtype
from dualops.testing.truth import widened
from tests.problems import elements, random_problems, values

SPEC = OPERATORS["flash_attention"]
CASES = [case for case in SPEC.tagged(Tag.TEST) + SPEC.tagged(Tag.SIM) if elements(case) <= 1 << 20]
FORMS = [flash_attention, flash_attention_blocked]

pytestmark = pytest.mark.filterwarnings("error")  # no NumPy warning reaches a user


def both(form, q, k, v, **params: Any) -> tuple[np.ndarray, np.ndarray]:
    """o and lse."""
    return form(q, k, v, **{**params, "return_lse": True})


def normal(*shape: int, seed: int = 0, dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))


def qkv(B=2, H=4, Hkv=2, Sq=9, Sk=13, D=8, Dv=6, dtype="float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = (B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv)
    q, k, v = (normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    return q, k, v


def agree(actual: np.ndarray, truth: np.ndarray, baseline: np.ndarray, dtype: str, what: str) -> None:
    found = compare(actual, truth, baseline, dtype=dtype, floor=SPEC.floor, name=what)
    assert found.passed, found.message


@pytest.mark.parametrize("case", {case.id: case for case in CASES}.values(), ids=lambda case: case.id)
def test_plain_and_blocked_agree_with_the_truth(case):
    arrays = values(SPEC, case)
    wide = widened(arrays)
    truths, plains = both(flash_attention, **wide, **case.params), both(flash_attention, **arrays, **case.params)
    small = elements(case) <= 1 << 17
    for blocks in [{"block_q": 64, "block_kv": 64}, *([{"block_q": 31, "block_kv": 17}] if small else [])]:
        blocked = both(flash_attention_blocked, **arrays, **case.params, **blocks)
        for what, actual, truth, plain in zip(("o", "lse"), blocked, truths, plains, strict=True):
            assert actual.dtype == plain.dtype
            agree(actual, truth, plain, case.dtype, what)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_probabilities_are_rounded_where_the_spec_says(form, dtype):
    q, k, v = qkv(H=2, Sq=50, Sk=60, Dv=16, dtype=dtype)  # one block of keys: one maximum in both forms
    q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("bhqd,bhkd->bhqk", q64, k64) / np.sqrt(8)
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    rounded = probs.astype(q.dtype).astype(np.float64)
    before = np.einsum("bhqk,bhkd->bhqd", rounded, v64) / probs.sum(axis=-1, keepdims=True)
    once = 1.01 * (2.0**-11 if dtype == "float16" else 2.0**-8) * np.abs(before) + 1e-6
    beyond = np.abs(form(q, k, v).astype(np.float64) - before) > once
    # all but those where float32 arithmetic moved a probability across a tie; a third of all without that rounding
    assert np.mean(beyond) < 0.01


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_a_row_does_not_depend_on_the_batch_and_heads_it_is_with(form, causal):
    q, k, v = qkv(B=3, H=6, Hkv=3, dtype="float32")
    o, lse = both(form, q, k, v, causal=causal)
    for b, h in np.ndindex(3, 6):
        alone = both(form, q[b : b + 1, h : h + 1], *(x[b : b + 1, h // 2 : h // 2 + 1] for x in (k, v)), causal=causal)
        assert np.array_equal(alone[0][0, 0], o[b, h])
        assert np.array_equal(alone[1][0, 0], lse[b, h])


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_in_a_query_poisons_its_row_and_one_in_a_value_its_column(form):
    q, k, v = qkv(H=2, Hkv=2, Sq=10, Sk=10)
    plain = both(form, q, k, v)
    q[0, 1, 4, 2] = np.nan
    o, lse = both(form, q, k, v)
    assert np.array_equal(np.argwhere(np.isnan(lse)), [[0, 1, 4]])
    assert np.isnan(o[0, 1, 4]).all()
    assert np.isnan(o).sum() == 6
    q, k, v = qkv(H=2, Hkv=2, Sq=10, Sk=10)
    v[1, 0, 3, 5] = np.nan
    o, lse = both(form, q, k, v, causal=True)
    assert np.array_equal(np.argwhere(np.isnan(o)), [[1, 0, i, 5] for i in range(3, 10)])
    assert np.isfinite(lse).all()
    assert np.isfinite(plain[0]).all()


def test_plain_and_blocked_put_special_values_in_the_same_places():
    with_nan = 0
    for case in random_problems("flash_attention", 2, 150, max_elements=3000):
        arrays = values(SPEC, case, special=True)
        wide = widened(arrays)
        truths, plains = both(flash_attention, **wide, **case.params), both(flash_attention, **arrays, **case.params)
        blocked = both(flash_attention_blocked, **arrays, **case.params, block_q=16, block_kv=8)
        for what, actual, truth, plain in zip(("o", "lse"), blocked, truths, plains, strict=True):
            with_nan += int(np.isnan(truth).any())
            agree(plain, truth, plain, case.dtype, f"{case}: plain {what}")
            agree(actual, truth, plain, case.dtype, f"{case}: blocked {what}")
    assert with_nan > 30


@pytest.mark.parametrize("form", FORMS)
def test_axes_in_another_order_in_memory_and_reversed_sequences_are_read(form):
    q, k, v = qkv()
    bshd = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    backwards = [np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1] for x in (q, k, v)]
    expected = both(form, q, k, v, causal=True)
    for arrays in (bshd, backwards):
        for one, two in zip(both(form, *arrays, causal=True), expected, strict=True):
            assert np.abs(one - two).max() < 1e-13
