"""The accuracy rule accepts what rounding explains and rejects the rest."""

import ml_dtypes
import numpy as np
import pytest

from dualops import reference
from dualops.spec import compare, softmax
from dualops.spec.meta import FLOATS, compute_dtype, numpy_dtype
from tests.problems import Guarded


def problem(dtype: str, shape: tuple[int, ...] = (40, 300)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input, float64 truth and baseline of a softmax."""
    x = (4 * np.random.default_rng(7).standard_normal(shape)).astype(numpy_dtype(dtype))
    return x, reference.softmax(x.astype(np.float64)), reference.softmax(x)


def judge(actual, truth, baseline, dtype):
    return compare(actual, truth, baseline, dtype=dtype, floor=softmax.floor, name="y")


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_baseline_itself_passes_and_uses_at_most_half_of_its_allowance(dtype):
    _, truth, baseline = problem(dtype)
    found = judge(baseline, truth, baseline, dtype)
    assert found.passed, found.message
    assert found.ratio <= 0.5
    assert found.kernel == found.baseline


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_three_times_the_baselines_error_is_too_much(dtype):
    _, truth, baseline = problem(dtype)
    found = judge(truth + 3 * (baseline.astype(np.float64) - truth), truth, baseline, dtype)
    assert not found.passed
    assert found.kernel.max == pytest.approx(3 * found.baseline.max)
    assert found.kernel.rms == pytest.approx(3 * found.baseline.rms)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_floor_forgives_last_bits_of_the_arithmetic(dtype):
    _, truth, baseline = problem(dtype)
    eps = np.finfo(compute_dtype(dtype)).eps
    assert judge(baseline.astype(np.float64) * (1 + 2 * eps), truth, baseline, dtype).passed


@pytest.mark.parametrize(
    ("dtype", "narrower"),
    [
        ("float64", np.float32),
        ("float32", np.float16),
        ("float32", ml_dtypes.bfloat16),
        ("float16", ml_dtypes.bfloat16),
        ("bfloat16", ml_dtypes.float8_e4m3fn),
    ],
)
def test_a_result_that_went_through_a_narrower_dtype_fails(dtype, narrower):
    _, truth, baseline = problem(dtype)
    found = judge(truth.astype(narrower), truth, baseline, dtype)
    assert not found.passed
    assert found.kernel.rms > found.limit.rms


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_wrong_element_among_a_million_fails_and_is_named(dtype):
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.5, 1.0, (1000, 1000))
    baseline = truth.astype(numpy_dtype(dtype))
    wrong = baseline.copy()
    wrong[123, 456] = wrong[123, 457] + numpy_dtype(dtype).type(0.25)
    found = judge(wrong, truth, baseline, dtype)
    assert not found.passed
    assert found.worst == (123, 456)
    assert "y: max error" in found.message
    assert "worst at (123, 456)" in found.message
    # the root mean square alone would not have seen it in half precision
    assert dtype in ("float64", "float32") or found.kernel.rms <= found.limit.rms


def test_a_small_error_everywhere_fails_by_its_root_mean_square():
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.5, 1.0, 10000)
    baseline = truth.copy()
    baseline[17] += 1e-3
    found = judge(truth + 5e-4 * rng.choice([-1, 1], 10000), truth, baseline, "float32")
    assert found.kernel.max < found.limit.max
    assert found.kernel.rms > found.limit.rms
    assert not found.passed


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_element_that_was_never_written_fails(dtype):
    _, truth, baseline = problem(dtype)
    out = Guarded(truth.shape, dtype)
    out.array[...] = baseline
    out.array[39, 299] = Guarded((1,), dtype).array[0]
    found = judge(out.array, truth, baseline, dtype)
    assert not found.passed
    assert found.worst == (39, 299)
    assert found.message == f"y: nan at (39, 299), expected {truth[39, 299]} (1 such elements)"


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_must_stand_where_the_truth_has_them_and_nowhere_else(special):
    _, truth, baseline = problem("float32")
    truth[2, 3] = baseline[2, 3] = special
    assert judge(baseline, truth, baseline, "float32").passed
    missing = baseline.copy()
    missing[2, 3] = 0.5
    found = judge(missing, truth, baseline, "float32")
    assert (found.passed, found.worst) == (False, (2, 3))
    added = baseline.copy()
    added[7, 8] = special
    found = judge(added, truth, baseline, "float32")
    assert (found.passed, found.worst) == (False, (7, 8))
    moved = added.copy()
    moved[2, 3] = 0.5
    assert not judge(moved, truth, baseline, "float32").passed
    for other in {np.inf, -np.inf, np.nan} - {special}:
        swapped = baseline.copy()
        swapped[2, 3] = other
        assert not judge(swapped, truth, baseline, "float32").passed


def test_an_infinity_does_not_hide_an_error_elsewhere():
    _, truth, baseline = problem("float32")
    truth[0, 0] = baseline[0, 0] = np.inf
    wrong = baseline.copy()
    wrong[5, 6] += 0.5
    found = judge(wrong, truth, baseline, "float32")
    assert (found.passed, found.worst) == (False, (5, 6))


def test_where_the_baseline_overflows_the_kernel_may_not():
    truth = np.array([1.0, 1e5])
    baseline = truth.astype(np.float32)
    baseline[1] = np.inf
    assert judge(truth, truth, baseline, "float32").passed
    assert not judge(baseline, truth, baseline, "float32").passed


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e-300, 1e-160, 1.0, 1e160, 1e300])
def test_the_rule_does_not_depend_on_the_size_of_the_numbers(size):
    truth = np.array([0.25, 1.0, -0.5]) * size
    assert judge(truth * (1 + 1e-15), truth, truth, "float64").passed
    assert not judge(truth * np.array([1.01, 1, 1]), truth, truth, "float64").passed
    assert not judge(truth * 1e-3, truth, truth, "float64").passed
    found = judge(np.zeros(3), truth, truth, "float64")
    assert not found.passed
    assert found.kernel == pytest.approx((1.0, 1.0))


def test_a_truth_of_zeros_is_judged_absolutely():
    zeros = np.zeros(5)
    assert judge(zeros, zeros, zeros, "float32").passed
    assert not judge(zeros + 1e-5, zeros, zeros, "float32").passed


def test_empty_results_and_wrong_shapes():
    empty = np.zeros((0, 4))
    assert judge(empty.astype(np.float32), empty, empty, "float32").passed
    with pytest.raises(ValueError, match=r"y: shape \(4, 0\), expected \(0, 4\)"):
        judge(empty.T, empty, empty, "float32")
    with pytest.raises(ValueError, match=r"y: baseline of shape \(3,\), expected \(2, 3\)"):
        judge(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros(3), "float32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("where", [slice(None), slice(999, None)], ids=["everywhere", "in one element"])
def test_a_limit_of_half_of_the_largest_value_says_nothing(where, dtype):
    """A baseline that is off by 0.2 makes a limit of 0.4, one that is off by 0.26 one of 0.52."""
    truth = np.linspace(1, 2, 1000) * np.random.default_rng(0).choice([-1, 1], 1000)
    off = np.zeros(1000)
    off[where] = truth[where]
    assert judge(truth, truth, truth - 0.2 * off, dtype).passed
    for share in (0.26, 1.0, 1e9):
        for actual in (truth, truth - share * off):
            found = judge(actual, truth, truth - share * off, dtype)
            assert (found.passed, found.vacuous, found.ratio) == (False, True, np.inf)
            assert found.message.startswith("y: nothing is checked: the baseline, ")


def test_a_wrong_result_is_wrong_however_bad_the_baseline():
    truth = np.array([1.0, 2.0, 3.0])
    for actual in (truth + 100, np.array([1.0, np.nan, 3.0])):
        found = judge(actual, truth, np.zeros(3), "float32")
        assert (found.passed, found.vacuous) == (False, False)


def test_what_cancels_is_measured_by_its_terms():
    """A difference of numbers of size 1 that is 1e-9 is known to 1e-7, though that is far above the difference."""
    truth = np.array([1e-9, -2e-9, 0.0])
    baseline = truth + np.array([1e-8, -1e-8, 2e-8])
    assert judge(truth, truth, baseline, "float32").vacuous  # relative to itself
    for actual in (truth, np.zeros(3), -truth, truth + 1e-7):
        assert compare(actual, truth, baseline, dtype="float32", floor=4.0, terms=1.0).passed
    found = compare(truth + 1e-5, truth, baseline, dtype="float32", floor=4.0, terms=1.0)
    assert (found.passed, found.vacuous) == (False, False)
    assert compare(truth, truth, truth + 0.3, dtype="float32", floor=4.0, terms=1.0).vacuous


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_that_the_dtype_has_none_of_may_be_zeros(dtype):
    smallest = float(ml_dtypes.finfo(numpy_dtype(dtype)).smallest_normal)
    for truth in (np.array([smallest / 8, -smallest / 16]), np.array([5e-324, 0.0])):
        assert judge(np.zeros(2), truth, np.zeros(2), dtype).passed
        assert not judge(np.full(2, smallest), truth, np.zeros(2), dtype).passed


@pytest.mark.filterwarnings("error")
def test_terms_as_large_as_can_be():
    tiny = np.array([5e-324, 0.0])
    assert compare(tiny, tiny, tiny, dtype="float64", floor=1.0, terms=1e300).passed
    assert not compare(tiny + 1e290, tiny, tiny, dtype="float64", floor=1.0, terms=1e300).passed
    unknown = compare(tiny, tiny, tiny, dtype="float64", floor=1.0, terms=np.inf)
    assert unknown.vacuous and not unknown.passed and unknown.message.startswith("result: nothing is checked")


def test_where_the_dtype_holds_no_truth_nothing_is_checked():
    truth = np.array([1.0, 1e5, 1e5])
    with np.errstate(over="ignore"):
        baseline = truth.astype(np.float16)
    found = judge(baseline, truth, baseline, "float16")
    assert found.vacuous and not found.passed and found.worst == (1,)
    assert "inf at (1,), expected 100000.0 (2 such elements); nothing is checked" in found.message
    assert judge(truth, truth, baseline, "float16").passed  # wider than it must be
    for wrong in (np.array([np.inf, np.inf, np.inf]), np.array([1.0, 7e4, np.inf]), np.array([1.0, 7e4, 1e5])):
        found = judge(wrong, truth, baseline, "float16")
        assert not found.passed
        assert found.vacuous == (wrong[2] == np.inf and wrong[0] == 1)
