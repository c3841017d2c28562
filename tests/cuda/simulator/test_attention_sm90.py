"""attention's sm90 rung: what its cases do not have. Layouts, rows that see nothing, what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.flash_attention.tile_scheduler import section_of
from dualops.spec import OPERATORS, Case
from tests.cuda.simulator.attention import BFLOAT16, checked, numbers

attend: Any = partial(dualops.cuda.flash_attention, kernel="sm90")


def test_a_section_of_many_heads_has_a_number_of_32_bits():
    shapes = {"q": (1, 8192, 100, 8), "k": (1, 1, 1, 8), "v": (1, 1, 1, 8)}
    problem = absent_problem(OPERATORS["flash_attention"], Case("", "bfloat16", shapes, {}))
    assert 8192 <= section_of(problem) < 2**31


def test_tokens_before_heads():
    q, k, v = (numbers(2, S, H, 40, seed=S + H).transpose(0, 2, 1, 3) for S, H in ((70, 2), (90, 1), (90, 1)))
    checked(attend(q, k, v, causal=True), reference.flash_attention, q, k, v, causal=True)


@pytest.mark.parametrize("width", [24, 7])  # rows of whole 16 bytes, as boxes; others one by one
def test_results_among_other_memory(width):
    q, k, v = numbers(1, 2, 70, 16), numbers(1, 1, 40, 16, seed=1), numbers(1, 1, 40, 32, seed=2)[..., :width]
    room = np.full((2, 80, 32), 7, BFLOAT16)
    out = room[None, :, 3:73, :width]
    attend(q, k, v, out=out)
    checked(out, reference.flash_attention, q, k, v)
    around = room.copy()
    around[:, 3:73, :width] = 7
    assert (around == 7).all()


@pytest.mark.parametrize("signs", [(-1, -1), (-1, 1)])  # of products with some keys, and with the others
@pytest.mark.parametrize("params", [{}, {"causal": True}, {"softcap": 1.0}])
def test_rows_whose_scores_are_below_zero(signs, params):
    """Maxima are those of words as integers, whose order is another with a sign than without."""
    q, k, v = numbers(1, 1, 70, 64), numbers(1, 1, 300, 64, seed=1), numbers(1, 1, 300, 64, seed=2)
    q, k = abs(q), abs(k) * np.where(np.arange(300) % 3, *signs)[:, None].astype(BFLOAT16)
    if signs[0] != signs[1]:
        q[:, :, ::2] = -q[:, :, ::2]
    q[:, :, 5] = 0  # whose products are zeros of either sign
    checked(attend(q, k, v, **params), reference.flash_attention, q, k, v, **params)


def test_a_query_that_is_no_number_is_its_own_affair():
    q, k, v = numbers(1, 1, 70, 16), numbers(1, 1, 40, 16, seed=1), numbers(1, 1, 40, 16, seed=2)
    whole = attend(q, k, v)
    q[0, 0, 3, 5] = np.nan
    found = attend(q, k, v)
    assert np.isnan(found[0, 0, 3].astype(np.float32)).all()
    np.testing.assert_array_equal(np.delete(found, 3, axis=2), np.delete(whole, 3, axis=2))
