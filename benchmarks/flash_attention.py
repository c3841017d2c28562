"""flash_attention: its asv classes and their peers: torch's implementations of attention, and FlashAttention-4.

A peer gets the options that it supports with the same meaning as in dualops, and refuses the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from .cases import suite
from .contestant import Contestant, with_autograd
from .samples import one_head
from .tree import spec

CAP = 30.0  # of `tanh_softcap`, a function of a case
DEVICE = "cuda"
# arguments that every peer has, parameters in some of their values
ALWAYS = {"causal", "scale", "return_lse", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}


def torch_mods() -> dict[str, Callable[..., Any]]:
    """Return the functions of cases that differ for torch's tensors, in torch's form."""
    tanh = import_module("torch").tanh
    return {"tanh_softcap": lambda score, b, h, i, j: CAP * tanh(score / CAP)}


def takes(problem: spec.Problem, *options: str, who: str = "torch") -> None:
    """Raise NotImplementedError for other options, which a peer lacks, or defines in another way (dropout)."""
    defaults = {param.name: param.default for param in problem.spec.params}
    found = [name for name, value in problem.params.items() if value != defaults[name]]
    found += [entry.name for entry in problem.spec.inputs if entry.optional and entry.name in problem.arrays]
    refused = [name for name in found if name not in (*ALWAYS, *options)]
    if refused:
        raise NotImplementedError(f"{who} has no {', '.join(refused)}")


def sdpa(problem: spec.Problem, *, name: str, backend: str) -> Contestant:
    """Return one backend of scaled_dot_product_attention: torch raises an error if it does not support the call."""
    takes(problem, *(("bias",) if backend == "EFFICIENT_ATTENTION" and not problem.causal else ()))
    if problem.causal is True and problem.Sq != problem.Sk:
        raise NotImplementedError("torch aligns the causal mask at the first key, not at the last")

    attention, functional = import_module("torch.nn.attention"), import_module("torch.nn.functional")
    chosen = getattr(attention.SDPBackend, backend)

    def forward(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        with attention.sdpa_kernel(chosen):
            return functional.scaled_dot_product_attention(
                q, k, v, bias, is_causal=bool(problem.causal), scale=problem.scale, enable_gqa=problem.group > 1
            )

    return with_autograd(name, problem, forward)


def flash_attention_4(problem: spec.Problem) -> Contestant:
    """Return FlashAttention's kernels in CuTe-DSL, on views of the same memory with tokens before heads.

    The gradient uses its deterministic mode.
    """
    attend = _attend_4(problem, "softcap", "window", "sinks")

    def forward(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        more = {} if sinks is None else {"learnable_sink": sinks.to(q.dtype)}
        o, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), **more)
        o = o.transpose(1, 2)
        return (o, lse) if problem.return_lse else o

    named = _named_4(problem)

    def backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any) -> Any:
        gradient = import_module("flash_attn.cute.interface")._flash_attn_bwd
        tokens_first = (x.transpose(1, 2) for x in (q, k, v, o, do))
        dq, dk, dv, *_ = gradient(*tokens_first, lse, deterministic=True, **named)
        return tuple(x.transpose(1, 2) for x in (dq, dk, dv))

    has_sinks = "sinks" in problem.arrays
    return Contestant("FlashAttention-4", forward, None if has_sinks else backward)


def flash_attention_4_varlen(problem: spec.Problem) -> Contestant:
    """Return FlashAttention-4 for packed sequences."""
    attend = _attend_4(problem, "softcap", "window")
    longest = {name: problem.params[name] for name in ("max_seqlen_q", "max_seqlen_k")}

    def forward(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
        o, lse = attend(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **longest)
        return (o, lse) if problem.return_lse else o

    return Contestant("FlashAttention-4", forward)


def _attend_4(problem: spec.Problem, *options: str) -> Callable[..., Any]:
    """Return FlashAttention-4's function, (q, k, v, ...) -> (o, lse), with a problem's options under its own names."""
    takes(problem, *options, who="FlashAttention-4")
    if problem.dtype not in ("float16", "bfloat16"):
        raise NotImplementedError(f"FlashAttention-4 takes float16 and bfloat16, not {problem.dtype}")
    if problem.causal == "top_left":
        raise NotImplementedError("FlashAttention-4 aligns the causal mask at the last key")
    attend, named = import_module("flash_attn.cute.interface")._flash_attn_fwd, _named_4(problem)

    def call(*arrays: Any, **more: Any) -> tuple[Any, Any]:
        o, lse, *_ = attend(*arrays, return_lse=problem.return_lse, **named, **more)
        return o, lse

    return call


def _named_4(problem: spec.Problem) -> dict[str, Any]:
    """Return a problem's options for FlashAttention-4's forward and gradient, under its names."""
    named: dict[str, Any] = {"softmax_scale": problem.scale, "causal": bool(problem.causal)}
    if problem.window:  # it supports causal or a window, not both
        left, right = problem.window
        named |= {"window_size_left": left, "window_size_right": 0 if problem.causal else right, "causal": False}
    if problem.softcap is not None:
        named["softcap"] = problem.softcap
    return named


def flex_attention(problem: spec.Problem) -> Contestant:
    """Return torch's flex_attention, compiled, with the problem's functions and a block mask from them.

    The block mask is built before anything is timed, as for dualops.
    """
    takes(problem, "score_mod", "mask_mod", "block_mask")
    if problem.causal == "top_left":
        raise NotImplementedError("flex_attention is asked for no causal mask from the first key")
    torch, flex = import_module("torch"), import_module("torch.nn.attention.flex_attention")
    attend, sizes = torch.compile(flex.flex_attention), (problem.Sq, problem.Sk)
    mods = {name: problem.params[name] for name in ("score_mod", "mask_mod") if problem.params[name] is not None}
    functions = {name: torch_mods().get(mod.function.__name__, mod.function) for name, mod in mods.items()}
    seen, offset = functions.pop("mask_mod", None), problem.Sk - problem.Sq

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i + offset

    if problem.causal:
        seen = causal if seen is None else flex.and_masks(causal, seen)
    blocks = flex.create_block_mask(seen, None, None, *sizes, device=DEVICE) if seen else None

    def forward(q: Any, k: Any, v: Any, block_mask: Any = None) -> Any:
        shared = problem.group > 1
        return attend(q, k, v, block_mask=blocks, scale=problem.scale, enable_gqa=shared, **functions)

    return with_autograd("flex_attention", problem, forward)


def varlen(problem: spec.Problem) -> Contestant:
    """Return torch.nn.attention.varlen, which is FlashAttention-2 and aligns the causal mask at the last key."""
    takes(problem)
    if problem.causal == "top_left" or problem.group > 1:
        raise NotImplementedError("torch's varlen_attn has neither grouped heads nor a causal mask from the first key")
    attend = import_module("torch.nn.attention.varlen").varlen_attn
    longest, window = (problem.max_seqlen_q, problem.max_seqlen_k), (-1, 0) if problem.causal else (-1, -1)

    def forward(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
        return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, scale=problem.scale, window_size=window)

    return with_autograd("torch varlen", problem, forward)


BACKENDS = {"SDPA efficient": "EFFICIENT_ATTENTION", "SDPA flash": "FLASH_ATTENTION", "SDPA cuDNN": "CUDNN_ATTENTION"}

FlashAttention = suite(
    "flash_attention",
    sample=one_head,
    peers={
        **{name: partial(sdpa, name=name, backend=backend) for name, backend in BACKENDS.items()},
        "FlashAttention-4": flash_attention_4,
        "flex_attention": flex_attention,
    },
    rungs=("naive", "sm80"),
)
FlashAttentionVarlen = suite(
    "flash_attention_varlen",
    sample=one_head,
    peers={"torch varlen": varlen, "FlashAttention-4": flash_attention_4_varlen},
    rungs=("naive",),
)
