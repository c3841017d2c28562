"""Which estimates are those of a problem's rows: softmax, rms_norm and layer_norm, by the kernel that a call takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..cuda.norm.staging import RingConfig
from ..cuda.rows.cluster import ClusterRowsConfig
from ..cuda.rows.registers import RowsConfig
from ..spec import Problem
from . import block_rows, cluster_rows, row_gradients
from .architectures import Architecture
from .candidates import Candidate


def refuse_unknown(p: Problem, backward: bool, taken: Any) -> None:
    """Raises NotImplementedError for what the models do not know. taken: the Config of a call."""
    op, known = p.spec.name, (ClusterRowsConfig, RowsConfig, *([RingConfig] if backward else []))
    if taken is None:
        raise NotImplementedError(f"{op}: no estimates of an empty problem")
    if p.dtype == "float64":
        raise NotImplementedError(f"{op}: no estimates for float64, expected float32, bfloat16 or float16")
    if not isinstance(taken, known):
        raise NotImplementedError(f"{op}: no estimates where a call takes {type(taken).__name__}")
    if isinstance(taken, RowsConfig) and not taken.aligned:
        raise NotImplementedError(f"{op}: no estimates where rows are no multiple of 16 bytes")


def candidates(p: Problem, backward: bool, gpu: Architecture, own: Any) -> Iterator[Candidate]:
    """Of those kernels that are like the operator's own."""
    if isinstance(own, ClusterRowsConfig):
        return cluster_rows.candidates(p, backward, gpu, own)
    if backward and p.spec.name != "softmax":
        return row_gradients.candidates(p, gpu, own)
    return block_rows.candidates(p, backward, gpu, own)
