"""Each option of attention, and every two together, against a formula in plain Python; what masks hide; invariants."""

import re
from itertools import product
from math import exp
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import EVERYTHING, PAIRS, bent, paired, woven
from dualops.spec.named import defaults_of
from tests.problems import values
from tests.reference.formula import attention, row_id, sees

SPEC = OPERATORS["flash_attention"]
QKV = {"q": (2, 4, 7, 3), "k": (2, 2, 11, 3), "v": (2, 2, 11, 2)}

pytestmark = pytest.mark.filterwarnings("error")


def blocked(*arrays: np.ndarray, **options: Any) -> Any:
    return reference.flash_attention_blocked(*arrays, **options, block_q=3, block_kv=4)


every_form = pytest.mark.parametrize("form", [reference.flash_attention, blocked], ids=["plain", "blocked"])


def made(params: dict[str, Any], **shapes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays in float64 by the spec's generator, and parameters."""
    case = Case("made", "float64", {**QKV, **shapes}, params)
    return values(SPEC, case), {**params, "return_lse": True}


def hold(form: Any, arrays: dict[str, Any], params: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """o and lse, as near the formula as float64 can be."""
    o, lse = form(**arrays, **params)
    expected, expected_lse = attention(arrays, params)
    assert np.abs(o - expected).max(initial=0.0) < 1e-13 * max(1.0, np.abs(expected).max(initial=0.0))
    assert np.array_equal(lse == -np.inf, expected_lse == -np.inf)
    there = expected_lse != -np.inf
    assert np.abs(lse[there] - expected_lse[there]).max(initial=0.0) < 1e-13 * max(1.0, np.abs(lse[there]).max())
    return o, lse


def branching(score: float, b: int, h: int, i: int, j: int) -> float:
    """What arrays can't do at once."""
    if i > j:
        return 0.5 * score - 1
    return exp(-score * score) if score > 0 else score * (h + 1)


def picky(b: int, h: int, i: int, j: int) -> bool:
    return i == j or (j < 3 and b == 0) or (h % 2 == 1 and i > 4)


def doubled(score: float, b: int, h: int, i: int, j: int) -> float:
    return 2 * score


PARAMS = [
    *({"causal": causal} for causal in (False, True, "top_left")),
    *({"scale": scale} for scale in (0.0, 1.0, -2.5)),
    *({"window": window} for window in [(0, 0), (3, None), (None, 2), (2, 5), (None, None), (50, 70), [4, 0]]),
    *({"causal": "top_left", "window": window} for window in [(2, 3), (None, 3), (0, None)]),
    *({"causal": True, "window": window} for window in [(2, 3), (None, 3), (0, None)]),
    *({"softcap": softcap} for softcap in (0.3, 2, 50.0)),
    *({"score_mod": score_mod} for score_mod in (bent, branching, (branching, doubled))),
    *({"mask_mod": mask_mod} for mask_mod in (woven, picky)),
    {"window": None, "softcap": None, "score_mod": None, "mask_mod": None, "dropout_p": 0.0},
]


@every_form
@pytest.mark.parametrize("lengths", [(7, 11), (11, 7)], ids=["more keys", "more queries"])
@pytest.mark.parametrize("params", PARAMS, ids=lambda params: re.sub(r" at 0x\w+", "", str(params)))
def test_each_parameter(form, params, lengths):
    Sq, Sk = lengths
    arrays, params = made(params, q=(2, 4, Sq, 3), k=(2, 2, Sk, 3), v=(2, 2, Sk, 2))
    hold(form, arrays, params)


@every_form
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 40), (17, 30), (30, 17), (70, 70)])
def test_lengths(form, causal, lengths):
    Sq, Sk = lengths
    hold(form, *made({"causal": causal}, q=(2, 4, Sq, 8), k=(2, 2, Sk, 8), v=(2, 2, Sk, 6)))


SHAPES = {
    "alibi_slopes": ({"alibi_slopes": (4,)}, {}),
    "alibi_slopes, top left": ({"alibi_slopes": (4,)}, {"causal": "top_left"}),
    "sinks": ({"sinks": (4,)}, {}),
    "sinks of rows that see nothing": ({"sinks": (4,)}, {"mask_mod": lambda b, h, i, j: i > 3}),
    "key_padding_mask": ({"key_padding_mask": (2, 11)}, {}),
    "dropout": ({"seed": ()}, {"dropout_p": 0.4}),
    "a seed alone": ({"seed": ()}, {}),
}


@every_form
@pytest.mark.parametrize("name", SHAPES)
def test_each_array(form, name):
    shapes, params = SHAPES[name]
    arrays, params = made(params, **shapes)
    _, lse = hold(form, arrays, params)
    plain = form(*(arrays[name] for name in "qkv"), return_lse=True, causal=params.get("causal", False))
    assert np.array_equal(lse, plain[1]) == (name in ("dropout", "a seed alone"))


BIAS_SHAPES = [
    tuple(size if there else 1 for size, there in zip((2, 4, 7, 11), axes, strict=True))
    for axes in product((True, False), repeat=4)
] + [(4, 7, 11), (4, 1, 1), (1, 1, 1), (7, 11), (7, 1), (1, 11), (1, 1), (11,), (1,), ()]


@every_form
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_each_way_of_broadcasting_a_bias(form, shape):
    hold(form, *made({}, bias=shape))


@every_form
@pytest.mark.parametrize("row", PAIRS, ids=range(len(PAIRS)))
def test_every_two_options_together(form, row):
    shapes, params = paired(row, (2, 4, 7, 3), (2, 11), 2)
    arrays, params = made(params, **shapes)
    hold(form, arrays, params)


@every_form
def test_every_option_at_once_moves_the_result(form):
    """Of a call with all options, none may be left out unseen."""
    every = {**EVERYTHING, "causal": "top_left", "window": (4, 3), "bias": "full"}
    shapes, params = paired(every, (2, 4, 7, 3), (2, 11), 2)
    arrays, params = made(params, **shapes)
    o, lse = hold(form, arrays, params)
    defaults = defaults_of(SPEC)
    for name in every:
        other, other_lse = form(**{**arrays, **params, name: defaults[name]})
        assert not np.allclose(o, other), name
        assert np.array_equal(lse, other_lse) == (name == "dropout_p"), name


def gappy(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j + b) % 3 != 1


NEAR = {"window": (1, 1)}
MASKS = {
    "window": (NEAR, {}),
    "causal": ({"causal": "top_left"}, {}),
    "key_padding_mask": ({}, {"key_padding_mask": (2, 11)}),
    "mask_mod": ({"mask_mod": gappy}, {}),
    "a bias of -inf": ({}, {"bias": (7, 11)}),
    "window, sinks": (NEAR, {"sinks": (4,)}),
    "window, softcap": ({**NEAR, "softcap": 1.5}, {}),
    "window, score_mod": ({**NEAR, "score_mod": bent}, {}),
    "window, bias": (NEAR, {"bias": (2, 4, 1, 11)}),
    "window, dropout": ({**NEAR, "dropout_p": 0.5}, {"seed": ()}),
}


def masked(name: str) -> tuple[dict[str, Any], dict[str, Any], np.ndarray]:
    """What backward takes in float64, the parameters, and who sees whom [B, H, Sq, Sk]."""
    params, shapes = MASKS[name]
    params = {**params, "return_lse": True}
    arrays = values(SPEC, Case("masked", "float64", {**QKV, **shapes}, params))
    visible = np.zeros((2, 4, 7, 11), bool)
    for b, h, i, j in np.ndindex(visible.shape):
        visible[b, h, i, j] = sees(arrays, params, b, h, i, j, i if params.get("causal") == "top_left" else i + 4)
    if name == "a bias of -inf":
        visible[...] = gappy(0, 0, 0, np.arange(11))
        arrays["bias"][~visible[0, 0]] = -np.inf
    assert visible.any(axis=-1).all() and not visible.all()
    return arrays, params, visible


def results(form: Any, backward: Any, arrays: dict[str, Any], params: dict[str, Any]) -> list[np.ndarray]:
    """o, lse and all gradients, for the same do and dlse."""
    o, lse = form(**arrays, **params)
    rng = np.random.default_rng(5)
    given = {"o": o, "lse": lse, "do": rng.standard_normal(o.shape), "dlse": rng.standard_normal(lse.shape)}
    return [o, lse, *backward(**arrays, **given, **params)]


def blocked_backward(**options: Any) -> Any:
    return reference.flash_attention_backward_blocked(**options, block_q=3, block_kv=4)


BOTH = [(reference.flash_attention, reference.flash_attention_backward), (blocked, blocked_backward)]
both_directions = pytest.mark.parametrize(("form", "backward"), BOTH, ids=["plain", "blocked"])


@both_directions
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_keys_and_values_that_nobody_sees_do_not_leak(form, backward, name, special):
    arrays, params, visible = masked(name)
    hidden = ~visible.reshape(2, 2, 2, 7, 11).any(axis=(2, 3))  # [B, Hkv, Sk]
    assert hidden.any() and not hidden.all()
    expected = results(form, backward, arrays, params)
    # a bias is added, and hides a score that is a number
    for where in ("v",) if name == "a bias of -inf" else ("k", "v", "kv"):
        here = {other: array.copy() for other, array in arrays.items()}
        for array in where:
            here[array][hidden] = special
        found = results(form, backward, here, params)
        assert (found[3][hidden] == 0).all() and (found[4][hidden] == 0).all()
        for one, two in zip(found, expected, strict=True):
            assert np.abs(one - two).max() < 1e-12


@both_directions
@pytest.mark.parametrize(
    ("name", "where"), [(name, where) for name in MASKS for where in "kv" if (name, where) != ("a bias of -inf", "k")]
)
def test_a_nan_reaches_the_queries_that_see_it_and_no_others(form, backward, name, where):
    arrays, params, visible = masked(name)
    key = int(np.argmax(visible[1, 2].any(axis=0) & ~visible[1, 2].all(axis=0)))
    poisoned = np.zeros((2, 4, 7), bool)
    poisoned[1, 2:] = visible[1, 2:, :, key]
    expected = results(form, backward, arrays, params)
    arrays[where][1, 1, key] = np.nan
    o, lse, dq, *_ = results(form, backward, arrays, params)
    assert np.array_equal(np.isnan(o).all(axis=-1), poisoned)
    assert np.array_equal(np.isnan(lse), poisoned & (where == "k"))
    assert np.array_equal(np.isnan(dq).all(axis=-1), poisoned)
    for one, two in zip((o, lse, dq), expected, strict=False):
        assert np.abs(one - two)[~poisoned].max() < 1e-12


@both_directions
def test_a_query_that_sees_nothing_leaves_every_gradient_alone(form, backward):
    shapes = {"q": (2, 4, 11, 3), "k": (2, 2, 7, 3), "v": (2, 2, 7, 2), "bias": (1, 4, 11, 7)}
    arrays, params = made({"causal": True}, **shapes)
    o, lse = form(**arrays, **params)
    assert (o[:, :, :4] == 0).all() and (lse[:, :, :4] == -np.inf).all()
    rng = np.random.default_rng(3)
    given = {"o": o, "lse": lse, "do": rng.standard_normal(o.shape), "dlse": rng.standard_normal(lse.shape)}
    expected = backward(**arrays, **given, **params)
    assert (expected[0][:, :, :4] == 0).all() and (expected[3][:, :, :4] == 0).all()
    for name in ("q", "do", "dlse"):
        ({**arrays, **given}[name])[:, :, :4] = np.nan
    for one, two in zip(backward(**arrays, **given, **params), expected, strict=True):
        assert np.abs(one - two).max() < 1e-12


def with_a_hole(name: str) -> tuple[dict[str, Any], dict[str, Any], np.ndarray, list[int]]:
    """`masked`, with a bias in which a key is -inf in all rows; who sees whom tells of masks alone. A row of batch 1,
    head 2, that sees that key; another key that it sees; that key.
    """
    arrays, params, visible = masked(name)
    if name == "a bias of -inf":
        visible[...] = True
    else:
        arrays["bias"] = np.zeros((1, 1, 7, 11))
    arrays["bias"] = np.broadcast_to(arrays["bias"], (2, 4, 7, 11)).copy()
    row = int(np.argmax(visible[1, 2].sum(axis=-1) >= 3))
    cause, hole = np.flatnonzero(visible[1, 2, row])[:2]
    arrays["bias"][..., hole] = -np.inf
    return arrays, params, visible, [row, cause, hole]


@both_directions
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_nan_row_reaches_the_keys_that_it_sees_and_no_others(form, backward, name, special):
    arrays, params, visible, (row, cause, _) = with_a_hole(name)
    expected = results(form, backward, arrays, params)
    arrays["bias"][1, 2, row, cause] = special
    found = results(form, backward, arrays, params)
    rows, keys = np.zeros((2, 4, 7), bool), np.zeros((2, 2, 11), bool)
    rows[1, 2, row], keys[1, 1] = True, visible[1, 2, row]
    pairs = rows[..., None] & visible
    for one, two, reached in zip(found, expected, (rows, rows, rows, keys, keys, pairs), strict=False):
        assert np.isnan(one[reached]).all()
        assert one[~reached] == pytest.approx(two[~reached], abs=1e-12)


@both_directions
def test_scores_of_minus_infinity_alone_are_like_no_key(form, backward):
    arrays, params, _, (_, _, hole) = with_a_hole("a bias of -inf")
    arrays["bias"][0, 1, 2] = -np.inf
    arrays["v"][:, :, hole] = np.nan
    o, lse, dq, dk, dv, dbias = results(form, backward, arrays, params)
    assert (o[0, 1, 2] == 0).all() and lse[0, 1, 2] == -np.inf and np.isfinite(lse).sum() == lse.size - 1
    assert (dq[0, 1, 2] == 0).all() and (dbias[0, 1, 2] == 0).all()
    for x in (o, dq, dk, dv, dbias):
        assert np.isfinite(x).all()
    assert (dk[:, :, hole] == 0).all() and (dv[:, :, hole] == 0).all() and (dbias[..., hole] == 0).all()


@every_form
@pytest.mark.parametrize("row", [row for row in PAIRS if not row["key_padding_mask"] and row["causal"]], ids=row_id)
def test_a_prefix_does_not_depend_on_the_keys_that_follow(form, row):
    """As many queries as keys, so that both ways of causal mean the same."""
    window = row["window"] and (row["window"][0], None)
    shapes, params = paired({**row, "window": window}, (2, 4, 11, 3), (2, 11), 2)
    arrays, params = made(params, **shapes)
    whole = form(**arrays, **params)
    for name in "kv":
        arrays[name][:, :, 6:] *= -3
    for one, two in zip(whole, form(**arrays, **params), strict=True):
        assert np.array_equal(one[:, :, :6], two[:, :, :6])
        assert not np.array_equal(one[:, :, 6:], two[:, :, 6:])
