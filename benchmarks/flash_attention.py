"""flash_attention: its asv class and its peers, the backends of torch's scaled_dot_product_attention."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from .cases import suite
from .contestant import Contestant
from .samples import one_head
from .tree import spec


def sdpa(problem: spec.Problem, *, name: str, backend: str) -> Contestant:
    """One backend and no other: torch raises where it cannot take the call."""
    if problem.causal is True and problem.Sq != problem.Sk:
        raise NotImplementedError("torch aligns the causal mask at the first key, not at the last")

    attention, functional = import_module("torch.nn.attention"), import_module("torch.nn.functional")
    chosen = getattr(attention.SDPBackend, backend)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with attention.sdpa_kernel(chosen):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=bool(problem.causal), scale=problem.scale, enable_gqa=problem.group > 1
            )

    return Contestant(name, forward)


BACKENDS = {
    "SDPA efficient": "EFFICIENT_ATTENTION",
    "SDPA flash": "FLASH_ATTENTION",
    "SDPA cuDNN": "CUDNN_ATTENTION",
}

FlashAttention = suite(
    "flash_attention",
    sample=one_head,
    peers={name: partial(sdpa, name=name, backend=backend) for name, backend in BACKENDS.items()},
)
