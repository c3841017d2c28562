"""dualops as an implementation in torch's own registry of flash attention kernels, with torch 2.11 or newer.

    from dualops.torch_bridge.integrations.flash_attention_impl import register
    register()
    torch.nn.attention.activate_flash_attention_impl("dualops")
    ...
    torch.nn.attention.restore_flash_attention_impl()

In between, torch runs dualops on CUDA tensors wherever it would run its flash kernel: in `scaled_dot_product_attention`
(float16 and bfloat16, no mask), of nested tensors too, in compiled code, in context_parallel's ring, and in
`torch.nn.attention.varlen.varlen_attn`. Activation also puts flash first in the order of kernels that torch tries,
since on Hopper torch tries cuDNN's first; removal restores the order. `varlen_attn` of torch 2.15 uses that order in
the thread that activates dualops; in other threads only under `sdpa_kernel(..., set_priority=True)`.

Causal attention counts from the last key, as in torch's flash kernel. An unsupported option raises NotImplementedError
with its name: alibi_slopes, seqused_k, block_table, num_splits and return_debug_mask.

A function that replaces an operator of torch has the operator's name. Arguments of newer versions of the operator
arrive in `others`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import with_dense_rows
from ..flash_attention import _operator, _operator_varlen

IMPLEMENTATION = "dualops"  # the name in torch's registry
FLASH = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)  # pyright: ignore[reportArgumentType]


def register() -> None:
    """Register dualops for torch.nn.attention.activate_flash_attention_impl."""
    torch.nn.attention.register_flash_attention_impl(IMPLEMENTATION, register_fn=Overrides)


class Overrides:
    """dualops in place of torch's flash kernels, which torch then tries first, until `remove`."""

    def __init__(self, key: str = "CUDA"):
        self.library: Any = torch.library.Library("aten", "IMPL")
        for implementation in _IMPLEMENTATIONS:
            if hasattr(torch.ops.aten, implementation.__name__):  # torch 2.11 lacks the in-place one
                self.library.impl(implementation.__name__, implementation, key)
        self.restore_order = _try_flash_first()

    def remove(self) -> None:
        self.library = None
        self.restore_order()


def _try_flash_first() -> Callable[[], None]:
    """Put flash first in torch's order of attention kernels. Returns a function that undoes it."""
    if torch.cuda.is_available():
        # the first choice on a GPU sets torch's own order, and would overwrite an earlier one
        x = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(x, x, x)  # pyright: ignore[reportPrivateImportUsage]
    before = torch._C._get_sdp_priority_order()
    ours = [FLASH, *(backend for backend in before if backend != FLASH)]
    torch._C._set_sdp_priority_order(ours)
    # varlen_attn of torch 2.15 uses the order only if this is set
    obeyed: Any = getattr(torch.nn.attention, "_sdpa_kernel_uses_priority", None)
    was_obeyed = obeyed is not None and obeyed.get()
    if obeyed is not None:
        obeyed.set(True)

    def restore() -> None:
        if torch._C._get_sdp_priority_order() == ours:  # else another one was set since
            torch._C._set_sdp_priority_order(before)
        if obeyed is not None:
            obeyed.set(was_obeyed)

    return restore


# --- [B, H, S, D]: scaled_dot_product_attention ---------------------------------------------------


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    _refuse("_scaled_dot_product_flash_attention", return_debug_mask=True if return_debug_mask else None, **others)
    call = _Call(scale, dropout_p, is_causal, _state(dropout_p, query))
    o, lse = call.forward(query, key, value)
    return o, lse, None, None, query.shape[2], key.shape[2], *call.unused(query)


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    """max_q and max_k are ignored: context_parallel of torch 2.11 passes those of the whole shard."""
    _refuse("_scaled_dot_product_flash_attention_backward", **others)
    call = _Call(scale, dropout_p, is_causal, philox_seed)
    return call.backward(query, key, value, out, logsumexp, grad_out)


# --- [B, S, H, D], or packed sequences: [total, H, D] --------------------------------------------------


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    _refuse("_flash_attention_forward", return_debug_mask=True if return_debug_mask else None, **others)
    call = _Call(
        scale,
        dropout_p,
        is_causal,
        _state(dropout_p, query),
        (window_size_left, window_size_right),
        _lengths("_flash_attention_forward", cum_seq_q, cum_seq_k, max_q, max_k),
    )
    o, lse = call.forward(*call.heads_first(query, key, value))
    return *call.heads_first(o), lse, *call.unused(query)


def _flash_attention_forward_no_dropout_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> Tensor:
    """Copy the first result of `_flash_attention_forward` to `out`."""
    op = "_flash_attention_forward_no_dropout_inplace"
    _refuse(op, dropout_p=dropout_p or None)
    lengths = cum_seq_q, cum_seq_k, max_q, max_k
    o, lse, *_ = _flash_attention_forward(
        query, key, value, *lengths, dropout_p, is_causal, return_debug_mask, **options
    )
    out.copy_(o)
    return lse


def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    _refuse("_flash_attention_backward", **others)
    call = _Call(
        scale,
        dropout_p,
        is_causal,
        rng_state,
        (window_size_left, window_size_right),
        _lengths("_flash_attention_backward", cum_seq_q, cum_seq_k, max_q, max_k),
    )
    q, k, v, o, do = call.heads_first(query, key, value, out, grad_out)
    return call.heads_first(*call.backward(q, k, v, o, logsumexp, do))


_IMPLEMENTATIONS = (
    _scaled_dot_product_flash_attention,
    _scaled_dot_product_flash_attention_backward,
    _flash_attention_forward,
    _flash_attention_forward_no_dropout_inplace,
    _flash_attention_backward,
)


# --- shared ------------------------------------------------------------------------------------------


NO_RANGES = None, None  # k_starts, k_lengths


class _Call(NamedTuple):
    """Options of torch's operators, in dualops' form."""

    scale: float | None
    dropout_p: float
    is_causal: bool
    state: Tensor  # two numbers of torch's generator; the first is the seed of dropout
    window: tuple[int | None, int | None] = (None, None)
    lengths: tuple[Tensor, Tensor, int, int] | None = None  # cum_seq_q, cum_seq_k, max_q, max_k

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return o and lse, of [B, H, S, D] or packed sequences."""
        if self.lengths is None:
            return _operator.run(q, k, v, None, None, None, None, None, self.seed, *self.params)
        *ends, max_q, max_k = self.lengths
        return _operator_varlen.run(q, k, v, *ends, *NO_RANGES, None, None, self.seed, max_q, max_k, None, *self.params)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        """Return dq, dk and dv."""
        arrays = q, k, v, o, lse, with_dense_rows(do)
        if self.lengths is None:
            gradient: Any = _operator.backward
            inputs = *arrays, None, None, None, None, None, None, self.seed
            return gradient.run(*inputs, *self.params, False)[:3]  # without a bias and its gradient
        gradient = _operator_varlen.backward
        *ends, max_q, max_k = self.lengths
        inputs = *arrays, *ends, *NO_RANGES, None, None, None, self.seed
        return gradient.run(*inputs, max_q, max_k, None, *self.params)[:3]

    def heads_first(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """View [B, S, H, D] as [B, H, S, D], and back. Packed sequences are unchanged."""
        return tensors if self.lengths else tuple(x.transpose(1, 2) for x in tensors)

    def unused(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last three results of torch's operators: rng_state, unused and debug_attn_mask."""
        return self.state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)

    @property
    def seed(self) -> Tensor | None:
        return self.state.view(torch.int64)[0] if self.dropout_p else None

    @property
    def params(self) -> tuple[Any, ...]:
        """Return scale, softcap, score_mod, causal, window, mask_mod, dropout_p. A right side of 0 is the same as
        causal.
        """
        left, right = (None if side is None or side < 0 else int(side) for side in self.window)
        causal = self.is_causal or right == 0
        right = None if causal else right
        window = None if left is None and right is None else (left, right)
        return self.scale, None, None, causal, window, None, self.dropout_p


def _state(dropout_p: float, query: Tensor) -> Tensor:
    """Return two 64-bit numbers, drawn by torch's generator if there is dropout."""
    shape, kind = (2,), {"dtype": torch.int64, "device": query.device}
    state = torch.randint(2**63 - 1, shape, **kind) if dropout_p else torch.zeros(shape, **kind)
    return state.view(torch.uint64)


def _lengths(
    op: str, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int
) -> tuple[Tensor, Tensor, int, int] | None:
    if cum_seq_q is None and cum_seq_k is None:
        return None
    if cum_seq_q is None or cum_seq_k is None:
        missing = "cum_seq_q" if cum_seq_q is None else "cum_seq_k"
        raise NotImplementedError(f"{op}: {missing} is None and the other is given, expected both or none")
    return cum_seq_q, cum_seq_k, int(max_q), int(max_k)


def _refuse(op: str, **given: Any) -> None:
    """Raise NotImplementedError for the first option that is not None."""
    for name, value in given.items():
        if value is not None:
            state = "is given" if isinstance(value, Tensor) else f"is {value!r}"
            raise NotImplementedError(f"{op}: {name} {state}, which dualops does not have")
