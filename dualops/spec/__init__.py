"""The specs: what each operator is. Needs only numpy and ml_dtypes."""

from .accuracy import Accuracy, Errors, compare
from .base import Case, Problem, Spec, Tag
from .flash_attention import SPEC as flash_attention, SPEC_VARLEN as flash_attention_varlen
from .layer_norm import SPEC as layer_norm
from .lion import SPEC as lion
from .matmul import SPEC as matmul
from .meta import ArrayMeta
from .retention import SPEC as retention, SPEC_VARLEN as retention_varlen
from .rms_norm import SPEC as rms_norm
from .rope import SPEC as rope, SPEC_TABLES as rope_tables
from .softmax import SPEC as softmax

# in the demo's order
OPERATORS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        flash_attention,
        flash_attention_varlen,
        matmul,
        retention,
        retention_varlen,
        rope,
        rope_tables,
        rms_norm,
        layer_norm,
        softmax,
        lion,
    )
}

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
    "layer_norm",
    "lion",
    "matmul",
    "retention",
    "retention_varlen",
    "rms_norm",
    "rope",
    "rope_tables",
    "softmax",
]
