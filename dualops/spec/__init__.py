"""The specs: what each operator is. Needs only numpy and ml_dtypes."""

from .accuracy import Accuracy, Errors, compare
from .base import ArrayMeta, Case, Problem, Spec, Tag
from .flash_attention import SPEC as flash_attention
from .softmax import SPEC as softmax

OPERATORS: dict[str, Spec] = {spec.name: spec for spec in (flash_attention, softmax)}  # as the demo shows them

__all__ = [
    "OPERATORS",
    "Accuracy",
    "ArrayMeta",
    "Case",
    "Errors",
    "Problem",
    "Spec",
    "Tag",
    "compare",
    "flash_attention",
    "softmax",
]
