"""torch's scaled_dot_product_attention on dualops' kernels, as a function and behind torch's own switch.

    from dualops.torch_bridge.integrations.scaled_dot_product_attention import scaled_dot_product_attention

takes the arguments of `torch.nn.functional.scaled_dot_product_attention`, and gives what that gives. With torch 2.13 or
newer, torch's own function can be told to use dualops wherever it would use its flash kernel (CUDA, float16 and
bfloat16, no mask), in compiled code and in context_parallel's ring too:

    from dualops.torch_bridge.integrations.scaled_dot_product_attention import register
    register()
    torch.nn.attention.activate_flash_attention_impl("dualops")
    ...
    torch.nn.attention.restore_flash_attention_impl()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import with_dense_rows
from ..flash_attention import _operator, flash_attention

NAME = "scaled_dot_product_attention"
IMPLEMENTATION = "dualops"  # its name in torch's register


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query @ key.T + attn_mask) @ value, as torch has it; differentiable once, attn_mask too.

    query [..., H, Sq, D], key [..., Hkv, Sk, D], value [..., Hkv, Sk, Dv], with any number of axes from 2 on, of which
    those before the last two broadcast; with enable_gqa H is a multiple of Hkv. attn_mask broadcasts to
    [..., H, Sq, Sk]: of bool (True is seen), or added to the scores. is_causal: query i sees keys up to i, wherever the
    keys end. scale None: 1 / sqrt(D). dropout_p is always applied, as by torch. A query that sees nothing gives 0.

    Returns [..., H, Sq, Dv] of query's dtype. Dropout draws other numbers than torch's. ValueError for attn_mask with
    is_causal; other errors, and all else, are those of `dualops.torch_bridge.flash_attention`.

    >>> import torch
    >>> x = torch.zeros(1, 2, 4)
    >>> scaled_dot_product_attention(x, x, torch.tensor([[[1.0], [3.0]]]), is_causal=True)
    tensor([[[1.],
             [2.]]])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 2:
            raise ValueError(f"{NAME}: {name} has {x.ndim} axes {tuple(x.shape)}, expected 2 or more: [..., S, D]")
    if attn_mask is not None and is_causal:
        raise ValueError(f"{NAME}: attn_mask is given and is_causal is True, expected one of them")
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value)]
    batches = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    H, Hkv = _heads(heads, enable_gqa)
    q, k, v = (
        with_dense_rows(x.expand(*batches, count, *x.shape[-2:]).reshape(-1, count, *x.shape[-2:]))
        for x, count in ((query, H), (key, Hkv), (value, Hkv))
    )
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "causal": "top_left" if is_causal else False}
    if attn_mask is not None:
        options |= _mask(attn_mask, tuple(batches), (q.shape[0], H, q.shape[2], k.shape[2]), q.dtype)
    o = flash_attention(q, k, v, **options)
    leading = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value))) if not enable_gqa else (*batches, H)
    return o.reshape(*leading, *o.shape[-2:])


def _heads(heads: list[int], enable_gqa: bool) -> tuple[int, int]:
    """Those of query, and of key and value."""
    H, *others = heads
    if not enable_gqa:
        H = max(heads)
        if any(count not in (1, H) for count in heads):
            raise ValueError(
                f"{NAME}: query, key and value have {', '.join(map(str, heads))} heads, expected the same or 1, "
                "or enable_gqa=True"
            )
    elif others[0] != others[1]:
        raise NotImplementedError(f"{NAME}: key has {others[0]} heads, value has {others[1]}, expected the same")
    return H, max(others)


def _mask(mask: Tensor, batches: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """A mask as options: of keys where that says it all, else added to the scores."""
    try:
        torch.broadcast_shapes(mask.shape, (*batches, *shape[1:]))
    except RuntimeError:
        raise ValueError(
            f"{NAME}: attn_mask has shape {tuple(mask.shape)}, expected one that broadcasts to {(*batches, *shape[1:])}"
        ) from None
    mask = mask[(None,) * (3 + len(batches) - mask.ndim)]  # [..., 1 or H, 1 or Sq, 1 or Sk]
    if any(size > 1 for size in mask.shape[: len(batches)]):
        mask = mask.expand(*batches, *mask.shape[-3:])
    mask = mask.reshape(-1, *mask.shape[-3:])
    if mask.dtype is not torch.bool:
        return {"bias": mask.to(dtype)}
    if mask.shape[1] == mask.shape[2] == 1:
        return {"key_padding_mask": mask[:, 0, 0].expand(shape[0], shape[3])}
    return {"bias": torch.where(mask, 0.0, -torch.inf).to(dtype)}


# --- torch's own switch --------------------------------------------------------------------------


def register() -> None:
    """Let torch.nn.attention.activate_flash_attention_impl know dualops; NotImplementedError before torch 2.13."""
    there = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if there is None:
        raise NotImplementedError(f"{NAME}: torch {torch.__version__} has no register of flash kernels, expected 2.13")
    there(IMPLEMENTATION, register_fn=Overrides)


class Overrides:
    """dualops in the place of torch's flash kernels, until it is removed."""

    def __init__(self, key: str = "CUDA"):
        self.library: Any = torch.library.Library("aten", "IMPL")
        self.library.impl("_scaled_dot_product_flash_attention", _forward, key)
        self.library.impl("_scaled_dot_product_flash_attention_backward", _backward, key)

    def remove(self) -> None:
        self.library = None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """What torch's kernel returns; the dropout's seed is the first of two numbers of its generator's state."""
    if return_debug_mask:
        raise NotImplementedError(f"{NAME}: return_debug_mask is True, which dualops does not have")
    state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=query.device) if dropout_p else None
    seed = None if state is None else state[0]
    arrays = (query, key, value, None, None, None, None, None, seed)
    o, lse = _operator.run(*arrays, scale, None, None, "top_left" if is_causal else False, None, None, dropout_p)
    if state is None:
        state = torch.zeros(2, dtype=torch.int64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    nothing = query.new_empty(0)
    return o, lse, None, None, query.shape[2], key.shape[2], state.view(torch.uint64), unused, nothing


def _backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    seed = philox_seed.view(torch.int64)[0] if dropout_p else None
    arrays = (query, key, value, out, logsumexp, with_dense_rows(grad_out), None, None, None, None, None, None, seed)
    params = (scale, None, None, "top_left" if is_causal else False, None, None, dropout_p)
    gradient: Any = _operator.backward
    dq, dk, dv, *_ = gradient.run(*arrays, *params, False)  # no bias, and no gradient of one
    return dq, dk, dv
