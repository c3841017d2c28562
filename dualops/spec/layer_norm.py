"""The spec of layer_norm(x, w, b). Ba, Kiros & Hinton 2016, "Layer Normalization".

With a residual, h = x + residual is normalised, and is a result too (`summed`); without one h is x. Backward takes h,
and has one gradient for x and residual. The variance is that of the row itself: its sum is divided by N.

    y = xhat * w + b                    xhat = (h - mean(h)) * rstd,  rstd = 1 / sqrt(mean((h - mean(h))^2) + eps)
    g = dy * w                          the gradient of xhat
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed
    dw = sum over rows of dy * xhat
    db = sum over rows of dy
"""

from __future__ import annotations

import numpy as np

from .base import Case, Spec, Tag
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
    make = case_maker(("w", "b"), "return_stats")
    return (
        *common_cases(make),
        *make("without_b", (11, 130), FLOATS, {Tag.TEST}, has=("w",), narrow=True, residual=True),
        *make("without_w", (11, 130), FLOATS, {Tag.TEST}, has=("b",), asked=True),
        *make("sim_without_b", (3, 100), ("float16",), {Tag.SIM}, has=("w",), narrow=True),
        *make("sim_without_w", (3, 100), ("bfloat16",), {Tag.SIM}, has=("b",), residual=True),
        *make("columns4097_without_w", (1024, 4097), ("float32",), {Tag.COMPILE}, has=("b",), residual=True),
    )


def draw(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw any rows, with and without weights, shifts, residual and statistics."""
    shapes = drawn_rows(rng, max_elements, ("w", "b"))
    return shapes, {"return_stats": bool(rng.integers(2)), "eps": drawn_eps(rng)}


_FORWARD_COST, _BACKWARD_COST = costs(forward_flops=6, backward_flops=9)

SPEC = Spec(
    name="layer_norm",
    formula="y = (h - mean(h)) * rstd * w + b, h = x + residual, rstd = 1 / sqrt(var(h) + eps);  "
    "dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed, g = dy * w, xhat = (h - mean) * rstd;  "
    "dw = sum(dy * xhat);  db = sum(dy)",
    paper="Ba, Kiros & Hinton 2016, arXiv:1607.06450, equation 4",
    inputs=(data("x"), vector("w"), vector("b"), data("residual", optional=True)),
    params=(eps_param(1e-5), request_param("return_stats", "mean and 1 / sqrt(variance + eps) of each row")),
    outputs=(result("y"), SUMMED, statistic_result("mean", "return_stats"), statistic_result("rstd", "return_stats")),
    gradient_inputs=(
        data("x"),
        statistic("mean"),
        statistic("rstd"),
        data("dy"),
        vector("w"),
        vector("b"),
        data("dsummed", optional=True),
    ),
    gradients=(result("dx"), vector_gradient("w"), vector_gradient("b")),
    gradient_params=(vector_gradient_param("w"), vector_gradient_param("b")),
    saved=("x", "mean", "rstd", "w", "b"),
    saved_instead={"x": "summed"},
    gradient_shared={"residual": "x"},
    measure=measure,
    forward_cost=_FORWARD_COST,
    backward_cost=_BACKWARD_COST,
    rounding="summed, then y, dx, dw and db once, to their dtype; all else in float32 (float64 for float64)",
    floor=8.0,
    rungs=("naive", "simt", "sm90"),
    cases=_cases(),
    generate=generate,
    draw=draw,
    special=special,
    terms=result_terms,
    gradient_terms=gradient_terms,
)
