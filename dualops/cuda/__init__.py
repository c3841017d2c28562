"""The kernels: operators on GPU arrays, compiled by Numba; with NUMBA_ENABLE_CUDASIM=1 on NumPy arrays, simulated."""

from . import flash_attention as _flash_attention
from . import softmax as _softmax
from .flash_attention import flash_attention
from .launch import plan
from .softmax import softmax, softmax_backward

RUNGS: dict[str, tuple[str, ...]] = {"flash_attention": _flash_attention.RUNGS, "softmax": _softmax.RUNGS}

__all__ = ["RUNGS", "flash_attention", "plan", "softmax", "softmax_backward"]
