"""torch's scaled_dot_product_attention with dualops' kernels, as a function.

    from dualops.torch_bridge.integrations.scaled_dot_product_attention import scaled_dot_product_attention

has the arguments and the result of `torch.nn.functional.scaled_dot_product_attention`. To have torch's own function
call dualops, see `flash_attention_impl`; its `register` can be imported from here too.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import with_dense_rows
from ..flash_attention import flash_attention
from .flash_attention_impl import register as register

NAME = "scaled_dot_product_attention"


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
    """softmax(scale * query @ key.T + attn_mask) @ value, as torch's; differentiable once, by attn_mask too.

    query [..., H, Sq, D], key [..., Hkv, Sk, D], value [..., Hkv, Sk, Dv], with any number of axes from 2 on, of which
    those before the last two broadcast; with enable_gqa H is a multiple of Hkv. Any axis may have size 0: without keys
    the result is 0, and with D = 0 every score is 0 before the mask. attn_mask broadcasts to [..., H, Sq, Sk]. It is of
    bool (True is seen), or of float32 or query's dtype and added to the scores. is_causal: query i sees keys up to i,
    wherever the keys end. scale None: 1 / sqrt(D). dropout_p, from 0 to 1, is always applied, as by torch. A query
    without a visible key gives 0.

    Returns [..., H, Sq, Dv] of query's dtype. Dropout draws other numbers than torch's. ValueError for attn_mask with
    is_causal, TypeError for an attn_mask of another dtype; other errors, and all else, are those of
    `dualops.torch_bridge.flash_attention`.

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
    leading = (*batches, H) if enable_gqa else torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    Sq, Sk, Dv = query.shape[-2], key.shape[-2], value.shape[-1]
    # flash_attention takes 0 batches, queries and keys, but neither 0 heads nor 0 columns
    if H == 0:
        key, value = (x[..., :0, :, :] if x.ndim > 2 else x for x in (key, value))
        Hkv = 0
    if query.shape[-1] == key.shape[-1] == 0:
        query, key = pad(query, (0, 1)), pad(key, (0, 1))
    if Dv == 0:
        value = pad(value, (0, 1))
    B = prod(batches) if H else 0
    q, k, v = (
        with_dense_rows(x.expand(*batches, count, *x.shape[-2:]).reshape(B, count if H else 1, *x.shape[-2:]))
        for x, count in ((query, H), (key, Hkv), (value, Hkv))
    )
    everything = dropout_p == 1  # then no probability remains
    options: dict[str, Any] = {"scale": scale, "causal": "top_left" if is_causal else False}
    if attn_mask is not None:
        options |= _mask(attn_mask, (*batches, H, Sq, Sk), query)
    o = flash_attention(q, k, v, dropout_p=0.0 if everything else dropout_p, **options)
    return (o * 0 if everything else o)[..., :Dv].reshape(*leading, Sq, Dv)


def _heads(heads: list[int], enable_gqa: bool) -> tuple[int, int]:
    """Return the heads of query, and of key and value."""
    H, *others = heads
    if not enable_gqa:
        sizes = {count for count in heads if count != 1} or {1}
        if len(sizes) > 1:
            raise ValueError(
                f"{NAME}: query, key and value have {', '.join(map(str, heads))} heads, expected the same or 1, "
                "or enable_gqa=True"
            )
        H = sizes.pop()
        return H, 1 if others == [1, 1] else H
    if others[0] != others[1]:
        raise NotImplementedError(f"{NAME}: key has {others[0]} heads, value has {others[1]}, expected the same")
    return H, others[0]


def _mask(mask: Tensor, shape: tuple[int, ...], query: Tensor) -> dict[str, Tensor]:
    """Return a mask of [..., H, Sq, Sk] as options: as a mask of keys if possible, else added to the scores."""
    dtypes = torch.bool, torch.float32, query.dtype
    if _dtype_under_autocast(mask) not in (*dtypes, _dtype_under_autocast(query)):
        raise TypeError(
            f"{NAME}: attn_mask has dtype {mask.dtype}, expected {', '.join(str(d) for d in dict.fromkeys(dtypes))}"
        )
    *batches, H, _, Sk = shape
    if not _broadcasts(tuple(mask.shape), shape):
        raise ValueError(f"{NAME}: attn_mask has shape {tuple(mask.shape)}, expected one that broadcasts to {shape}")
    mask = mask[(None,) * (len(shape) - mask.ndim)]  # [..., 1 or H, 1 or Sq, 1 or Sk]
    if H == 0:
        mask = mask.expand(*batches, 0, *mask.shape[-2:])
    elif any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*batches, *mask.shape[-3:])
    B = prod(mask.shape[:-3])
    mask = mask.reshape(B, *mask.shape[-3:]) if H else mask.reshape(0, 1, *mask.shape[-2:])
    if mask.dtype is not torch.bool:
        return {"bias": mask.to(query.dtype)}
    if mask.shape[1] == mask.shape[2] == 1:
        return {"key_padding_mask": mask[:, 0, 0].expand(prod(batches) if H else 0, Sk)}
    return {"bias": torch.where(mask, 0.0, -torch.inf).to(query.dtype)}


def _broadcasts(mask: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a mask of that shape broadcasts to scores of `shape`, without widening them."""
    ends = zip(reversed(mask), reversed(shape))
    return len(mask) <= len(shape) and all(mine in (1, size) for mine, size in ends)


def _dtype_under_autocast(x: Tensor) -> torch.dtype:
    """Return a tensor's dtype under autocast."""
    kind = x.device.type
    if x.is_floating_point() and x.dtype is not torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype
