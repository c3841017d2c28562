"""Retention's sm80 rung and its gradient: chunks, states, decays, normalizers."""

from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.spec import Case, compare, retention as SPEC
from dualops.spec.meta import numpy_dtype
from dualops.spec.retention_cases import options_of
from tests.checks import check
from tests.cuda.configs import changed
from tests.cuda.retention import SMALL, STATES, calls_of, numbers

run, gradient = calls_of("sm80")


@pytest.mark.parametrize(
    ("function", "dtype", "q", "Dv", "options"),
    [
        (run, "bfloat16", (1, 2, 70, 72), 8, {**STATES, "gamma": 1}),
        (run, "float16", (1, 1, 40, 8), 130, {**STATES, "normalize": "signed"}),  # two slices of columns
        (run, "bfloat16", (1, 1, 70, 33), 7, {**STATES, "steps": 1}),
        (run, "float16", (1, 1, 40, 16), 8, {"form": "parallel", "normalize": "abs", "scale": -0.7, "Sk": 67}),
        (gradient, "bfloat16", (1, 1, 70, 8), 24, {**STATES, "normalize": "signed"}),
        (gradient, "float16", (1, 1, 40, 16), 8, {**STATES, "steps": 1}),
        (gradient, "bfloat16", (1, 1, 40, 16), 8, {"form": "parallel", "mask": 1, "normalize": "signed", "Sk": 67}),
    ],
)
def test_lengths_states_and_decays(function, dtype, q, Dv, options):
    """Under the accuracy rule; two heads with a gamma have 1 and 0.01."""
    shapes, params = options_of(q, Dv, **options)
    with changed("retention", SMALL):
        check(SPEC, Case("sm80", dtype, shapes, params), function, backward=function is gradient, ways=("given",))


def test_scores_and_states_beyond_float16():
    """What is divided at the end is as large as float32 holds."""
    q, k, v = (
        numbers(1, 1, 70, 16, seed=seed, dtype="float16") * np.float16(scale)
        for seed, scale in ((0, 99), (1, 99), (2, 1))
    )
    truth = reference.retention(*(x.astype(np.float64) for x in (q, k, v)), scale=1.0, normalize="signed")
    baseline = reference.retention(q, k, v, scale=1.0, normalize="signed")
    with changed("retention", SMALL):
        found = run(q, k, v, scale=1.0, normalize="signed")
    result = compare(found, truth, baseline, dtype="float16", floor=SPEC.floor)
    assert result.passed, result.message


def test_who_takes_what():
    """Tokens or widths that are few go by simt unless the rung is asked for; the recurrent form and float32 always."""

    def rung(S: int, D: int, dtype: str = "float16", **params: Any) -> str:
        x = np.empty((1, 2, S, D), numpy_dtype(dtype))
        return dualops.cuda.plan("retention", x, x, x, **params).choice.rung

    assert [rung(64, 64), rung(32, 64), rung(64, 16), rung(64, 64, "float32")] == ["sm80", "simt", "simt", "simt"]
    assert rung(64, 64, form="recurrent") == "simt" and rung(32, 64, kernel="sm80") == "sm80"
    with pytest.raises(NotImplementedError, match="sm80"):
        rung(64, 64, "float32", kernel="sm80")
