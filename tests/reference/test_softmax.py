"""softmax in NumPy: plain against online, float64 against 50 digits, the gradient against finite differences."""

from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dualops.reference import softmax, softmax_backward, softmax_online
from dualops.spec import OPERATORS, Tag, compare
from dualops.spec.meta import FLOATS, numpy_dtype
from tests.problems import elements, random_problems, sprinkle, values

SPEC = OPERATORS["softmax"]
CASES = [case for case in SPEC.tagged(Tag.TEST) + SPEC.tagged(Tag.SIM) if elements(case) <= 1 << 19]
FORMS = [softmax, softmax_online]

pytestmark = pytest.mark.filterwarnings("error")  # no NumPy warning reaches a user


@pytest.mark.parametrize("case", {case.id: case for case in CASES}.values(), ids=lambda case: case.id)
def test_plain_and_online_agree_with_the_truth(case):
    x = values(SPEC, case)["x"]
    truth, plain = softmax(x.astype(np.float64), **case.params), softmax(x, **case.params)
    for block in (1000, 7) if x.size < 1 << 12 else (128,):
        online = softmax_online(x, **case.params, block=block)
        assert online.dtype == plain.dtype == x.dtype
        found = compare(online, truth, plain, dtype=case.dtype, floor=SPEC.floor, name="y")
        assert found.passed, found.message


def in_decimal(row: list[float]) -> list[Decimal]:
    exponentials = [Decimal(value).exp() for value in row]
    return [value / sum(exponentials) for value in exponentials]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0, 700.0])
def test_float64_against_fifty_digits(form, spread):
    getcontext().prec = 50
    x = spread * np.random.default_rng(1).standard_normal((4, 33))
    y = form(x)
    for row, result in zip(x, y, strict=True):
        for i, exact in enumerate(in_decimal(row.tolist())):
            # rounding of x - max, through exp, and of the sum of 33 numbers
            slack = np.finfo(np.float64).eps * (abs(row[i] - row.max()) + 33 + 4)
            assert abs(Decimal(float(result[i])) - exact) <= exact * Decimal(float(slack)) + Decimal("5e-324")


def ulps(actual: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance in units of the last place between numbers of a 16-bit dtype that are not negative."""
    return np.abs(actual.view(np.uint16).astype(int) - exact.astype(actual.dtype).view(np.uint16).astype(int))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_once(form, dtype):
    x = (4 * np.random.default_rng(3).standard_normal((200, 300))).astype(numpy_dtype(dtype))
    apart = ulps(form(x), softmax(x.astype(np.float64)))
    # float32 arithmetic moves a result across a tie of the narrower dtype now and then
    assert apart.max() <= 1
    assert np.mean(apart) < 0.01


def test_half_precision_gradients_round_once():
    rng = np.random.default_rng(4)
    for dtype in ("float16", "bfloat16"):
        y = softmax(rng.standard_normal((100, 50)).astype(numpy_dtype(dtype)))
        dy = rng.standard_normal((100, 50)).astype(y.dtype)
        exact = softmax_backward(y.astype(np.float64), dy.astype(np.float64)).astype(y.dtype)
        actual = softmax_backward(y, dy)
        assert np.mean(actual != exact) < 0.01
        wide, exact_wide = actual.astype(np.float64), exact.astype(np.float64)
        last_place = np.maximum(np.abs(exact_wide), 2.0**-14) * (2.0**-10 if dtype == "float16" else 2.0**-7)
        # dy - dot cancels, so that the float32 error is relative to the numbers before the subtraction
        assert (np.abs(wide - exact_wide) <= last_place + 1e-6).all()


small_shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def by_central_differences(x: np.ndarray, dy: np.ndarray, axis: int, step: float = 1e-5) -> np.ndarray:
    dx = np.empty_like(x)
    for place in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        dx[place] = ((softmax(up, axis) - softmax(down, axis)) * dy).sum() / (2 * step)
    return dx


@given(small_shapes, st.integers(-3, 2), st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 5.0]))
def test_gradient_against_finite_differences(shape, axis, seed, spread):
    axis = axis % len(shape)
    rng = np.random.default_rng(seed)
    x, dy = spread * rng.standard_normal(shape), rng.standard_normal(shape)
    dx = softmax_backward(softmax(x, axis), dy, axis)
    # third derivatives are below 1: step**2 / 6 = 2e-11; rounding: eps / step = 2e-11; each times sum |dy|
    assert np.abs(dx - by_central_differences(x, dy, axis)).max() <= 1e-10 * max(np.abs(dy).sum(), 1)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3)])
def test_empty_gradients(shape):
    for axis in range(len(shape)):
        assert softmax_backward(np.zeros(shape), np.zeros(shape), axis).shape == shape


def problems(seed: int, count: int = 60):
    return random_problems("softmax", seed, count, max_elements=4000)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_row_does_not_depend_on_the_batch_it_is_in(form, axis):
    x = np.random.default_rng(5).standard_normal((37, 41, 43)).astype(np.float32)
    whole = form(x, axis)
    for place in (0, 17, 36):
        index = [slice(None)] * 3
        index[(axis + 1) % 3] = slice(place, place + 1)
        assert np.array_equal(form(x[tuple(index)], axis), whole[tuple(index)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinities_stay_in_their_row(form, dtype):
    x = np.random.default_rng(6).standard_normal((7, 300)).astype(numpy_dtype(dtype))
    plain = form(x)
    x[1, 200] = np.nan
    x[2, 100] = np.inf
    x[3, 50] = -np.inf
    x[4, :] = -np.inf
    x[5, :250] = -np.inf
    x[6, 1:] = -np.inf
    y = form(x)
    assert np.array_equal(y[0], plain[0])
    assert np.isnan(y[[1, 2, 4]].astype(np.float64)).all()
    assert y[3, 50] == 0
    assert (y[5, :250] == 0).all()
    for row in (3, 5):
        kept = np.isfinite(x[row])
        assert np.array_equal(y[row, kept], form(np.ascontiguousarray(x[row, kept])))
    assert y[6, 0] == 1
    assert (y[6, 1:] == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_do_not_overflow(form, dtype):
    largest = float({"float16": 65504.0, "bfloat16": 2.0**127}.get(dtype) or np.finfo(dtype).max)
    x = np.array([[largest, -largest, largest, 0.0]]).astype(numpy_dtype(dtype))
    assert form(x).astype(float).tolist() == [[0.5, 0.0, 0.5, 0.0]]


def test_plain_and_online_put_special_values_in_the_same_places():
    for case in problems(2, 150):
        x = values(SPEC, case, special=True)["x"]
        truth = softmax(x.astype(np.float64), **case.params)
        for form in FORMS:
            found = compare(
                form(x, **case.params), truth, softmax(x, **case.params), dtype=case.dtype, floor=SPEC.floor
            )
            assert found.passed, f"{case}: {found.message}"


def test_a_nan_in_dy_poisons_its_row_alone():
    rng = np.random.default_rng(8)
    y = softmax(rng.standard_normal((4, 9)))
    dy = rng.standard_normal((4, 9))
    plain = softmax_backward(y, dy)
    for special in (np.nan, np.inf, -np.inf):
        poisoned = dy.copy()
        poisoned[2, 3] = special
        dx = softmax_backward(y, poisoned)
        assert not np.isfinite(dx[2]).any()
        assert np.array_equal(np.delete(dx, 2, 0), np.delete(plain, 2, 0))


def test_negative_strides_and_fields_of_records_are_read():
    x = np.random.default_rng(9).standard_normal((4, 6))
    assert np.array_equal(softmax(x[::-1, ::-1]), softmax(x[::-1, ::-1].copy()))
    y, dy = softmax(x), np.flip(x)
    assert np.array_equal(softmax_backward(y, dy), softmax_backward(y, dy.copy()))
    records = np.zeros(5, [("value", "f4"), ("tag", "i2")])
    records["value"] = x[0, :5]
    assert np.array_equal(softmax(records["value"]), softmax(x[0, :5].astype(np.float32)))


def test_sprinkle_leaves_its_argument_and_changes_something():
    x = np.ones((20, 20), np.float32)
    changed = sprinkle(x, np.random.default_rng(0), np.array([np.nan], np.float32))
    assert (x == 1).all()
    assert 1 <= np.isnan(changed).sum() <= 4
