"""Sequences that lie one after another give what each gives alone, forward and backward, whatever the options."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.reference.flash_attention_varlen import OPTIONAL
from dualops.spec import OPERATORS, Case, Tag
from dualops.spec.lengths import spans_of
from dualops.spec.meta import FLOATS
from dualops.testing.terms.flash_attention import gradient_terms
from dualops.testing.truth import bind, widened
from tests.checks import call, gradient_inputs
from tests.problems import elements, random_problems, values

SPEC, ONE = OPERATORS["flash_attention_varlen"], OPERATORS["flash_attention"]
TESTED = {case.id: case for case in SPEC.tagged(Tag.TEST) + SPEC.tagged(Tag.SIM) if elements(case) <= 1 << 20}

pytestmark = pytest.mark.filterwarnings("error")


def alone(arrays: Mapping[str, Any], b: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Sequence b as batch b of a call of flash_attention, whose batches before it are zeros: options count batches."""
    queries, keys = spans_of(arrays)[b]
    part = {name: arrays[name] for name in OPTIONAL if name in arrays}
    for name in names:
        if name in ("lse", "dlse"):
            one = arrays[name][:, queries]
        else:
            one = arrays[name][keys if name in "kv" else queries].swapaxes(0, 1)
        part[name] = np.zeros((b + 1, *one.shape), one.dtype)
        part[name][b] = one
    return part


def single(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if not name.startswith(("max_seqlen", "total_k"))} | {
        "return_lse": True
    }


def hold_forward(arrays: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    o, lse = call(reference.flash_attention_varlen, SPEC.inputs, arrays, **{**params, "return_lse": True})
    assert o.shape == (*arrays["q"].shape[:2], arrays["v"].shape[2]) and o.dtype == arrays["q"].dtype
    assert lse.shape == arrays["q"].shape[1::-1]
    for b, (queries, _) in enumerate(spans_of(arrays)):
        one, one_lse = call(reference.flash_attention, ONE.inputs, alone(arrays, b, ("q", "k", "v")), **single(params))
        assert np.abs(o[queries].swapaxes(0, 1) - one[b]).max(initial=0.0) < 1e-13
        there = one_lse[b] != -np.inf
        assert np.array_equal(lse[:, queries] != -np.inf, there)
        assert np.abs(lse[:, queries][there] - one_lse[b][there]).max(initial=0.0) < 1e-13


def hold_backward(arrays: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    dq, dk, dv, *d_sinks = call(reference.flash_attention_varlen_backward, SPEC.gradient_inputs, arrays, **params)
    sums, sums_k, sums_v = np.zeros(arrays["q"].shape[1]), np.zeros_like(dk), np.zeros_like(dv)
    for b, (queries, keys) in enumerate(spans_of(arrays)):
        part = alone(arrays, b, ("q", "k", "v", "o", "lse", "do", "dlse"))
        one = call(reference.flash_attention_backward, ONE.gradient_inputs, part, **single(params))
        assert np.abs(dq[queries].swapaxes(0, 1) - one[0][b]).max(initial=0.0) < 1e-12
        sums_k[keys] += one[1][b].swapaxes(0, 1)
        sums_v[keys] += one[2][b].swapaxes(0, 1)
        if d_sinks:
            sums += one[3]  # batches of zeros add nothing: their do and dlse are 0
    for mine, other in ((dk, sums_k), (dv, sums_v)):
        assert np.abs(mine - other).max(initial=0.0) < 1e-12
    if d_sinks:
        assert np.abs(d_sinks[0] - sums).max() < 1e-12


def test_random_sequences_are_what_each_is_alone():
    options = 0
    for case in random_problems(SPEC.name, 8, 60, max_elements=2000, dtypes=["float64"]):
        arrays = gradient_inputs(SPEC, Case(case.name, case.dtype, case.shapes, {**case.params, "return_lse": True}))
        hold_forward({entry.name: arrays[entry.name] for entry in SPEC.inputs if entry.name in arrays}, case.params)
        hold_backward(arrays, case.params)
        options += len(case.shapes) > 5
    assert options > 15


@pytest.mark.parametrize(
    "case", [case for case in TESTED.values() if case.dtype == "float64"], ids=lambda case: case.id
)
def test_cases_are_what_each_sequence_is_alone(case):
    hold_forward(values(SPEC, case), case.params)
    hold_backward(gradient_inputs(SPEC, case), case.params)


@pytest.mark.parametrize("case", TESTED.values(), ids=lambda case: case.id)
def test_every_dtype_comes_near_the_truth(case):
    """P, dS and the result are rounded once each, at most 3 units of the terms; arithmetic takes some of float32's."""
    arrays = gradient_inputs(SPEC, case)
    problem = bind(SPEC, arrays, case.params, True)
    truths, found = (
        call(reference.flash_attention_varlen_backward, SPEC.gradient_inputs, each, **case.params)
        for each in (widened(arrays), arrays)
    )
    terms = gradient_terms(arrays, problem)
    limit = {"float64": 0.0, "float32": 16 * 2.0**-24, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}[case.dtype]
    for name, actual, truth in zip(problem.outputs(SPEC.gradients), found, truths, strict=True):
        assert actual.shape == truth.shape
        assert actual.dtype == arrays[name[1:]].dtype
        assert np.abs(actual.astype(np.float64) - truth).max(initial=0.0) <= limit * terms[name]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sequence_does_not_depend_on_its_neighbours(dtype):
    shapes = {"q": (9, 2, 4), "k": (12, 1, 4), "v": (12, 1, 3), "cu_seqlens_q": (4,), "cu_seqlens_k": (4,)}
    params = {"max_seqlen_q": 4, "max_seqlen_k": 5, "causal": True, "return_lse": True}
    arrays = values(SPEC, Case("apart", dtype, shapes, params))
    arrays |= {"cu_seqlens_q": np.array([0, 4, 7, 9], np.int32), "cu_seqlens_k": np.array([0, 5, 8, 12], np.int32)}
    plain = call(reference.flash_attention_varlen, SPEC.inputs, arrays, **params)
    for name, rows in (("q", [4, 5, 6]), ("k", [5, 6, 7]), ("v", [5, 6, 7])):
        arrays[name][rows] = np.nan
    o, lse = call(reference.flash_attention_varlen, SPEC.inputs, arrays, **params)
    outside = [0, 1, 2, 3, 7, 8]
    assert np.array_equal(o[outside], plain[0][outside]) and np.array_equal(lse[:, outside], plain[1][:, outside])
    assert np.isnan(o[4:7].astype(np.float64)).all() and np.isnan(lse[:, 4:7]).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_ranges_are_the_sequences_that_a_copy_of_their_keys_gives(dtype):
    """Ranges in any order, one in another, one twice, one empty, and keys of none: o in every bit, gradients summed."""
    shapes = {"q": (11, 4, 6), "k": (12, 2, 6), "v": (12, 2, 3), "cu_seqlens_q": (6,), "k_starts": (5,)}
    shapes["k_lengths"] = (5,)
    params = {"max_seqlen_q": 4, "max_seqlen_k": 6, "causal": True, "window": (3, None), "return_lse": True}
    arrays = gradient_inputs(SPEC, Case("ranges", dtype, shapes, params))
    starts, lengths = np.array([5, 0, 5, 3, 1], np.int32), np.array([4, 2, 4, 0, 6], np.int32)
    arrays |= {"cu_seqlens_q": np.array([0, 3, 4, 7, 8, 11], np.int32), "k_starts": starts, "k_lengths": lengths}
    rows = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths)])
    copied = {name: x for name, x in arrays.items() if name not in ("k_starts", "k_lengths")}
    copied |= {name: arrays[name][rows] for name in "kv"}
    copied["cu_seqlens_k"] = np.array([0, *np.cumsum(lengths)], np.int32)
    for one, two in zip(*(call(reference.flash_attention_varlen, SPEC.inputs, x, **params) for x in (arrays, copied))):
        assert one.tobytes() == two.tobytes()
    found, parts = (
        call(reference.flash_attention_varlen_backward, SPEC.gradient_inputs, x, **params) for x in (arrays, copied)
    )
    assert found[0].tobytes() == parts[0].tobytes()
    for mine, part in zip(found[1:], parts[1:]):
        sums = np.zeros(mine.shape, np.float64 if dtype == "float64" else np.float32)
        for row, each in zip(rows, part):
            sums[row] += each
        assert mine.tobytes() == sums.astype(mine.dtype).tobytes()
        assert (mine[9:] == 0).all() and (mine[:9] != 0).any(axis=(1, 2)).all()


def test_longer_limits_change_nothing():
    case = next(case for case in SPEC.tagged(Tag.SIM) if case.name == "sim_varlen" and case.dtype == "float32")
    arrays = values(SPEC, case)
    plain = call(reference.flash_attention_varlen, SPEC.inputs, arrays, **case.params)
    more = {**case.params, "max_seqlen_q": 1000, "max_seqlen_k": 1000}
    for one, two in zip(plain, call(reference.flash_attention_varlen, SPEC.inputs, arrays, **more), strict=True):
        assert np.array_equal(one, two)
