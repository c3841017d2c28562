"""How near is near enough: one rule for tests, demo and benchmarks.

    error(kernel, truth) <= 2 * error(baseline, truth) + c * eps        in maximum and in root mean square

*truth* is the reference in float64. The *baseline* is the reference in the storage dtype: float32 arithmetic, rounded
where the spec says. Both errors are relative to the truth's own maximum or root mean square; eps is that of the compute
dtype, so that the floor forgives a last bit of arithmetic and never a rounding to half precision. In float64 the
baseline is the truth and c * eps is what remains. The rule is FlashAttention's `check_tensor_vs_ref`, with a smaller
floor. A NaN or an infinity must stand exactly where the truth has it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .meta import compute_dtype


class Errors(NamedTuple):
    """Distance from the truth, relative to the truth's largest magnitude and to its root mean square."""

    max: float
    rms: float


class Accuracy(NamedTuple):
    """What `compare` found."""

    passed: bool
    kernel: Errors
    baseline: Errors
    limit: Errors
    worst: tuple[int, ...]  # coordinate of the largest error
    message: str

    @property
    def ratio(self) -> float:
        """The kernel's share of what it was allowed, the worse of maximum and root mean square."""
        return max(k / limit if limit else (0.0 if k == 0 else np.inf) for k, limit in zip(self.kernel, self.limit))


FLOAT64_FLOOR = 32.0


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
    """Hold `actual` against `truth` (float64) by the rule above; `dtype` is the storage dtype of the problem.

    `terms` is the magnitude of what the result is a difference of, where that may cancel: the arithmetic can't know the
    difference better than to eps of the terms, so that c * eps is meant in units of them where they are larger.
    """
    if actual.shape != truth.shape:
        raise ValueError(f"{name}: shape {actual.shape}, expected {truth.shape}")
    if baseline.shape != truth.shape:
        raise ValueError(f"{name}: baseline of shape {baseline.shape}, expected {truth.shape}")
    if not truth.size:
        return Accuracy(True, Errors(0, 0), Errors(0, 0), Errors(0, 0), (), f"{name}: empty")
    x, base = actual.astype(np.float64), baseline.astype(np.float64)
    strange = ~np.isfinite(truth)
    misplaced = np.where(strange, ~_same_strange(x, truth), ~np.isfinite(x))
    eps = float(np.finfo(compute_dtype(dtype)).eps)
    slack = (FLOAT64_FLOOR if dtype == "float64" else floor) * eps
    if misplaced.any():
        worst = tuple(int(i) for i in np.argwhere(misplaced)[0])
        bad = Errors(np.inf, np.inf)
        message = f"{name}: {x[worst]} at {worst}, expected {truth[worst]} ({int(misplaced.sum())} such elements)"
        return Accuracy(False, bad, Errors(0, 0), Errors(slack, slack), worst, message)
    kernel, distance = _errors(x, truth, strange)
    reference, _ = _errors(base, truth, strange | ~np.isfinite(base))
    size = np.where(strange, 0.0, np.abs(truth))
    unit = size.max() or 1.0
    cancelled, rms_cancelled = (max(terms / own, 1.0) for own in (unit, unit * (_rms(size / unit) or 1.0)))
    limit = Errors(2 * reference.max + slack * cancelled, 2 * reference.rms + slack * rms_cancelled)
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(distance)), distance.shape))
    passed = kernel.max <= limit.max and kernel.rms <= limit.rms
    message = (
        f"{name}: max error {kernel.max:.2e} (baseline {reference.max:.2e}, limit {limit.max:.2e}), "
        f"rms {kernel.rms:.2e} (baseline {reference.rms:.2e}, limit {limit.rms:.2e}); "
        f"worst at {worst}: {x[worst]} instead of {truth[worst]}"
    )
    return Accuracy(passed, kernel, reference, limit, worst, message)


def _same_strange(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return (np.isnan(x) & np.isnan(truth)) | (x == truth)


def _errors(x: np.ndarray, truth: np.ndarray, left_out: np.ndarray) -> tuple[Errors, np.ndarray]:
    size = np.where(left_out, 0.0, np.abs(truth))
    unit = size.max() or 1.0  # a truth that is zero everywhere leaves absolute errors
    with np.errstate(invalid="ignore", over="ignore"):
        # in units of the largest, so that no square overflows or vanishes
        distance = np.where(left_out, 0.0, np.abs(x - truth)) / unit
        rms, own_rms = _rms(distance), _rms(size / unit)
    return Errors(float(distance.max()), rms / (own_rms or 1.0)), distance


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(array**2)))
