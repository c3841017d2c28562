"""Terms of rope's tables: how accurate cos and sin can be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...reference.rope import inverse_frequencies
from ...spec import Problem
from ...spec.accuracy import FLOAT64_FLOOR, VACUOUS, slack

Arrays = Mapping[str, np.ndarray]


def result_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """Return the largest angle, in units of float64's precision: angles are computed in float64 for any dtype of
    tables.

    cos and sin are at most `attention_factor`, usually 1, and are accurate to that times the allowed error of float64
    tables: floor * eps * angle. `compare` multiplies terms by the floor and the eps of the problem, so they are divided
    by those here. They are infinite if nothing is known of cos and sin: for angles near 1e14.
    """
    largest = float(np.abs(arrays["positions"].astype(np.float64)).max(initial=0))
    frequencies = inverse_frequencies(2 * problem.half, problem.theta, problem.scaling)
    off = largest * float(frequencies.max()) * FLOAT64_FLOOR * float(np.finfo(np.float64).eps)
    if off >= VACUOUS:
        return dict.fromkeys(("cos", "sin"), np.inf)
    magnitude = dict(problem.scaling or ()).get("attention_factor", 1.0)
    return dict.fromkeys(("cos", "sin"), magnitude * off / slack(problem.dtype, problem.spec.floor))
