"""The kernels: operators on GPU arrays, compiled by Numba; on NumPy arrays in the simulator (NUMBA_ENABLE_CUDASIM=1)."""

from typing import Any

from .launch import Plan
from .softmax import softmax, softmax_backward

__all__ = ["softmax", "softmax_backward"]
