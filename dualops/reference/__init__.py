"""The references: every operator and its gradient in plain NumPy, to read and to test against."""

from .flash_attention import flash_attention, flash_attention_backward
from .flash_attention_blocked import flash_attention_backward_blocked, flash_attention_blocked
from .flash_attention_varlen import flash_attention_varlen, flash_attention_varlen_backward
from .softmax import softmax, softmax_backward, softmax_online

__all__ = [
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_backward_blocked",
    "flash_attention_blocked",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
    "softmax",
    "softmax_backward",
    "softmax_online",
]
