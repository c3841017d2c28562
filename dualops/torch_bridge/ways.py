"""Choose the path of a call through torch: straight to the implementation, or through its machinery."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

_C: Any = torch._C
# every call checks all of them: 0.05 microseconds each, and as much again for a lookup by full name
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_autocast, _tracing, _profiled = _C._is_any_autocast_enabled, _C._is_tracing, _C._autograd._profiler_enabled
_functorch, _forward_gradients = _C._functorch.peek_interpreter_stack, _C._is_fwd_grad_enabled
_Parameter, _strided = torch.nn.Parameter, torch.strided


def watched() -> bool:
    """Whether a mode, a trace or a profile must see the call."""
    return bool(_dispatch_modes() or _function_modes() or _tracing() or _profiled())


def autocasting() -> bool:
    """Whether autocast is enabled, for any device."""
    return _autocast()


def transformed() -> bool:
    """Whether torch.func or forward-mode AD is active."""
    return _functorch() is not None or (forward_ad._current_level >= 0 and _forward_gradients())


class Plain(NamedTuple):
    """Facts about plain tensors, whose memory holds their values."""

    on_gpu: bool  # some are
    requires_grad: bool  # some do


_PLAIN = [[Plain(on_gpu, requires_grad) for requires_grad in (False, True)] for on_gpu in (False, True)]


def plain(tensors: Iterable[Any]) -> Plain | None:
    """Return None if some of the tensors (or None) are not plain: torch must unwrap or refuse them.

    A tensor on a GPU whose memory is not plain is refused when its address is read.
    """
    on_gpu = requires_grad = False
    for tensor in tensors:
        if tensor is not None:
            kind = type(tensor)
            if (kind is not Tensor and kind is not _Parameter) or tensor.is_neg():
                return None
            if tensor.is_cuda:
                on_gpu = True
            elif not tensor.is_cpu or tensor.layout is not _strided or tensor.is_nested:
                return None
            if tensor.requires_grad:
                requires_grad = True
    return _PLAIN[on_gpu][requires_grad]
