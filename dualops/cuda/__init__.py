"""The kernels: operators on GPU arrays, compiled by Numba; with NUMBA_ENABLE_CUDASIM=1 on NumPy arrays, simulated."""

from . import flash_attention as _flash_attention, softmax as _softmax
from .flash_attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
)
from .launch import plan
from .softmax import softmax, softmax_backward

RUNGS: dict[str, tuple[str, ...]] = {
    "flash_attention": _flash_attention.RUNGS,
    "flash_attention_varlen": _flash_attention.RUNGS,
    "softmax": _softmax.RUNGS,
}

__all__ = [
    "RUNGS",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
    "plan",
    "softmax",
    "softmax_backward",
]
