"""Which way a call takes through torch: straight to the implementation, or past whatever wants to see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_C: Any = torch._C


def watched() -> bool:
    """Whether a mode, autocast, a trace or a profile has to see what is called."""
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._is_any_autocast_enabled()
        or _C._is_tracing()
        or _C._autograd._profiler_enabled()
    )


def transformed() -> bool:
    """Whether torch.func or forward-mode AD is at work."""
    return _C._functorch.peek_interpreter_stack() is not None or (
        forward_ad._current_level >= 0 and _C._is_fwd_grad_enabled()
    )


def dense(tensor: Any) -> bool:
    """Whether this is nothing, or a tensor proper whose memory holds its values."""
    return tensor is None or (
        (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter)
        and (tensor.is_cuda or tensor.is_cpu)
        and tensor.layout is torch.strided
        and not (tensor.is_neg() or tensor.is_nested)
    )
