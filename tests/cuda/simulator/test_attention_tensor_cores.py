"""What attention's rungs on tensor cores have in common: sequences, rows by themselves, what a mask hides."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.tile.fast_math import fast_tanh_curve, fast_tanh_slope, near_tanh
from tests.cuda.simulator.attention import BFLOAT16, checked, named, numbers
from tests.cuda.simulator.gradients import VARLEN, arrays_for, fused, gradient_varlen, held, served

attend: Any = dualops.cuda.flash_attention


# rung, dtype, heads' width, how the gradient is made (None: forward), parameters
SEQUENCES: list[Any] = [
    ("sm80", BFLOAT16, 16, None, {"causal": True}),
    ("sm90", BFLOAT16, 16, None, {"causal": True}),
    *(("sm90", np.float32, width, None, {"causal": True}) for width in (16, 72)),
    *(("sm90", np.float32, width, nullcontext, {"causal": True}) for width in (16, 72)),
    ("sm90", BFLOAT16, 16, served, {"causal": True}),
    ("sm90", BFLOAT16, 16, served, {"softcap": 2.0, "dropout_p": 0.3, "seed": 1}),
    ("sm90", BFLOAT16, 64, partial(fused, operator=VARLEN), {}),
]


@pytest.mark.parametrize(("rung", "dtype", "width", "way", "params"), SEQUENCES)
def test_sequences_one_after_another(rung, dtype, width, way, params):
    """Empty ones, and ends within a tile: a sequence neither reads the next one's keys nor writes to its rows."""
    ends_q, ends_k = (np.array(ends, np.int32) for ends in ((0, 5, 5, 75, 77), (0, 30, 47, 47, 60)))
    q, k, v, do = arrays_for((77, 2, width), (60, 1, width), 24, dtype)
    k[47] = v[47] = np.nan  # the first key of the last sequence
    tokens, lengths = (q, k, v, ends_q, ends_k), {"max_seqlen_q": 70, "max_seqlen_k": 30, **params}
    if way is None:
        found = dualops.cuda.flash_attention_varlen(*tokens, kernel=rung, **lengths)
        checked(found, reference.flash_attention_varlen, *tokens, **lengths)
    else:
        o, lse = reference.flash_attention_varlen(*tokens, return_lse=True, **lengths)
        arrays = (q, k, v, o, lse, do, ends_q, ends_k)
        with way():
            gradients = gradient_varlen(*arrays, **lengths)
        held(gradients, *arrays, **lengths)
        found = gradients[0]
    assert np.isfinite(found[:75].astype(np.float32)).all()


@pytest.mark.parametrize(("rung", "D", "Sq", "Sk"), [("sm80", 32, 70, 100), ("sm90", 72, 70, 150)])
def test_rows_do_not_depend_on_other_rows(rung, D, Sq, Sk):
    """The same bits in a batch, alone, without lse, and as a sequence: of whatever width, varlen has the same tiles."""
    q, k, v = numbers(2, 2, Sq, D), numbers(2, 1, Sk, D, seed=1), numbers(2, 1, Sk, D, seed=2)
    together = attend(q, k, v, causal=True, return_lse=True, kernel=rung)
    alone = attend(q[1:2], k[1:2], v[1:2], causal=True, return_lse=True, kernel=rung)
    ends_q, ends_k = (np.array((0, n), np.int32) for n in (Sq, Sk))
    tokens = [x[1].transpose(1, 0, 2) for x in (q, k, v)]
    packed: dict[str, Any] = {"causal": True, "max_seqlen_q": Sq, "max_seqlen_k": Sk, "kernel": rung}
    one = dualops.cuda.flash_attention_varlen(tokens[0], tokens[1], tokens[2], ends_q, ends_k, **packed)
    assert all(np.array_equal(many[1:2], few) for many, few in zip(together, alone, strict=True))
    assert np.array_equal(attend(q, k, v, causal=True, kernel=rung).view(np.uint16), together[0].view(np.uint16))
    assert np.array_equal(one.transpose(1, 0, 2)[None], alone[0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("rung", "dtype"), [("simt", np.float64), ("simt", np.float32), ("sm80", BFLOAT16), ("sm90", BFLOAT16)]
)
def test_what_a_mask_hides_stays_where_it_is(rung, dtype, value):
    q, k, v = (numbers(1, 1, *shape, seed=sum(shape)).astype(dtype) for shape in ((40, 16), (50, 16), (50, 24)))
    v[0, 0, 46, 5] = k[0, 0, 47] = value
    for params in ({"causal": True}, {"mask_mod": lambda b, h, i, j: j != 46, "causal": True}):
        found = attend(q, k, v, kernel=rung, **params)
        checked(found, reference.flash_attention, q, k, v, **params)
        assert np.isfinite(found[:, :, :36].astype(np.float32)).all()


@pytest.mark.parametrize("rung", ["sm80", "sm90"])
def test_scores_beyond_a_softcap(rung):
    """Rows of a warp whose scores all lie below it take another path; NaN and infinities are unchanged."""
    q, k, v = numbers(1, 1, 70, 64), numbers(1, 1, 80, 64, seed=1), numbers(1, 1, 80, 64, seed=2)
    q[0, 0, 16:20] *= 40
    q[0, 0, 40, 0] = np.inf
    q[0, 0, 50, 0] = np.nan
    found = attend(q, k, v, softcap=5.0, return_lse=True, kernel=rung)
    checked(found, reference.flash_attention, q, k, v, softcap=5.0)


@pytest.mark.parametrize(
    "params",
    [
        {"causal": True, "dropout_p": 0.3, "seed": 7},
        {"window": (9, 4)},
        {"causal": True, "sinks": np.array([-300], np.float32)},
        {"causal": True, "mask_mod": lambda b, h, i, j: (i + j) % 3 != 0},
    ],
    ids=named,
)
def test_softcaps_behind_masks(params):
    """What a mask hides is no score of -softcap; that of an infinite key is. The first rows see nothing at all; others
    have scores of all sizes.
    """
    q, k, v = numbers(1, 1, 150, 64), numbers(1, 1, 130, 64, seed=1), numbers(1, 1, 130, 64, seed=2)
    q[0, 0, 64:] *= np.repeat(np.array([0.1, 0.4, 1], BFLOAT16), 32)[:86, None]
    k[0, 0, 60, 0] = -np.inf
    found = attend(q, k, v, softcap=2.0, return_lse=True, kernel="sm90", **params)
    checked(found, reference.flash_attention, q, k, v, softcap=2.0, **params)


@pytest.mark.parametrize("more", [{}, {"sinks": np.array([0.5], np.float32), "window": (90, 90)}], ids=list)
def test_softcaps_of_a_sequence_alone_and_before_another(more):
    """Whether products are small is asked once a warp, but not of queries that another sequence has there."""
    q, k, v = 2 * numbers(75, 1, 64), numbers(128, 1, 64, seed=1), numbers(128, 1, 64, seed=2)
    alone, behind = [], [100 * q[:20], k, v]
    varlen: Any = partial(dualops.cuda.flash_attention_varlen, kernel="sm90")
    for others in ([], behind):
        tokens = [np.concatenate([own, *others[n : n + 1]]) for n, own in enumerate((q, k, v))]
        cu_q, cu_k = (np.array([0, n, len(x)][: 2 + bool(others)], np.int32) for n, x in zip((75, 128), tokens))
        params: dict[str, Any] = {"softcap": 100.0, "max_seqlen_q": 75, "max_seqlen_k": 128, **more}
        alone.append(varlen(*tokens, cu_q, cu_k, return_lse=True, **params))
    (o, lse), (o_before, lse_before) = alone
    assert (o == o_before[:75]).all() and (lse == lse_before[:, :75]).all()


@pytest.mark.parametrize("rate", [2.0**-30, 0.002, 0.7, 3e5, 2.0**25])
def test_the_curve_of_a_softcap(rate):
    """Of all numbers, and of small ones by polynomials, as far as each is for; not where a rate has no fifth power."""
    curve, rate, size, less = fast_tanh_curve(), np.float32(rate), np.float32(3), np.float32(0.5)
    numbers, (near, nearer, nearest) = curve.numbers(rate, size), curve.nearer
    for (verb, is_for), bound in (((curve.any, lambda *_: True), 4), (near, 0.999), (nearer, 0.299), (nearest, 0.114)):
        x = np.linspace(-bound, bound, 1001).astype(np.float32) / rate
        if is_for(x[-1], numbers):
            right = 3 * np.tanh(x.astype(np.float64) * np.float64(rate)) - 0.5
            assert np.abs(np.array([verb(each, numbers, less) for each in x], np.float64) - right).max() < 3 * 4e-7
        else:
            assert verb is not near[0] and not 1e-6 < rate < 1e6
    for (_, is_for), bound in ((near, 1.001), (nearer, 0.301), (nearest, 0.116)):
        assert not any(is_for(x, numbers) for x in (np.float32(bound) / rate, np.float32(np.inf), np.float32(np.nan)))
    assert [curve.any(np.float32(sign * np.inf), numbers, less) for sign in (-1, 1)] == [-3.5, 2.5]
    assert np.isnan(curve.any(np.float32(np.nan), numbers, less))


def test_the_polynomial_of_a_softcap():
    x = np.linspace(-1, 1, 4001, dtype=np.float32)
    found = np.array([near_tanh(each, np.float32(1), np.float32(1)) for each in x], np.float64)
    assert np.abs(found - np.tanh(x.astype(np.float64))).max() < 4e-7
    assert np.abs(found[2001:] / np.tanh(x[2001:].astype(np.float64)) - 1).max() < 4e-6


def test_the_slope_of_a_softcap():
    """Also where 1 - tanh**2 would have lost all digits; 0 where it is smaller than any number."""
    x = np.concatenate([np.linspace(-40, 40, 4001), [-90, 90, -np.inf, np.inf]]).astype(np.float32)
    with np.errstate(over="ignore"):
        found = np.array([fast_tanh_slope(each, np.float32(1)) for each in x], np.float64)
    wide = x.astype(np.float64)
    right = 1 / np.cosh(np.clip(wide, -45, 45)) ** 2
    assert (np.abs(found[:4001] / right[:4001] - 1) < 1e-6 + 2.4e-7 * np.abs(wide[:4001])).all()
    assert (found[4001:] == 0).all()
    assert np.isnan(fast_tanh_slope(np.float32(np.nan), np.float32(1)))
