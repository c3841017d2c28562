"""What rope's tables are known to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...reference.rope import inverse_frequencies
from ...spec import Problem
from ...spec.accuracy import FLOAT64_FLOOR, VACUOUS, slack

Arrays = Mapping[str, np.ndarray]


def result_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """The largest angle, to float64's precision: the spec computes angles in float64 whatever the tables' dtype.

    cos and sin are at most `attention_factor`, 1 as a rule, and are known to so many times that as float64 tables may
    be off by: floor * eps * angle. `compare` multiplies terms by the floor and the eps of the problem, so that they are
    divided by those here. They are infinite where nothing is known of cos and sin: of angles near 1e14.
    """
    largest = float(np.abs(arrays["positions"].astype(np.float64)).max(initial=0))
    frequencies = inverse_frequencies(2 * problem.half, problem.theta, problem.scaling)
    off = largest * float(frequencies.max()) * FLOAT64_FLOOR * float(np.finfo(np.float64).eps)
    if off >= VACUOUS:
        return dict.fromkeys(("cos", "sin"), np.inf)
    magnitude = dict(problem.scaling or ()).get("attention_factor", 1.0)
    return dict.fromkeys(("cos", "sin"), magnitude * off / slack(problem.dtype, problem.spec.floor))
