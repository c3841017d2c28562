"""The accuracy rule: one rule for tests, demo and benchmarks.

    error(kernel, truth) <= 2 * error(baseline, truth) + c * eps        in maximum and in root mean square

*truth* is the reference in float64. The *baseline* is the reference in the storage dtype: float32 arithmetic, rounded
where the spec says. Both errors are relative to the truth's own maximum or root mean square. eps is that of the compute
dtype: the floor allows a last bit of arithmetic and never a rounding to half precision. In float64 the baseline is the
truth and only c * eps remains. The rule is FlashAttention's `check_tensor_vs_ref`, with a smaller floor. A NaN or an
infinity must stand exactly where the truth has it.

A limit can be *vacuous*: it would pass results that have nothing to do with the truth, because the baseline itself
fails (x * x overflows in float32 for rows near 1e30). Then nothing was checked, and the result does not pass. A limit
is vacuous if it would pass a result that is off by half of a reference size. The error counts in one element (maximum)
or in all of them (root mean square). The reference size is the largest of three:

- the truth's own size: its maximum, or its root mean square
- `terms`, the magnitudes that the result is a difference of. A gradient that cancels to 1e-9 of its terms is accurate
  to eps of the terms. A limit far above the truth is right for it, since the limit is far below the terms
- the storage dtype's smallest normal number. If all of the truth is smaller, zeros are the right result

Two more cases count as vacuous. `terms` may be infinite: then nothing is known of the result, as of the cosine of 1e18
radians. Or the baseline is not finite although the truth is, and the result is not finite either: float16 can't hold
1e5, so neither can a kernel. A result that is finite in such a place is held to the limit like any other, and may pass.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from .meta import compute_dtype, numpy_dtype


class Errors(NamedTuple):
    """Distance from the truth, relative to the truth's largest magnitude and to its root mean square."""

    max: float
    rms: float


class Accuracy(NamedTuple):
    """Verdict of `compare`."""

    passed: bool
    kernel: Errors
    baseline: Errors
    limit: Errors
    worst: tuple[int, ...]  # coordinate of the largest error
    message: str
    vacuous: bool = False  # within a limit that says nothing; `passed` is False

    @property
    def ratio(self) -> float:
        """Return the kernel's share of its limit, the worse of maximum and root mean square; inf if vacuous."""
        if self.vacuous:
            return float("inf")
        return max(k / limit if limit else (0.0 if k == 0 else np.inf) for k, limit in zip(self.kernel, self.limit))


FLOAT64_FLOOR = 32.0
VACUOUS = 0.5  # a limit says nothing from this share of the reference size on


def compare(
    actual: np.ndarray,
    truth: np.ndarray,
    baseline: np.ndarray,
    *,
    dtype: str,
    floor: float,
    name: str = "result",
    terms: float = 0.0,
) -> Accuracy:
    """Compare `actual` with `truth` (float64) by the rule above; `dtype` is the storage dtype of the problem.

    `terms` is the magnitude of the terms whose difference is the result, if they may cancel. Arithmetic knows the
    difference only to eps of the terms: c * eps is in units of the terms where they are larger. Infinite terms mean
    that nothing is known of the result.
    """
    if actual.shape != truth.shape:
        raise ValueError(f"{name}: shape {actual.shape}, expected {truth.shape}")
    if baseline.shape != truth.shape:
        raise ValueError(f"{name}: baseline of shape {baseline.shape}, expected {truth.shape}")
    if not truth.size:
        return Accuracy(True, Errors(0, 0), Errors(0, 0), Errors(0, 0), (), f"{name}: empty")
    x, base = actual.astype(np.float64), baseline.astype(np.float64)
    non_finite = ~np.isfinite(truth)
    lost = ~non_finite & ~np.isfinite(base)  # the baseline is not finite here
    misplaced = np.where(non_finite, ~_same_non_finite(x, truth), ~np.isfinite(x))
    forgiven = slack(dtype, floor)
    if misplaced.any():
        vacuous = not (misplaced & ~lost).any()
        worst = tuple(int(i) for i in np.argwhere(misplaced)[0])
        bad = Errors(np.inf, np.inf)
        message = f"{name}: {x[worst]} at {worst}, expected {truth[worst]} ({int(misplaced.sum())} such elements)"
        if vacuous:
            message += f"; nothing is checked: {_baseline(dtype)} is {base[worst]} there"
        return Accuracy(False, bad, Errors(0, 0), Errors(forgiven, forgiven), worst, message, vacuous)
    if not np.isfinite(terms):
        unknown = Errors(np.inf, np.inf)
        message = f"{name}: nothing is checked: the arithmetic knows nothing of a result of terms this large"
        return Accuracy(False, unknown, Errors(0, 0), unknown, (), message, True)
    size = np.where(non_finite, 0.0, np.abs(truth))
    known = _eps(dtype) * terms  # a truth below this is unknown: errors are then relative to this size
    unit = max(float(size.max()), known) or 1.0
    units = Errors(unit, max(unit * _rms(size / unit), known) or 1.0)
    kernel, distance = _errors(x, truth, non_finite, units)
    reference, _ = _errors(base, truth, non_finite | lost, units)
    limit = Errors(*(2 * error + forgiven * max(terms / own, 1.0) for error, own in zip(reference, units)))
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(distance)), distance.shape))
    least = max(terms, float(ml_dtypes.finfo(numpy_dtype(dtype)).smallest_normal))
    within = kernel.max <= limit.max and kernel.rms <= limit.rms
    vacuous = within and any(each >= VACUOUS * max(1.0, least / own) for each, own in zip(limit, units))
    message = (
        f"{name}: max error {kernel.max:.2e} (baseline {reference.max:.2e}, limit {limit.max:.2e}), "
        f"rms {kernel.rms:.2e} (baseline {reference.rms:.2e}, limit {limit.rms:.2e}); "
        f"worst at {worst}: {x[worst]} instead of {truth[worst]}"
    )
    if vacuous:
        message = (
            f"{name}: nothing is checked: {_baseline(dtype)} is off by {reference.max:.2e} of the largest value "
            f"(rms {reference.rms:.2e}), and a limit of twice that passes anything"
        )
    return Accuracy(within and not vacuous, kernel, reference, limit, worst, message, vacuous)


def slack(dtype: str, floor: float) -> float:
    """Return c * eps of the rule for a problem of this dtype."""
    return (FLOAT64_FLOOR if dtype == "float64" else floor) * _eps(dtype)


def _baseline(dtype: str) -> str:
    return f"the baseline, {compute_dtype(dtype)} arithmetic rounded to {dtype},"


def _eps(dtype: str) -> float:
    return float(np.finfo(compute_dtype(dtype)).eps)


def _same_non_finite(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return (np.isnan(x) & np.isnan(truth)) | (x == truth)


def _errors(x: np.ndarray, truth: np.ndarray, left_out: np.ndarray, units: Errors) -> tuple[Errors, np.ndarray]:
    with np.errstate(invalid="ignore", over="ignore"):
        # in units of the largest, so that no square overflows or underflows
        distance = np.where(left_out, 0.0, np.abs(x - truth)) / units.max
        rms = _rms(distance) * (units.max / units.rms)
    return Errors(float(distance.max()), rms), distance


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(array**2)))
