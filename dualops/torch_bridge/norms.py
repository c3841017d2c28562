"""Shared by the bridges of rms_norm and layer_norm: the results that a caller asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..spec.domains import shown


def wanted(op: str, results: tuple[Tensor, ...], residual: Tensor | None, request: str, asked: Any) -> Any:
    """Return y alone, or a tuple of y, summed with a residual, and statistics if the parameter `request` is set.

    results: y, summed (empty without a residual), statistics. Raises TypeError unless `asked` is a bool.
    """
    if not isinstance(asked, bool):
        raise TypeError(f"{op}: {request} is {shown(asked)}, expected True or False")
    y, summed, *statistics = results
    if residual is None and not asked:
        return y
    return (y, *(() if residual is None else (summed,)), *(statistics if asked else ()))
