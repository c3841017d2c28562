"""The specs: what each operator is. Needs only numpy and ml_dtypes."""

from .accuracy import Accuracy, Errors, compare
from .base import Case, Problem, Spec, Tag
from .flash_attention import SPEC as flash_attention, SPEC_VARLEN as flash_attention_varlen
from .meta import ArrayMeta
from .softmax import SPEC as softmax

# as the demo shows them
OPERATORS: dict[str, Spec] = {spec.name: spec for spec in (flash_attention, flash_attention_varlen, softmax)}

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
    "flash_attention_varlen",
    "softmax",
]
