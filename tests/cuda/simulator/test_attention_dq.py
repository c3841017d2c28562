"""attention's gradient on the sm90 rung: dq by each layout, what a mask hides, what the rung refuses.

Masks and options: `test_attention_gradients`, whose calls make dq too.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda import simulator
from dualops.cuda.flash_attention.sm90 import backward as sm90_backward
from dualops.cuda.flash_attention.sm90.dq_config import DqConfig
from tests.cuda.configs import changed
from tests.cuda.simulator.attention import named, numbers
from tests.cuda.simulator.gradients import arrays_for, checked_arrays, gradient, gradient_varlen, served


@pytest.fixture(autouse=True)
def two_kernels() -> Iterator[None]:
    """dq is not made with dk and dv."""
    with served():
        yield


def test_tokens_before_heads_and_rows_that_are_no_boxes():
    """dq lies as q; or among other memory, element by element."""
    q, k, v, do = (x.transpose(0, 2, 1, 3) for x in arrays_for((2, 70, 2, 24), (2, 50, 1, 24), 40))
    dq, dk, dv = checked_arrays(q, k, v, do)
    assert dq.strides == q.strides
    o, lse = reference.flash_attention(q, k, v, return_lse=True)
    room = np.full((2, 2, 80, 30), 7, q.dtype)
    out = (room[:, :, 3:73, 1:25], np.empty_like(dk), np.empty_like(dv))
    gradient(q, k, v, o, lse, do, out=out)
    assert np.array_equal(out[0], dq)
    around = room.copy()
    around[:, :, 3:73, 1:25] = 7
    assert (around == 7).all()


def test_softcaps_of_a_sequence_alone_and_before_another():
    """Whether products are small is asked once a warp, but not of rows that another sequence has there."""
    q, k, v, do = (2 * x for x in arrays_for((75, 1, 64), (75, 1, 64), 64))
    found = []
    for ends, (q_all, k_all) in (([0, 75], (q, k)), ([0, 75, 95], (np.concatenate([x, 100 * x[:20]]) for x in (q, k)))):
        v_all, do_all = (x if len(ends) == 2 else np.concatenate([x, x[:20]]) for x in (v, do))
        cu, params = np.array(ends, np.int32), {"softcap": 100.0, "max_seqlen_q": 75, "max_seqlen_k": 75}
        o, lse = reference.flash_attention_varlen(q_all, k_all, v_all, cu, cu, return_lse=True, **params)
        gradients = gradient_varlen(q_all, k_all, v_all, o, lse, do_all, cu, cu, **params)
        found.append([x[:75] for x in gradients])
    alone, before = found
    assert all((x == y).all() for x, y in zip(alone, before, strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{}, {"mask_mod": lambda b, h, i, j: j != 17}, {"softcap": 2.0}], ids=named)
def test_what_a_mask_hides_stays_where_it_is(params, value):
    """Few queries see it, and few keys are seen: rows are recomputed key by key."""
    q, k, v, do = arrays_for((1, 1, 26, 16), (1, 1, 20, 16), 24)
    v[0, 0, 17, 5] = k[0, 0, 18] = value
    dq, _, _ = checked_arrays(q, k, v, do, causal=True, **params)
    assert np.isfinite(dq[:, :, :23].astype(np.float32)).all()


def test_rows_that_see_nothing_have_no_gradient_whatever_do_holds():
    q, k, v, do = arrays_for((1, 1, 60, 16), (1, 1, 20, 16), 16)
    do[0, 0, 5] = q[0, 0, 7] = np.nan
    dq, _, _ = checked_arrays(q, k, v, do, causal=True)
    assert not dq[:, :, :40].any()


SMALL = (
    DqConfig(1, 16, q_stages=2),
    DqConfig(1, 32, stages=3, dq_over_q=True),
    DqConfig(2, 16, turns=False),
    DqConfig(3, 16),
)


@pytest.mark.parametrize(("config", "order"), [*zip(SMALL, ("forward", "reversed") * 2)], ids=str)
def test_each_step_of_the_kernel(config, order):
    arrays = arrays_for((1, 2, 200, 16), (1, 1, 70, 16), 16)
    instead = {"dq_configs": lambda *_: iter([(config, "small")])}
    with changed("flash_attention", (sm90_backward, instead)), simulator.order(order):
        checked_arrays(*arrays, causal=True)


SMALL_BIAS = (
    (DqConfig(1, 16, bias_stages=2), (2, 2, 100, 72)),
    (DqConfig(2, 64, dq_over_q=True, bias_stages=1), (1, 2, 100, 72)),
    (DqConfig(2, 32, turns=False, bias_stages=1), (2, 1, 100, 72)),
    (DqConfig(1, 48, bias_stages=1), (100, 72)),
)


@pytest.mark.parametrize(("config", "shape", "order"), [(*one, "forward") for one in SMALL_BIAS], ids=str)
def test_a_bias_in_boxes(config, shape, order):
    """Of several tiles, within their ends; with what comes before it and after, and keys that it hides itself."""
    bias = numbers(*shape, seed=5)
    bias[..., 20:23] = -np.inf
    arrays = arrays_for((2, 2, 100, 16), (2, 1, 72, 16), 24)
    params: dict[str, Any] = {"softcap": 4.0, "causal": True, "dropout_p": 0.2, "seed": 3}
    instead = {"dq_configs": lambda *_: iter([(config, "small")])}
    with changed("flash_attention", (sm90_backward, instead)), simulator.order(order):
        checked_arrays(*arrays, bias=bias, **params)


def test_which_biases_dq_has_in_boxes():
    q, k, v, do = arrays_for((1, 2, 70, 16), (1, 1, 72, 16), 16)
    o, lse = reference.flash_attention(q, k, v, return_lse=True)
    for bias, reason in (
        (numbers(2, 70, 72), "the bias in boxes"),
        (numbers(1, 72), "the bias from memory"),
        (numbers(70, 1), "the bias from memory"),
        (numbers(72, 70).T, "the bias from memory"),
    ):
        plan = dualops.cuda.plan("flash_attention", q, k, v, o, lse, do, bias=bias, backward=True, bias_gradient=False)
        assert reason in plan.choice.reason, bias.shape


def test_a_tile_of_dq_has_no_place_over_two_of_q():
    with pytest.raises(ValueError, match="dq over Q in 2 stages, expected 1"):
        DqConfig(2, 64, q_stages=2, dq_over_q=True).tiles(64, 64)
