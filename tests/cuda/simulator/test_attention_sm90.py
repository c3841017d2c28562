"""attention's sm90 rung: what its cases do not have. Layouts, rows that see nothing, what it refuses."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.flash_attention.sm90.config import Sm90Config
from dualops.cuda.flash_attention.sm90.schedule import work_items
from dualops.cuda.flash_attention.tile_scheduler import Walk, section_of
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
def test_what_a_mask_hides_stays_where_it_is_in_slices(Sk, column):
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
