"""torch's own context_parallel, a ring over its flash attention, on two GPUs; by torch's kernels or by dualops."""

from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from dualops.torch_bridge.integrations import flash_attention_impl

from ..conftest import values

SHAPE = (1, 4, 1024, 64)  # [B, H, S, D]
NAMES = ("o", "dq", "dk", "dv")


def drawn(dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and do: the same numbers in any dtype."""
    return [(values(SHAPE, torch.bfloat16, "cpu", seed=i) / 2).to(device, dtype) for i in range(4)]


def alone(dtype: torch.dtype) -> dict[str, Tensor]:
    """In one process on the CPU, by torch's formula."""
    *given, do = drawn(dtype, "cpu")
    q, k, v = leaves = [x.requires_grad_() for x in given]
    with sdpa_kernel(SDPBackend.MATH):
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
    return dict(zip(NAMES, (o.detach(), *torch.autograd.grad(o, leaves, do))))


def ring(mesh: Any) -> dict[str, Tensor]:
    """All tokens of the result and the gradients."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    buffers = drawn(torch.bfloat16, f"cuda:{mesh.get_local_rank()}")
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        *given, do = (x.detach().clone() for x in buffers)
        q, k, v = leaves = [x.requires_grad_() for x in given]
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
        gradients = torch.autograd.grad(o, leaves, do)
        whole = context_parallel_unshard(mesh, [o.detach(), *gradients], [2] * 4)
    return {name: x.cpu() for name, x in zip(NAMES, whole)}


def on_dualops(mesh: Any) -> dict[str, Any]:
    """The same with dualops in the place of torch's flash kernels, and the names of the kernels that ran."""
    flash_attention_impl.register()
    torch.nn.attention.activate_flash_attention_impl("dualops")  # pyright: ignore[reportArgumentType]
    try:
        found = ring(mesh)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            ring(mesh)
            torch.cuda.synchronize()
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    names = {event.name for event in seen.events() or () if event.device_type == DeviceType.CUDA}
    return found | {"kernels": {name for name in names if "attention" in name or "flash" in name}}
