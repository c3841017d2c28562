"""matmul in NumPy: against loops, gradients against finite differences, tf32 by its bits."""

from itertools import product
from math import erf, exp, sqrt
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.reference import matmul_tiled
from dualops.reference.matmul import as_tf32
from dualops.spec import OPERATORS, Tag, compare
from dualops.spec.matmul import ACTIVATIONS, shapes_of
from dualops.spec.meta import FLOATS, numpy_dtype
from tests.problems import values

SPEC = OPERATORS["matmul"]
matmul: Any = reference.matmul  # results and arguments by name are of many types
matmul_backward: Any = reference.matmul_backward
EMPTY = [case for case in SPEC.tagged(Tag.EDGE) if any(0 in shape for shape in case.shapes.values())]
LAYOUTS = ["nn", "nt", "tn", "tt"]
BATCHES = [((), ()), ((3,), (3,)), ((2,), ()), ((), (2,)), ((2, 1), (1, 3)), ((1,), (2, 2))]

pytestmark = pytest.mark.filterwarnings("error")  # no NumPy warning reaches a user


def arrays_of(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def act(z: float, activation: str | None) -> float:
    if activation == "relu":
        return max(z, 0.0)
    if activation == "gelu":
        return 0.5 * z * (1 + erf(z / sqrt(2)))
    return z / (1 + exp(-z)) if activation == "silu" else z


@pytest.mark.parametrize(("layout", "batches"), list(product(LAYOUTS, BATCHES)), ids=str)
def test_against_loops(layout, batches):
    shapes, params = shapes_of(3, 4, 5, layout=layout, a=batches[0], b=batches[1], bias=True)
    x = arrays_of(shapes)
    activation = (None, *ACTIVATIONS)[LAYOUTS.index(layout)]
    y, z = matmul(**x, **params, activation=activation, return_preactivation=True)
    a = x["a"].swapaxes(-1, -2) if layout[0] == "t" else x["a"]
    b = x["b"].swapaxes(-1, -2) if layout[1] == "t" else x["b"]
    batch = np.broadcast_shapes(*batches)
    assert y.shape == z.shape == (*batch, 3, 4)
    a, b = np.broadcast_to(a, (*batch, 3, 5)), np.broadcast_to(b, (*batch, 5, 4))
    for place in np.ndindex(*y.shape):
        *which, m, n = place
        total = sum(float(a[(*which, m, k)]) * float(b[(*which, k, n)]) for k in range(5)) + float(x["bias"][n])
        assert abs(z[place] - total) < 1e-14
        assert abs(y[place] - act(total, activation)) < 1e-14


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(70, 33, 50), (1, 64, 1), (5, 3, 0), (0, 4, 4)], ids=str)
def test_tiled_is_plain(sizes, dtype):
    x = {name: array.astype(numpy_dtype(dtype)) for name, array in arrays_of(shapes_of(*sizes)[0]).items()}
    truth = matmul(**{name: array.astype(np.float64) for name, array in x.items()})
    for tile, depth in ((32, 8), (7, 3), (100, 100)):
        tiled = matmul_tiled(**x, tile=tile, depth=depth)
        assert tiled.dtype == numpy_dtype(dtype)
        found = compare(tiled, truth, matmul(**x), dtype=dtype, floor=SPEC.floor)
        assert found.passed, found.message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_once(dtype):
    x = {name: array.astype(numpy_dtype(dtype)) for name, array in arrays_of(shapes_of(60, 50, 300)[0]).items()}
    wide = {name: array.astype(np.float64) for name, array in x.items()}
    for activation in (None, "gelu", "silu"):  # which take the sum before it is rounded
        exact = matmul(**wide, activation=activation).astype(numpy_dtype(dtype))
        # float32 arithmetic moves a result across a tie of the narrower dtype now and then
        assert np.mean(matmul(**x, activation=activation) != exact) < 0.01


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_an_activation_is_at_its_ends(dtype):
    a = np.array([[-np.inf], [-60.0], [-0.0], [0.0], [60.0], [np.inf], [np.nan]]).astype(numpy_dtype(dtype))
    one = np.ones((1, 1), a.dtype)
    for activation in ACTIVATIONS:
        y = matmul(a, one, activation=activation)[:, 0].astype(np.float64)
        assert (np.abs(y[1:4]) < 1e-20).all() and (y[4:6] == [60, np.inf]).all() and np.isnan(y[6])
        assert y[0] == 0 if activation == "relu" else np.isnan(y[0])


def test_gelu_and_silu_keep_their_digits_where_they_are_tiny():
    z = np.array([[-5.0, -9.0, -12.0]], np.float32)
    one = np.eye(3, dtype=np.float32)
    for activation in ("gelu", "silu"):
        wide = matmul(z.astype(np.float64), one.astype(np.float64), activation=activation)
        assert np.abs(matmul(z, one, activation=activation) / wide - 1).max() < 1e-4


@pytest.mark.parametrize(("layout", "batches"), list(product(LAYOUTS, BATCHES)), ids=str)
def test_gradients_against_finite_differences(layout, batches):
    """Of y and the preactivation together, every activation with some layout and batches."""
    turn = LAYOUTS.index(layout) + BATCHES.index(batches)
    activation = (None, *ACTIVATIONS)[turn % 4]
    shapes, params = shapes_of(2, 3, 4, layout=layout, a=batches[0], b=batches[1], bias=True)
    x = arrays_of(shapes, seed=turn)
    params = {**params, "activation": activation, "return_preactivation": True}
    y, z = matmul(**x, **params)
    rng = np.random.default_rng(turn)
    dy, dz = rng.standard_normal(y.shape), rng.standard_normal(z.shape)

    def loss(arrays: dict[str, np.ndarray]) -> float:
        results = matmul(**arrays, **params)
        return float((results[0] * dy).sum() + (results[1] * dz).sum())

    gradients = matmul_backward(x["a"], x["b"], dy, bias=x["bias"], preactivation=z, dpreactivation=dz, **params)
    step = 1e-5
    for name, found in zip(x, gradients, strict=True):
        assert found.shape == x[name].shape
        for place in np.ndindex(*found.shape):
            moved = []
            for sign in (1, -1):
                other = x[name].copy()
                other[place] += sign * step
                moved.append(loss(x | {name: other}))
            # rounding: eps / step = 2e-11, times a loss of some hundred; relu is not met at 0
            assert abs(found[place] - (moved[0] - moved[1]) / (2 * step)) < 1e-7, (name, place)


def test_relus_gradient_at_zero_and_at_nan_is_torchs():
    z, one = np.array([[0.0, -0.0, np.nan, 1.0]]), np.eye(4)
    (da, _) = matmul_backward(z, one, np.full((1, 4), 5.0), preactivation=z, activation="relu")
    assert da.tolist() == [[0, 0, 5, 5]]


def test_tf32_is_eleven_bits_ties_away_from_zero():
    step = 2.0**-10
    pairs = [(1.0, 1.0), (1 + 0.49 * step, 1.0), (1 + 0.5 * step, 1 + step), (-1 - 0.5 * step, -1 - step)]
    pairs += [(3.0, 3.0), (2.0**-130, 2.0**-130), (float(np.finfo(np.float32).max), np.inf), (-np.inf, -np.inf)]
    given, expected = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    assert as_tf32(given).tolist() == expected.tolist()
    assert np.isnan(as_tf32(np.array([np.nan, -np.nan], np.float32))).all()


def test_precisions():
    x = {name: array.astype(np.float32) for name, array in arrays_of(shapes_of(40, 30, 64)[0]).items()}
    truth = matmul(**{name: array.astype(np.float64) for name, array in x.items()})
    error = {p: np.abs(matmul(**x, precision=p) - truth).max() for p in (None, "tf32", "3xtf32")}
    assert 1e-3 < error["tf32"] < 2e-2
    assert error["3xtf32"] < 4 * error[None] < 4e-5
    half = {name: array.astype(np.float16) for name, array in x.items()}
    with pytest.raises(ValueError, match="matmul: precision is 'tf32', a is float16, expected float32 for it"):
        matmul(**half, precision="tf32")


def test_what_is_infinite_in_float32_is_so_in_3xtf32():
    """Also where the other factor is exact in tf32, or its parts have different signs."""
    infinity = np.float32(np.inf)
    for number in (2.0, -3.0, 1 + 2.0**-10 - 2.0**-20, infinity, -infinity, 0.0, np.nan):
        for sign in (1, -1):
            a, b = np.array([[sign * infinity]], np.float32), np.array([[number]], np.float32)
            with np.errstate(invalid="ignore"):
                expected = a * b
            for left, right in ((a, b), (b, a)):
                assert np.array_equal(matmul(left, right, precision="3xtf32"), expected, equal_nan=True)


@pytest.mark.parametrize("case", EMPTY, ids=lambda case: case.id)
def test_empty_problems(case):
    x = values(SPEC, case)
    y = matmul(**x, **case.params)
    assert isinstance(y, np.ndarray)
    if y.size:  # K = 0: the activation of the bias
        assert np.array_equal(y[0, 0], np.maximum(x["bias"], 0).astype(y.dtype))
    z = np.zeros(y.shape, y.dtype)
    gradients = matmul_backward(x["a"], x["b"], y, bias=x["bias"], preactivation=z, **case.params)
    assert [each.shape for each in gradients] == [x[name].shape for name in ("a", "b", "bias")]
    assert all((each == 0).all() for each in gradients)


WRONG: list[tuple[dict[str, tuple[int, ...]], dict[str, Any], str]] = [
    ({"a": (3,), "b": (3, 4)}, {}, r"matmul: a has 1 axes \(3,\), expected at least 2: \[..., M, K\]"),
    ({"a": (2, 3), "b": (3,)}, {"transpose_b": True},
     r"matmul: b has 1 axes \(3,\), expected at least 2: \[..., N, K\]"),
    ({"a": (2, 3), "b": (4, 5)}, {}, "matmul: b has K=4, a has K=3"),
    ({"a": (2, 3), "b": (5, 4)}, {"transpose_a": True, "transpose_b": True}, "b has K=4, a has K=2"),
    ({"a": (2, 3), "b": (3, 5), "bias": (4,)}, {}, "matmul: bias has N=4, b has N=5"),
    ({"a": (2, 3, 4), "b": (3, 4, 5)}, {},
     r"matmul: b has batch axes \(3,\), a has \(2,\), expected them to broadcast"),
    ({"a": (2, 3), "b": (3, 5)}, {"activation": "tanh"},
     "matmul: activation is 'tanh', expected one of None, 'relu', 'gelu', 'silu'"),
    ({"a": (2, 3), "b": (3, 5)}, {"precision": "ieee"}, "precision is 'ieee', expected one of None, 'tf32'"),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "params", "message"), WRONG)
def test_errors_are_the_specs(shapes, params, message):
    with pytest.raises(ValueError, match=message):
        matmul(**arrays_of(shapes), **params)


def test_errors_of_backward_are_the_specs():
    a, b, dy = np.zeros((2, 3)), np.zeros((3, 4)), np.zeros((2, 4))
    with pytest.raises(ValueError, match=r"^matmul_backward: dy has shape \(4, 2\), expected \(2, 4\), as the result$"):
        matmul_backward(a, b, dy.T)
    with pytest.raises(
        TypeError, match=r"^matmul_backward: preactivation is missing, expected it with activation 'gelu'$"
    ):
        matmul_backward(a, b, dy, activation="gelu")
    with pytest.raises(TypeError, match=r"^matmul: b has dtype float32, a has dtype float64, expected the same$"):
        matmul(a, b.astype(np.float32))
    with pytest.raises(TypeError, match=r"^matmul: bias has dtype float32, a has dtype float64, expected float64$"):
        matmul(a, b, bias=np.zeros(4, np.float32))
