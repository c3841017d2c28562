"""attention's sm90 rung with wide heads: sequences, what masks hide, slices. Results: `test_attention_forward`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.flash_attention.sm90.config import Sm90Config
from dualops.cuda.flash_attention.sm90.schedule import work_items
from dualops.cuda.flash_attention.tile_scheduler import Walk
from tests.cuda.simulator.attention import checked, numbers

attend: Any = partial(dualops.cuda.flash_attention, kernel="sm90")


def wide(D: int, Dv: int, Sq: int = 70, Sk: int = 90, B: int = 1, H: int = 1) -> list[Any]:
    return [numbers(B, H, Sq, D), numbers(B, 1, Sk, D, seed=1), numbers(B, 1, Sk, Dv, seed=2)]


@pytest.mark.parametrize("Dv", [248, 264])
def test_sequences_have_the_bits_of_a_batch(Dv):
    """Rows of varlen, which go over Q to memory as 16 bytes or one by one, and boxes of a batch."""
    q, k, v = wide(256, Dv, 20, 50, B=2, H=2)
    o, lse = attend(q, k, v, causal=True, return_lse=True)
    tokens = [x.transpose(0, 2, 1, 3).reshape(-1, *x.shape[1::2]) for x in (q, k, v)]
    ends = [np.array((0, n, 2 * n), np.int32) for n in (20, 50)]
    room = np.full((40, 2, Dv + 3), 7, q.dtype)
    for out in (np.zeros((40, 2, Dv), q.dtype), room[..., :Dv]):
        results = out, np.zeros((2, 40), np.float32)
        params: dict[str, Any] = {"causal": True, "return_lse": True, "out": results}
        dualops.cuda.flash_attention_varlen(*tokens, *ends, kernel="sm90", max_seqlen_q=20, max_seqlen_k=50, **params)
        assert np.array_equal(out.reshape(2, 20, 2, Dv).transpose(0, 2, 1, 3), o)
        assert np.array_equal(results[1].reshape(2, 2, 20).transpose(1, 0, 2), lse)
    assert (room[..., Dv:] == 7).all()


@pytest.mark.parametrize(("Sk", "column"), [(300, 200), (70, 5), (70, 301)])  # of splits or none, of either slice
def test_what_a_mask_hides_stays_where_it_is(Sk, column):
    q, k, v = wide(256, 304, Sq=3, Sk=Sk)
    v[0, 0, 60, column] = np.nan
    params: dict[str, Any] = {"mask_mod": lambda b, h, i, j: j != 60}
    found = attend(q, k, v, **params)
    checked(found, reference.flash_attention, q, k, v, **params)
    assert np.isfinite(found.astype(np.float32)).all()


def test_slices():
    walk = Walk(total=lambda extent: 7, task=lambda number, work: number)
    one, three = work_items(walk, 2), work_items(walk, 2, slices=3, width=192)
    assert (one.total(0), one.task(5, 0)) == (7, (5, 0))
    assert three.total(0) == 21
    assert [three.task(n, 0) for n in (0, 1, 2, 3)] == [(0, 0), (0, 192), (0, 384), (1, 0)]


@pytest.mark.parametrize("config", [Sm90Config(2, 64, o_over_q=True), Sm90Config(2, 64, q_stages=1, o_over_q=True)])
def test_o_over_q_needs_a_place(config):
    with pytest.raises(ValueError, match="o of 256 columns over Q of 128"):
        config.tiles(128, 256)
