"""flash-attn's functions with dualops' kernels.

    from dualops.torch_bridge.integrations.flash_attn import flash_attn_func

Arguments, their order and their defaults are those of flash-attn 2. Tensors are [B, S, H, D]; the kernels read
[B, H, S, D] views without a copy. float32 and float64 work too, and CPU tensors in NumPy, for comparison. Gradients are
always deterministic. An argument without a kernel raises NotImplementedError with its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..flash_attention import flash_attention, flash_attention_varlen
from ..rope import rope

Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B, Sq, H, D] to k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv]: [B, Sq, H, Dv], differentiable once.

    causal and window_size (left, right; -1 is unbounded) count from the last key: query i stands at i + Sk - Sq.
    softcap 0 is none. alibi_slopes [H] is float32 or of q's dtype. return_attn_probs, without dropout: (out,
    lse [B, H, Sq], None).
    """
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    return _of_batches("flash_attn_func", q, k, v, *given)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`flash_attn_func` of packed sequences: q [total_q, H, D], k [total_k, Hkv, D], cu_seqlens [B + 1] of int32.

    return_attn_probs, without dropout: (out, lse [H, total_q], None).
    """
    op = "flash_attn_varlen_func"
    _refuse(op, block_table=block_table)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    return _of_sequences(op, q, k, v, lengths, *given)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q, k and v in one tensor [B, S, 3, H, D], without a copy."""
    op = "flash_attn_qkvpacked_func"
    q, k, v = _unpacked(op, "qkv", qkv, 3, ndim=5)
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    return _of_batches(op, q, k, v, *given)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of k and v in one tensor [B, Sk, 2, Hkv, D], without a copy."""
    op = "flash_attn_kvpacked_func"
    k, v = _unpacked(op, "kv", kv, 2, ndim=5)
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    return _of_batches(op, q, k, v, *given)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one tensor [total, 3, H, D], without a copy."""
    op = "flash_attn_varlen_qkvpacked_func"
    q, k, v = _unpacked(op, "qkv", qkv, 3, ndim=4)
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    return _of_sequences(op, q, k, v, (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), *given)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of k and v in one tensor [total_k, 2, Hkv, D], without a copy."""
    op = "flash_attn_varlen_kvpacked_func"
    k, v = _unpacked(op, "kv", kv, 2, ndim=4)
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    return _of_sequences(op, q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), *given)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q [B, Sq, H, D] to a cache [B, Smax, Hkv, D] with a number of keys per batch; no gradient.

    cache_seqlens: the number of cached keys, an integer or [B] of int32; None: all of them. It is not written to. k and
    v [B, Snew, Hkv, D] are first appended to the cache, in place; causal and window_size then count from the last of
    these. rotary_cos, rotary_sin [Smax, R/2]: k is rotated by its position. q is rotated too: from cache_seqlens on if
    causal or in a window, else at cache_seqlens throughout. num_splits is accepted and ignored.

    If cache_seqlens is a tensor, nothing waits for it; more than one causal or windowed query then needs a mask of
    [B, Sq, Smax]. return_softmax_lse: (out, lse [B, H, Sq]).
    """
    op = "flash_attn_with_kvcache"
    _refuse(op, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table)
    if (k is None) != (v is None):
        raise ValueError(f"{op}: one of k and v is given, expected both or none")
    B, Sq = q.shape[:2]
    new = 0 if k is None else k.shape[1]
    if cache_seqlens is None:
        cache_seqlens = k_cache.shape[1] - new
    options = _options(op, q, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    if rotary_cos is not None or rotary_sin is not None:
        if k is None or rotary_cos is None or rotary_sin is None:
            raise ValueError(f"{op}: rotary_cos is given, expected rotary_sin, k and v too")
        moving = causal or tuple(window_size) != (-1, -1)
        tables = rotary_cos, rotary_sin, rotary_interleaved
        q = _rotated(q, _places(cache_seqlens, B, Sq, q.device, moving=moving), *tables)
        k = _rotated(k, _places(cache_seqlens, B, new, q.device), *tables)
    if k is not None and v is not None:
        _append(op, k_cache, v_cache, k, v, cache_seqlens)
    if isinstance(cache_seqlens, Tensor):
        options |= _visible(op, cache_seqlens + new, Sq, k_cache.shape[1], q.dtype, options)
    else:
        k_cache, v_cache = k_cache[:, : cache_seqlens + new], v_cache[:, : cache_seqlens + new]
    o, lse = flash_attention(*_heads_first(q, k_cache, v_cache), **options, return_lse=True)
    o = o.transpose(1, 2)
    return (o, lse) if return_softmax_lse else o


def _of_batches(op: str, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Any:
    """`flash_attn_func` with the arguments of `_options`."""
    o, lse = flash_attention(*_heads_first(q, k, v), **_options(op, q, *given), return_lse=True)
    return_attn_probs, o = given[-1], o.transpose(1, 2)
    return (o, lse, None) if return_attn_probs else o


def _of_sequences(op: str, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], *given: Any) -> Any:
    """`flash_attn_varlen_func` with the arguments of `_options`."""
    o, lse = flash_attention_varlen(q, k, v, *lengths, **_options(op, q, *given), return_lse=True)
    return_attn_probs = given[-1]
    return (o, lse, None) if return_attn_probs else o


def _unpacked(op: str, name: str, packed: Tensor, count: int, *, ndim: int) -> tuple[Tensor, ...]:
    """Split the tensors that are packed along the third axis from the end."""
    if packed.ndim != ndim or packed.shape[-3] != count:
        expected = f"[{'B, S' if ndim == 5 else 'total'}, {count}, H, D]"
        raise ValueError(f"{op}: {name} has shape {tuple(packed.shape)}, expected {expected}")
    return packed.unbind(-3)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """View [B, S, H, D] as [B, H, S, D]."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _refuse(op: str, **given: Tensor | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{op}: {name} is given, which is not implemented")


def _options(
    op: str,
    q: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool = False,
) -> dict[str, Any]:
    """Convert flash-attn's options to dualops'."""
    if alibi_slopes is not None and alibi_slopes.ndim != 1:
        shape = tuple(alibi_slopes.shape)
        raise NotImplementedError(f"{op}: alibi_slopes has shape {shape}, expected [H]: slopes for all batches")
    if alibi_slopes is not None and (alibi_slopes.dtype, q.dtype) == (torch.float32, torch.float64):
        alibi_slopes = alibi_slopes.double()  # flash-attn has only float32 slopes; dualops' kernels want q's precision
    if return_attn_probs and dropout_p:
        raise NotImplementedError(f"{op}: return_attn_probs with dropout_p={dropout_p} is not implemented")
    left, right = (None if side < 0 else side for side in window_size)
    return {
        "dropout_p": dropout_p,
        "scale": softmax_scale,
        "causal": causal,
        "window": None if left is None and right is None else (left, right),
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
    }


def _places(lengths: int | Tensor, B: int, S: int, device: torch.device, *, moving: bool = True) -> Tensor:
    """Return positions [B, S] of tokens after the cached keys; without `moving` all at the first of them."""
    steps = torch.arange(S, device=device) if moving else torch.zeros(S, dtype=torch.int64, device=device)
    first = lengths.long()[:, None] if isinstance(lengths, Tensor) else lengths
    return (first + steps).expand(B, S)


def _rotated(x: Tensor, places: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x [B, S, heads, D] with its first dimensions rotated."""
    (heads_first,) = _heads_first(x)
    rotated, _ = rope(
        heads_first,
        heads_first[:, :0],
        cos,
        sin,
        positions=places.contiguous(),
        dim=2 * cos.shape[-1],
        interleaved=interleaved,
    )
    return rotated.transpose(1, 2)


def _append(op: str, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: int | Tensor) -> None:
    """Append k and v to the cache. A number of keys that leaves no room is an error; on a GPU it is torch's."""
    B, new = k.shape[:2]
    if isinstance(lengths, Tensor):
        batches = torch.arange(B, device=k.device)[:, None]
        places = _places(lengths, B, new, k.device)
        k_cache[batches, places], v_cache[batches, places] = k, v
        return
    if lengths + new > k_cache.shape[1]:
        raise ValueError(f"{op}: k_cache has room for {k_cache.shape[1]} keys, expected {lengths} + {new}")
    k_cache[:, lengths : lengths + new], v_cache[:, lengths : lengths + new] = k, v


def _visible(op: str, lengths: Tensor, Sq: int, Sk: int, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """Return options that show each batch its number of keys [B], with causality and window counted from the last."""
    if options["alibi_slopes"] is not None:
        raise NotImplementedError(f"{op}: alibi_slopes with a tensor cache_seqlens is not implemented")
    left, right = options["window"] or (None, None)
    right = 0 if options["causal"] else right
    keys = torch.arange(Sk, device=lengths.device)
    there = keys < lengths[:, None]  # [B, Sk]
    changed: dict[str, Any] = {"causal": False, "window": None}
    if left is None and (right is None or Sq == 1):
        return {**changed, "key_padding_mask": there}
    distance = keys - (torch.arange(Sq, device=lengths.device)[:, None] + (lengths - Sq)[:, None, None])  # [B, Sq, Sk]
    seen = there[:, None]
    if left is not None:
        seen = seen & (distance >= -left)
    if right is not None:
        seen = seen & (distance <= right)
    if Sq == 1:
        return {**changed, "key_padding_mask": seen[:, 0]}
    return {**changed, "bias": torch.where(seen[:, None], 0.0, -torch.inf).to(dtype)}
