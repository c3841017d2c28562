"""The references: every operator and its gradient in plain NumPy, to read and to test against."""

from .flash_attention import flash_attention, flash_attention_blocked
from .softmax import softmax, softmax_backward, softmax_online

__all__ = ["flash_attention", "flash_attention_blocked", "softmax", "softmax_backward", "softmax_online"]
