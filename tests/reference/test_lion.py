"""Lion's reference against loops over Python's floats, bit for bit; lists, masters, lr, and calls that are wrong."""

import re
from collections.abc import Sequence
from math import inf, nan
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dualops import reference
from dualops.spec.meta import FLOATS, compute_dtype, numpy_dtype

pytestmark = pytest.mark.filterwarnings("error")  # no NumPy warning reaches a user
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.3, -2.5, 1e-3, 7.0, 1e-30, inf, -inf, nan]


def drawn(dtype: str, count: int = 400, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 2, count)
    numbers[rng.random(count) < 0.1] = 0
    numbers[:144] = np.repeat(NUMBERS, 12) if seed % 2 else np.tile(NUMBERS, 12)
    return numbers.astype(numpy_dtype(dtype))


def step(
    p: float, g: float, m: float, lr: float, betas: Sequence[float], weight_decay: float, number: Any
) -> tuple[float, float]:
    """What a parameter and its momentum become, in Python's floats rounded to `number` after each operation."""

    def rounded(x: float) -> float:
        return float(number(x))

    beta1, beta2 = map(rounded, betas)
    rest1, rest2 = (rounded(1 - beta) for beta in betas)
    lr, weight_decay = rounded(lr), rounded(weight_decay)
    c = rounded(rounded(beta1 * m) + rounded(rest1 * g))
    sign = 1.0 if c > 0 else -1.0 if c < 0 else c if c != c else 0.0
    kept = rounded(1.0 - rounded(lr * weight_decay))
    p = rounded(rounded(p * kept) - rounded(lr * sign))
    return p, rounded(rounded(beta2 * m) + rounded(rest2 * g))


def same(one: np.ndarray, two: np.ndarray) -> bool:
    """The same bits, a NaN like any other."""
    bits = np.dtype(f"u{one.itemsize}")
    nans = np.isnan(one.astype(np.float64)) & np.isnan(two.astype(np.float64))
    return one.dtype == two.dtype and one.shape == two.shape and bool(((one.view(bits) == two.view(bits)) | nans).all())


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_operation_is_rounded_by_itself(dtype, weight_decay, betas, master):
    number = numpy_dtype(compute_dtype(dtype)).type
    p, g, m = drawn(dtype, seed=0), drawn(dtype, seed=1), drawn(dtype, seed=2)
    wide = drawn(compute_dtype(dtype), seed=4) if master else None
    found = reference.lion(p, g, m, 0.003, betas=betas, weight_decay=weight_decay, master=wide)
    with np.errstate(all="ignore"):
        source = p if wide is None else wide
        pairs = [
            step(float(a), float(b), float(c), 0.003, betas, weight_decay, number) for a, b, c in zip(source, g, m)
        ]
        new_p, new_m = (np.array(each).astype(number) for each in zip(*pairs, strict=True))
        assert same(found[0], new_p.astype(p.dtype))
        assert same(found[1], new_m.astype(m.dtype))
    assert len(found) == 2 + master
    if master:
        assert same(found[2], new_p)


def test_lr_as_a_number_and_as_an_array():
    p, g, m = drawn("float32"), drawn("float32", seed=1), drawn("float32", seed=2)
    lr: Any
    expected = reference.lion(p, g, m, np.float32(0.1), weight_decay=0.3)
    for lr in (0.1, np.float64(0.1), np.array(0.1), np.array(0.1, np.float32)):
        for one, two in zip(reference.lion(p, g, m, lr, weight_decay=0.3), expected, strict=True):
            assert same(one, two)
    assert same(reference.lion(p, g, m, 1, weight_decay=0)[0], reference.lion(p, g, m, 1.0)[0])


def test_lists_are_their_tensors_one_by_one():
    params = [drawn("bfloat16"), drawn("float32").reshape(20, 20), drawn("float64")[:0], np.array(drawn("float32")[3])]
    grads = [drawn("float32", seed=1), *(np.ones_like(p) for p in params[1:])]
    momenta = [drawn("float16", seed=2), *(np.ones_like(p) for p in params[1:])]
    before = [x.tobytes() for x in (*params, *grads, *momenta)]
    found = reference.lion(params, grads, tuple(momenta), lr=0.1, weight_decay=0.1)
    assert [x.tobytes() for x in (*params, *grads, *momenta)] == before
    for i, (p, g, m) in enumerate(zip(params, grads, momenta, strict=True)):
        for one, two in zip((each[i] for each in found), reference.lion(p, g, m, 0.1, weight_decay=0.1), strict=True):
            assert type(one) is np.ndarray and same(one, two)
    masters = [p.astype(np.float64 if p.dtype == np.float64 else np.float32) for p in params]
    assert len(reference.lion(params, grads, momenta, 0.1, master=masters)) == 3
    assert reference.lion([], [], [], 0.1) == ([], [])


def test_axes_in_any_order_and_strides_of_any_kind():
    p, g, m = (drawn("float32", seed=seed).reshape(20, 20) for seed in range(3))
    expected = reference.lion(p, g, m, 0.1)
    odd = np.asfortranarray(p), np.repeat(g, 2, axis=1)[:, ::2], m[::-1].copy()[::-1]
    for one, two in zip(reference.lion(*odd, 0.1), expected, strict=True):
        assert same(np.ascontiguousarray(one), two)


P = np.ones(3, np.float32)
ERRORS: dict[type[Exception], list[tuple[tuple[Any, ...], dict[str, Any], str]]] = {
    ValueError: [
        ((P, P[:2], P, 0.1), {}, "lion: grads has shape (2,), params has shape (3,), expected the same"),
        (([P, P], [P, P], [P, P[:1]], 0.1), {},
         "lion: momenta[1] has shape (1,), params[1] has shape (3,), expected the same"),
        (([P, P], [P], [P, P], 0.1), {}, "lion: grads has 1 tensors, params has 2, expected the same"),
        ((P, P, P, nan), {}, "lion: lr is nan, expected a finite number"),
        ((P, P, P, P), {}, "lion: lr has 1 axes (3,), expected 0: []"),
        ((P, P, P, 0.1), {"betas": (0.9, 1.5)}, "lion: betas is (0.9, 1.5), expected two numbers from 0 to 1"),
        ((P, P, P, 0.1), {"weight_decay": -0.1}, "lion: weight_decay is -0.1, expected 0 or more"),
    ],
    TypeError: [
        (([P], P, [P], 0.1), {}, "lion: grads is a ndarray, params is a list, expected a list"),
        ((P, [P], P, 0.1), {}, "lion: grads is a list, expected a numpy.ndarray"),
        ((P, P.astype(np.float16), P, 0.1), {},
         "lion: grads has dtype float16, params has dtype float32, expected float32"),
        (([P], [P], [P.astype(np.float64)], 0.1), {},
         "lion: momenta[0] has dtype float64, params[0] has dtype float32, expected float32 or float16 or bfloat16"),
        ((P.astype(np.float16), P, P, 0.1), {"master": P.astype(np.float16)},
         "lion: master has dtype float16, params has dtype float16, expected float32"),
        ((P.astype(int), P, P, 0.1), {},
         "lion: params has dtype int64, expected one of float64, float32, float16, bfloat16"),
        ((P, P, P, "0.1"), {}, "lion: lr is a str, expected a number, or an array without axes"),
        ((P, P, P, True), {}, "lion: lr is a bool, expected a number, or an array without axes"),
        ((P, P, P, None), {}, "lion: lr is a NoneType, expected a number, or an array without axes"),
        ((P, P, P, np.array(1, ml_dtypes.bfloat16)), {},
         "lion: lr has dtype bfloat16, expected one of float32, float64"),
        ((P, P, P, 0.1), {"betas": 0.9}, "lion: betas is 0.9, expected two numbers"),
        ((P, P, P, 0.1), {"betas": (0, 0, 0)}, "lion: betas is (0, 0, 0), expected two numbers"),
        ((P, P, P, 0.1), {"weight_decay": None}, "lion: weight_decay is None, expected a number"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "args", "options", "message"), [(error, *row) for error in ERRORS for row in ERRORS[error]]
)
def test_errors(error, args, options, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        reference.lion(*args, **options)
