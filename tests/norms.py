"""What rms_norm and layer_norm bring to fuzzer and checker: domains, special values, and what their results add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dualops.spec import Case, Problem
from dualops.spec.meta import compute_dtype
from tests.sizes import random_size

Shapes = dict[str, tuple[int, ...]]
Arrays = Mapping[str, np.ndarray]
Domain = Callable[[np.random.Generator, int], tuple[Shapes, dict[str, Any]]]


# --- domain --------------------------------------------------------------------------------------


def rms_problem(rng: np.random.Generator, max_elements: int) -> tuple[Shapes, dict[str, Any]]:
    """Shapes and parameters of rms_norm."""
    shapes = _rows(rng, max_elements, ("w",))
    offset = float(rng.choice([0.0, 1.0, -0.5])) if "w" in shapes else 0.0
    return shapes, {"offset": offset, "return_rstd": bool(rng.integers(2)), "eps": _eps(rng)}


def layer_problem(rng: np.random.Generator, max_elements: int) -> tuple[Shapes, dict[str, Any]]:
    """Shapes and parameters of layer_norm."""
    return _rows(rng, max_elements, ("w", "b")), {"return_stats": bool(rng.integers(2)), "eps": _eps(rng)}


def _rows(rng: np.random.Generator, max_elements: int, vectors: tuple[str, ...]) -> Shapes:
    N = random_size(rng, max_elements)
    left, outer = max_elements // max(N, 1), []
    for _ in range(int(rng.integers(0, 4))):
        outer.append(random_size(rng, max(left, 1)))
        left //= max(outer[-1], 1)
    shape = (*(outer[place] for place in rng.permutation(len(outer))), N)
    shapes: Shapes = {"x": shape} | {name: (N,) for name in vectors if rng.random() < 0.7}
    return shapes | ({"residual": shape} if rng.random() < 0.4 else {})


def _eps(rng: np.random.Generator) -> float:
    """Not 0, with which a row's variance of 0 in one order of addition, and of nearly 0 in another, are far apart."""
    return float(rng.choice([1e-6, 1e-5, 1e-3, 1.0]))


def special_limits(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """Squares of a row must have a sum, and what is finite in the truth must be so in half precision."""
    if name in ("x", "residual"):
        return {"float16": 16376.0, "float64": 2.0**500}.get(case.dtype, 2.0**55), True
    # y is at most sqrt(N) * w; a row of tiny numbers has rstd = 1000, and with it goes dx; an infinity times a number
    # that vanishes in float32 alone is a NaN
    half = 8.0 if backward else 256.0
    return {"float16": half, "float64": 2.0**400}.get(case.dtype, 2.0**50), False


# --- what results add up -------------------------------------------------------------------------


def result_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """y = (h - mean) * rstd * (w + offset) + b, all magnitudes added; mean and rstd likewise."""
    wide = _wide(arrays)
    with np.errstate(all="ignore"):
        h = wide["x"] + wide.get("residual", 0.0)
        centred = problem.spec.name == "layer_norm"
        mean = h.sum(axis=-1) / problem.N if centred else np.zeros(h.shape[:-1])
        rstd = 1 / np.sqrt(((h - mean[..., None]) ** 2).sum(axis=-1) / problem.N + problem.eps)
        size = (np.abs(h) + np.abs(mean)[..., None]) * rstd[..., None]  # of xhat
        y = size * _weight(wide, problem) + np.abs(wide.get("b", 0.0))
        terms = {"y": y, "mean": np.abs(h).sum(axis=-1) / problem.N, "rstd": rstd}
        if centred:
            terms["rstd"] = rstd * (1 + size.max(axis=-1, initial=0))
    return {name: _largest(values, problem) for name, values in terms.items()}


def gradient_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed, dw and db, all magnitudes added."""
    wide = _wide(arrays)
    with np.errstate(all="ignore"):
        rstd, dy = wide["rstd"][..., None], np.abs(wide["dy"])
        size = (np.abs(wide["x"]) + np.abs(wide["mean"][..., None] if "mean" in wide else 0)) * rstd  # of xhat
        g = dy * _weight(wide, problem)
        means = [x.sum(axis=-1, keepdims=True) / problem.N for x in (g, g * size)]
        dx = rstd * (g + means[0] + size * means[1]) + np.abs(wide.get("dsummed", 0.0))
        rows = tuple(range(dy.ndim - 1))
        terms = {"dx": dx, "dw": (dy * size).sum(axis=rows), "db": dy.sum(axis=rows)}
    return {name: _largest(values, problem) for name, values in terms.items()}


def _wide(arrays: Arrays) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def _weight(wide: Arrays, problem: Problem) -> Any:
    return np.abs(wide["w"]) + abs(problem.params.get("offset", 0.0)) if "w" in wide else 1.0


def _largest(values: np.ndarray, problem: Problem) -> float:
    """Not less than the smallest normal number: below it eps is that of no number."""
    return float(values[np.isfinite(values)].max(initial=np.finfo(compute_dtype(problem.dtype)).tiny))
