"""The kernels: operators on GPU arrays, compiled by Numba; with NUMBA_ENABLE_CUDASIM=1 on NumPy arrays, simulated."""

from ..estimate.ranking import estimate
from ..spec import OPERATORS as _OPERATORS
from .compiler.offline import warm
from .flash_attention import (
    block_mask,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
)
from .layer_norm import layer_norm, layer_norm_backward
from .lion import lion
from .matmul import matmul, matmul_backward
from .retention import retention, retention_backward, retention_varlen, retention_varlen_backward
from .rms_norm import rms_norm, rms_norm_backward
from .rope import rope, rope_backward, rope_tables
from .softmax import softmax, softmax_backward
from .tuning.tune import plan, tune

RUNGS: dict[str, tuple[str, ...]] = {op: spec.rungs for op, spec in _OPERATORS.items()}

__all__ = [
    "RUNGS",
    "block_mask",
    "estimate",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
    "layer_norm",
    "layer_norm_backward",
    "lion",
    "matmul",
    "matmul_backward",
    "plan",
    "retention",
    "retention_backward",
    "retention_varlen",
    "retention_varlen_backward",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_backward",
    "rope_tables",
    "softmax",
    "softmax_backward",
    "tune",
    "warm",
]
