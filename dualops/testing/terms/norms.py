"""What the results and gradients of rms_norm and layer_norm add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...spec import Problem
from ...spec.meta import compute_dtype

Arrays = Mapping[str, np.ndarray]


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
