"""What the results of operators are differences of, for `spec.compare`; a file for each where something cancels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...spec import Problem
from . import attention, matmul, norms, retention, rope, softmax

Terms = Callable[[Mapping[str, np.ndarray], Problem], dict[str, float]]


def _none(arrays: Mapping[str, np.ndarray], problem: Problem) -> dict[str, float]:
    """Of what cancels nothing that the truth would not show."""
    return {}


# (operator, backward) -> a function of its arrays and its problem
TERMS: dict[tuple[str, bool], Terms] = {
    ("softmax", False): _none,
    ("softmax", True): softmax.gradient_terms,
    ("rope", False): _none,  # a pair keeps its length: one of the two is as large as the terms
    ("rope", True): _none,
    ("rope_tables", False): rope.tables_terms,
    ("flash_attention", False): attention.result_terms,
    ("flash_attention", True): attention.gradient_terms,
    ("flash_attention_varlen", False): attention.result_terms,
    ("flash_attention_varlen", True): attention.gradient_terms,
    ("matmul", False): matmul.result_terms,
    ("matmul", True): matmul.gradient_terms,
    ("retention", False): retention.result_terms,
    ("retention", True): retention.gradient_terms,
    ("retention_varlen", False): retention.result_terms,
    ("retention_varlen", True): retention.gradient_terms,
    ("rms_norm", False): norms.result_terms,
    ("rms_norm", True): norms.gradient_terms,
    ("lion", False): _none,  # the bits are checked
    ("layer_norm", False): norms.result_terms,
    ("layer_norm", True): norms.gradient_terms,
}
