"""What rope's tables are known to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...reference.rope import inverse_frequencies
from ...spec import Problem

Arrays = Mapping[str, np.ndarray]


def result_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """The largest angle: what cos and sin are taken of is known to eps of that, times what they are multiplied by."""
    largest = float(np.abs(arrays["positions"]).max(initial=0))
    frequencies = inverse_frequencies(2 * problem.half, problem.theta, problem.scaling)
    magnitude = dict(problem.scaling or ()).get("attention_factor", 1.0)
    return dict.fromkeys(("cos", "sin"), magnitude * largest * float(frequencies.max()))
