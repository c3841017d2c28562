"""flash_attention: its asv classes and their peers, what torch has of attention."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from .cases import suite
from .contestant import Contestant, with_autograd
from .samples import one_head
from .tree import spec


def plain(problem: spec.Problem) -> None:
    """Raise NotImplementedError for options that torch's functions have not, or have otherwise (dropout)."""
    known = {"causal", "scale", "return_lse", "max_seqlen_q", "max_seqlen_k"}
    defaults = {param.name: param.default for param in problem.spec.params}
    options = [name for name, value in problem.params.items() if name not in known and value != defaults[name]]
    options += [entry.name for entry in problem.spec.inputs if entry.optional and entry.name in problem.arrays]
    if options:
        raise NotImplementedError(f"torch has no {', '.join(options)}")


def sdpa(problem: spec.Problem, *, name: str, backend: str) -> Contestant:
    """One backend of scaled_dot_product_attention and no other: torch raises where it cannot take the call."""
    plain(problem)
    if problem.causal is True and problem.Sq != problem.Sk:
        raise NotImplementedError("torch aligns the causal mask at the first key, not at the last")

    attention, functional = import_module("torch.nn.attention"), import_module("torch.nn.functional")
    chosen = getattr(attention.SDPBackend, backend)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with attention.sdpa_kernel(chosen):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=bool(problem.causal), scale=problem.scale, enable_gqa=problem.group > 1
            )

    return with_autograd(name, problem, forward)


def varlen(problem: spec.Problem) -> Contestant:
    """torch.nn.attention.varlen, which is FlashAttention-2 and aligns the causal mask at the last key."""
    plain(problem)
    if problem.causal == "top_left" or problem.group > 1:
        raise NotImplementedError("torch's varlen_attn has neither grouped heads nor a causal mask from the first key")
    attend = import_module("torch.nn.attention.varlen").varlen_attn
    longest, window = (problem.max_seqlen_q, problem.max_seqlen_k), (-1, 0) if problem.causal else (-1, -1)

    def forward(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
        return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, scale=problem.scale, window_size=window)

    return with_autograd("torch varlen", problem, forward)


BACKENDS = {
    "SDPA efficient": "EFFICIENT_ATTENTION",
    "SDPA flash": "FLASH_ATTENTION",
    "SDPA cuDNN": "CUDNN_ATTENTION",
}

FlashAttention = suite(
    "flash_attention",
    sample=one_head,
    peers={name: partial(sdpa, name=name, backend=backend) for name, backend in BACKENDS.items()},
    rungs=("naive",),
)
FlashAttentionVarlen = suite(
    "flash_attention_varlen", sample=one_head, peers={"torch varlen": varlen}, rungs=("naive",)
)
