"""Terms of a matrix product, for cancellation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...reference.matmul import _op, _slopes, _sum_to
from ...spec import Problem

Arrays = Mapping[str, np.ndarray]


def result_terms(arrays: Arrays, given: Problem) -> dict[str, float]:
    """Return the largest sum of |a| * |b|, with the bias: no activation stretches a difference by more than 1.13."""
    size = _sizes(arrays)
    with np.errstate(all="ignore"):
        terms = _op(size["a"], given.transpose_a) @ _op(size["b"], given.transpose_b) + size.get("bias", 0.0)
    return dict.fromkeys(("y", "preactivation"), _largest(terms))


def gradient_terms(arrays: Arrays, given: Problem) -> dict[str, float]:
    """Return for each gradient the largest sum of magnitudes; dz counts as |act'(z)| * |dy| + |dpreactivation|."""
    size = _sizes(arrays)
    with np.errstate(all="ignore"):
        dz = size["dy"]
        if given.activation is not None:
            slope = _slopes(arrays["preactivation"].astype(np.float64), np.ones(dz.shape), given.activation)
            dz = np.nan_to_num(np.abs(slope), posinf=0.0) * dz
        dz = dz + size.get("dpreactivation", 0.0)
        a, b = _op(size["a"], given.transpose_a), _op(size["b"], given.transpose_b)
        return {
            "da": _largest(_sum_to(_op(dz @ b.swapaxes(-1, -2), given.transpose_a), size["a"].shape)),
            "db": _largest(_sum_to(_op(a.swapaxes(-1, -2) @ dz, given.transpose_b), size["b"].shape)),
            "dbias": _largest(_sum_to(dz, (given.N,))),
        }


def _sizes(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return magnitudes in float64; NaN and infinity count as 0."""
    return {name: np.nan_to_num(np.abs(array.astype(np.float64)), posinf=0.0) for name, array in arrays.items()}


def _largest(terms: np.ndarray) -> float:
    return float(terms.max(initial=0.0))
