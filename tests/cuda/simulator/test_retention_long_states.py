"""States of many tokens that are results, by tensor cores that round as a GPU's do: toward zero."""

from __future__ import annotations

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.spec import Case, retention as SPEC, retention_cases
from dualops.spec.retention_cases import options_of
from tests.checks import check
from tests.cuda.retention import calls_of

run, gradient = calls_of("sm90")


@pytest.mark.parametrize(
    ("function", "q", "Dv"),
    [
        (run, (1, 1, 900, 8), 72),
        (run, (1, 1, 900, 8), 136),
        (gradient, (1, 1, 300, 8), 72),
        (gradient, (1, 1, 300, 136), 8),
        (gradient, (1, 1, 300, 8), 264),
    ],
)
def test_tokens_that_keep_all(function, q, Dv, monkeypatch):
    """The last state, and the gradient of the first: narrow heads, and wide ones, by one slice, two and three."""
    monkeypatch.setattr(retention_cases, "_decays", lambda heads, _: np.ones(heads))
    shapes, params = options_of(q, Dv, gamma=1, states=1, return_state=function is run)
    case = Case("sm90", "bfloat16", shapes, params)
    with simulator.toward_zero():
        check(SPEC, case, function, backward=function is gradient, ways=("given",))


def test_sums_are_cut_off_where_they_are_asked_to_be():
    last = 2.0**-23  # of 1
    totals = np.array([1 + 0.9 * last, -1 - 0.9 * last, 1 + 1.1 * last, 1.0, np.inf, np.nan])
    near = np.array([1 + last, -1 - last, 1 + last, 1, np.inf, np.nan], np.float32)
    assert np.array_equal(simulator.rounded_sums(totals), near, equal_nan=True)
    with simulator.toward_zero():
        cut = np.array([1, -1, 1 + last, 1, np.inf, np.nan], np.float32)
        assert np.array_equal(simulator.rounded_sums(totals), cut, equal_nan=True)
        assert len(simulator.added_at_once(16)) == 4
    assert simulator.added_at_once(16) == [slice(None)]
