"""The spec of rms_norm(x, w). Zhang & Sennrich 2019, "Root Mean Square Layer Normalization".

With a residual, h = x + residual is normalised, and is a result too (`summed`); without one h is x. Backward takes h,
and has one gradient for x and residual.

    y = xhat * (w + offset)             xhat = h * rstd,  rstd = 1 / sqrt(mean(h^2) + eps)
    g = dy * (w + offset)               the gradient of xhat
    dx = rstd * (g - xhat * mean(g * xhat)) + dsummed
    dw = sum over rows of dy * xhat
"""

from __future__ import annotations

import numpy as np

from .base import Case, Param, Spec, Tag
from .domains import finite
from .draws import Drawn
from .meta import FLOATS
from .norms import (
    SUMMED,
    case_maker,
    common_cases,
    costs,
    data,
    drawn_eps,
    drawn_rows,
    eps_param,
    generate,
    gradient_terms,
    measure,
    request_param,
    result,
    result_terms,
    special,
    statistic,
    statistic_result,
    vector,
    vector_gradient,
    vector_gradient_param,
)


def _cases() -> tuple[Case, ...]:
    make = case_maker(("w",), "return_rstd")
    return (
        *common_cases(make),
        *make("offset", (11, 130), FLOATS, {Tag.TEST}, narrow=True, residual=True, offset=1.0),
        *make("sim_offset", (3, 100), ("float16",), {Tag.SIM}, narrow=True, offset=1.0),
    )


def draw(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw any rows, with and without weights, offset, residual and statistics."""
    shapes = drawn_rows(rng, max_elements, ("w",))
    offset = float(rng.choice([0.0, 1.0, -0.5])) if "w" in shapes else 0.0
    return shapes, {"offset": offset, "return_rstd": bool(rng.integers(2)), "eps": drawn_eps(rng)}


_FORWARD_COST, _BACKWARD_COST = costs(forward_flops=3, backward_flops=6)

SPEC = Spec(
    name="rms_norm",
    formula="y = h * rstd * (w + offset), h = x + residual, rstd = 1 / sqrt(mean(h^2) + eps);  "
    "dx = rstd * (g - xhat * mean(g * xhat)) + dsummed, g = dy * (w + offset), xhat = h * rstd;  dw = sum(dy * xhat)",
    paper="Zhang & Sennrich 2019, arXiv:1910.07467, equation 4",
    inputs=(data("x"), vector("w"), data("residual", optional=True)),
    params=(
        eps_param(1e-6),
        Param("offset", 0.0, finite, "added to w, which it needs: 1 if w is stored as its difference from 1"),
        request_param("return_rstd", "1 / sqrt(mean(h^2) + eps) of each row"),
    ),
    outputs=(result("y"), SUMMED, statistic_result("rstd", "return_rstd")),
    gradient_inputs=(data("x"), statistic("rstd"), data("dy"), vector("w"), data("dsummed", optional=True)),
    gradients=(result("dx"), vector_gradient("w")),
    gradient_params=(vector_gradient_param("w"),),
    saved=("x", "rstd", "w"),
    saved_instead={"x": "summed"},
    gradient_shared={"residual": "x"},
    measure=measure,
    forward_cost=_FORWARD_COST,
    backward_cost=_BACKWARD_COST,
    rounding="summed, then y, dx and dw once, to their dtype; all else in float32 (float64 for float64)",
    floor=8.0,
    rungs=("naive", "simt", "sm90"),
    cases=_cases(),
    generate=generate,
    draw=draw,
    special=special,
    terms=result_terms,
    gradient_terms=gradient_terms,
)
