"""attention's sm80 rung: layouts that its cases do not have; the rest is in `test_attention_forward`."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.flash_attention.sm80.rows import Vectors
from tests.cuda.simulator.attention import checked, numbers

attend: Any = partial(dualops.cuda.flash_attention, kernel="sm80")


def test_one_token():
    """An axis of one element may have any stride, here of 25 elements: tiles ask for rows beyond it."""
    q, k, v = (numbers(1, 2, 9, 25, seed=seed)[:, :, 3:4, 1:17] for seed in range(3))
    arrays = [np.lib.stride_tricks.as_strided(x.copy(), x.shape, (64, 32, 50, 2)) for x in (q, k, v)]
    checked(attend(*arrays), reference.flash_attention, *arrays)


@pytest.mark.parametrize(
    ("width", "room", "first", "vector"),
    [(24, 40, 8, 8), (20, 20, 0, 4), (18, 22, 2, 2), (7, 16, 1, 1), (33, 33, 0, 1), (70, 71, 0, 1)],
)
def test_rows_at_any_place(width, room, first, vector):
    q, k, v = (numbers(1, 1, 36, room, seed=seed)[..., first : first + width] for seed in range(3))
    out = np.full((36, room), 7, q.dtype)
    o = out[None, None, :, first : first + width]
    plan = dualops.cuda.plan("flash_attention", q, k, v, out=o, kernel="sm80")
    of_results = vector if vector * q.itemsize == 16 else 1
    assert f"{Vectors(vector, vector, vector, of_results)}" in plan.steps[0].kernel.identity
    attend(q, k, v, causal=True, out=o)
    checked(o, reference.flash_attention, q, k, v, causal=True)
    around = out.copy()
    around[:, first : first + width] = 7
    assert (around == 7).all()


def test_tokens_before_heads_and_one_batch_of_keys_for_all():
    q = numbers(2, 70, 2, 40).transpose(0, 2, 1, 3)
    k, v = (numbers(1, 40, 1, 40, seed=seed).transpose(0, 2, 1, 3) for seed in (1, 2))
    found = attend(q, *(np.broadcast_to(x, (2, 1, 40, 40)) for x in (k, v)), causal="top_left")
    dense = [np.concatenate((x, x)) for x in (k, v)]
    checked(found, reference.flash_attention, q, *dense, causal="top_left")
