"""The attention function: calls an operator with transformers' arguments and the result of `masks.attention_mask`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils.import_utils import is_tracing

from ...arguments import with_dense_rows
from ...flash_attention import flash_attention, flash_attention_varlen
from .context import group_of, shared_attention
from .masks import added, ends_of

NAME = "dualops"
_PACKINGS = WeakTensorKeyDictionary()  # position_ids -> their version and the starts of sequences, None if not packed


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' AttentionInterface: `(output [B, Sq, H, Dv], None)`.

    query [B, H, Sq, D], key and value [B, Hkv, Sk, D], from projections or from a cache. attention_mask: the result of
    `masks.attention_mask`, or the caller's mask [B or 1, H or 1, Sq, Sk], bool (True is seen) or added to the scores.
    is_causal None: module.is_causal. sliding_window: keys that a causal query sees, its own too. s_aux [H]: sinks.
    position_bias: added to the scores, differentiable. cu_seq_lens_q, cu_seq_lens_k: where packed sequences begin among
    all tokens, and the end; of all ranks' tokens, if `patch` had context_parallel.

    Raises NotImplementedError for what no operator does: probabilities, paged caches, masks of heads.
    """
    _refuse(module, others)
    query, key, value = map(with_dense_rows, (query, key, value))
    causal = _is_causal(module, is_causal)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "dropout_p": dropout}
    if s_aux is not None:
        options["sinks"] = s_aux if s_aux.dtype is torch.float32 else s_aux.to(query.dtype)
    if (group := group_of(module)) is not None:
        if position_bias is not None:
            options["bias"] = position_bias  # context_parallel refuses it
        if causal and sliding_window is not None:
            options["window"] = (sliding_window - 1, None)
        given = query, key, value, attention_mask, position_ids, (cu_seq_lens_q, cu_seq_lens_k)
        return shared_attention(_name(module), group, *given, causal=causal, **options), None
    mask, ends, longest = attention_mask, None, (query.shape[2], key.shape[2])
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        ends = _given_ends(module, mask, cu_seq_lens_q, cu_seq_lens_k)
        longest = _longest(query, key, max_length_q, max_length_k)
    else:
        if mask is not None:
            sliding_window = _window(module, mask, sliding_window)
            if mask.ndim == 3:
                keys = mask.shape[1] * mask.shape[2]
                key, value = key[:, :, :keys], value[:, :, :keys]
        if causal and (mask is None or mask.dtype is torch.uint8):
            mask = _by_positions(position_ids, query, key, sliding_window)
        if mask is not None and mask.dtype is torch.int32:
            ends = mask.flatten(), mask.flatten()
    if causal and sliding_window is not None:
        options["window"] = (sliding_window - 1, None)
    if ends is not None:
        if position_bias is not None:
            raise NotImplementedError(f"{_name(module)}: position_bias with packed sequences is not implemented")
        return _packed(query, key, value, ends, longest, causal=causal, **options), None
    if mask is not None and mask.ndim == 4:
        causal, options["window"] = False, None  # the mask contains both
        options |= _complete(mask, query, key)
    elif mask is not None and mask.shape[0]:
        options["key_padding_mask"] = mask.flatten(1)
    if position_bias is not None:
        bias = position_bias[..., : key.shape[2]].to(query.dtype)
        options["bias"] = bias if "bias" not in options else bias + options["bias"]
    o = flash_attention(query, key, value, causal=causal, **options)
    return o.transpose(1, 2).contiguous(), None


def _name(module: torch.nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return f"{type(module).__name__}{'' if layer is None else f' of layer {layer}'}"


def _refuse(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise for an argument with an unsupported effect. Others are those that models pass to all of their layers."""
    for name in ("output_attentions", "cache", "head_mask", "layer_head_mask"):
        if others.get(name) is not None and others[name] is not False:
            raise NotImplementedError(f"{_name(module)}: {name} is given, which attention {NAME!r} does not have")


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    if is_causal is not None:
        return is_causal
    # a config may make a decoder bidirectional without its layers' knowledge
    return bool(getattr(module, "is_causal", True) and getattr(getattr(module, "config", None), "is_causal", True))


def _window(module: torch.nn.Module, mask: Tensor, sliding_window: int | None) -> int | None:
    """Return the layer's window, if the mask says that it hides something."""
    cuts = mask.ndim == 2 if mask.dtype is torch.int32 else mask.ndim == 3 and mask.shape[1] > mask.shape[2]
    if not cuts:
        return None  # or it is in the mask
    if sliding_window is None:
        raise NotImplementedError(
            f"{_name(module)}: the model's mask has a sliding window, of which the layer does not tell attention"
        )
    return sliding_window


def _complete(mask: Tensor, query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """Return options for a mask of every query and key: a mask of keys if that is equal, else added to the scores."""
    mask = mask[..., : key.shape[2]]
    if mask.dtype is not torch.bool:
        return {"bias": mask.to(query.dtype)}
    if query.shape[2] == 1 and mask.shape[1] == 1:
        return {"key_padding_mask": mask[:, 0, 0].expand(query.shape[0], -1)}
    return {"bias": added(mask, query.dtype)}


def _given_ends(
    module: torch.nn.Module, mask: Tensor | None, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError(f"{_name(module)}: one of cu_seq_lens_q and cu_seq_lens_k is given, expected both or none")
    if mask is not None and mask.dtype is torch.bool and mask.ndim == 3 and mask.shape[0]:
        raise ValueError(f"{_name(module)}: cu_seq_lens_q is given, and padding; expected one of them")
    return cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)


def _longest(query: Tensor, key: Tensor, max_length_q: Any, max_length_k: Any) -> tuple[int, int]:
    """Return the longest of the given sequences; the value of a tensor on the GPU is not read, and all tokens are the
    bound.
    """
    most = (query.shape[0] * query.shape[2], key.shape[0] * key.shape[2])
    given = (max_length_q, max_length_k)
    one, two = (length if isinstance(length, int) else bound for length, bound in zip(given, most, strict=True))
    return one, two


def _by_positions(position_ids: Tensor | None, query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """Return the mask for packed sequences, from position_ids: not every model passes these to the mask function.

    None if nothing is packed. Read once for all layers of a forward; if nothing can be read, it is a dense mask.
    """
    B, S = query.shape[0], query.shape[2]
    if position_ids is None or position_ids.ndim != 2 or not position_ids.shape[1] == S == key.shape[2] or S == 1:
        return None
    if is_tracing(position_ids):
        numbers = find_packed_sequence_indices(position_ids)
        assert numbers is not None
        places = torch.arange(S, device=query.device)
        distance = places[:, None] - places
        near = (distance >= 0) & (distance < (S if window is None else window))
        return (numbers[:, :, None] == numbers[:, None])[:, None] & near
    version = None if position_ids.is_inference() else position_ids._version
    known = _PACKINGS.get(position_ids)
    if known is not None and known[0] is not None and known[0] == version:
        return known[1]
    numbers = find_packed_sequence_indices(position_ids.expand(B, -1))
    found = None if numbers is None else ends_of(numbers)
    _PACKINGS[position_ids] = version, found
    return found


def _packed(
    query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], **options: Any
) -> Tensor:
    """Compute attention of packed sequences, row after row: [B, S, H, Dv]."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B * S, heads, D]
    o = flash_attention_varlen(q, k, v, *ends, *longest, **options)
    return o.unflatten(0, (query.shape[0], query.shape[2])).contiguous()
