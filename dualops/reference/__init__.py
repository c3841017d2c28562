"""The references: every operator and its gradient in plain NumPy, to read and to test against."""

from .block_mask import block_mask
from .flash_attention import flash_attention, flash_attention_backward
from .flash_attention_blocked import flash_attention_backward_blocked, flash_attention_blocked
from .flash_attention_varlen import flash_attention_varlen, flash_attention_varlen_backward
from .layer_norm import layer_norm, layer_norm_backward
from .lion import lion
from .matmul import matmul, matmul_backward, matmul_tiled
from .retention import retention, retention_backward
from .retention_varlen import retention_varlen, retention_varlen_backward
from .rms_norm import rms_norm, rms_norm_backward
from .rope import rope, rope_backward, rope_tables
from .softmax import softmax, softmax_backward, softmax_online

__all__ = [
    "block_mask",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_backward_blocked",
    "flash_attention_blocked",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
    "layer_norm",
    "layer_norm_backward",
    "lion",
    "matmul",
    "matmul_backward",
    "matmul_tiled",
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
    "softmax_online",
]
