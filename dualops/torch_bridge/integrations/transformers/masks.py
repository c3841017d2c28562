"""The mask function: transformers' visibility rules, in a form that attention can use without a dense mask.

transformers calls it once for each kind of layers in a forward, and passes its result to `attention.attention` through
the model, which ignores it. The result must be a tensor or None, so its dtype and axes encode the form:

    None                    every key, except for the layer's own causality and window
    bool [B, 1, keys]       the same, except padding; keys from `keys` on do not exist yet (a static cache)
    bool [0, 1, keys]       every key up to `keys`, without padding
    uint8 [0, 1, keys]      as before, but packed sequences may not have been looked for (nor with None)
    int32 [n + 1]           packed sequences: where they begin among all tokens, row after row, and the end
    bool [B, 1, 1, Sk]      for a single query: all that it sees
    float [B, 1, Sq, Sk]    a complete mask, to be added to the scores: for masks of any other kind

The forms [.., keys, 1] for [.., 1, keys], and [1, n + 1] for [n + 1], mean that a sliding window hides something. The
layer must then give its width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.utils.import_utils import is_tracing

MaskFunction = Callable[..., Any]

# mask functions are closures, which share their code with all others of their kind
_PACKED = packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_WINDOW = sliding_window_overlay(1).__code__
_BOTH = sliding_window_causal_mask_function(1).__code__


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> Tensor | None:
    """Return which query sees which key, in one of the forms above. The arguments are those of transformers' mask
    functions.

    Query i stands at q_offset + i, key j at kv_offset + j. attention_mask [B, positions] of bool, False for padding.
    Outside of compilation and capture it checks for padding, as transformers' own functions do, which waits for a GPU
    once per call.
    """
    if attention_mask is not None and attention_mask.ndim == 3:
        return attention_mask  # generation makes masks ahead, and the model asks again
    tracing = is_tracing(attention_mask)

    def evaluated() -> Tensor:
        """Compute bool [B, 1, Sq, Sk]."""
        visible: Any = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # pyright: ignore[reportArgumentType]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return visible

    end: int | None = kv_length
    windowed = False
    packed: Tensor | None = None
    if mask_function is bidirectional_mask_function:
        known = allow_is_bidirectional_skip
    else:
        end = _keys_so_far(q_length, q_offset, kv_offset, tracing)
        known = allow_is_causal_skip and mask_function is causal_mask_function
        if allow_is_causal_skip and local_size is not None and _is_window(local_size, config):
            known, windowed = True, local_size < (kv_length if end is None else end)
        elif not known and not tracing:
            packed, windowed = _packed(mask_function)
    if packed is not None:
        ends = ends_of(packed)
        return ends[None] if windowed else ends
    kept = None if attention_mask is None else _kept(attention_mask, kv_length, kv_offset)
    if known and end is not None and kept is not None and not tracing and bool(kept[:, :end].all()):
        kept = None
    if known and end == kv_length and kept is None and not windowed and (q_length == 1 or attention_mask is None):
        return None
    if q_length == 1:
        return evaluated()
    if not known or end is None or end > kv_length:
        return added(evaluated(), dtype)
    if kept is None:
        kept = torch.empty((0, end), dtype=torch.uint8 if attention_mask is None else torch.bool, device=device)
    return kept[:, :end].unsqueeze(-1 if windowed else 1)


def _keys_so_far(q_length: int, q_offset: int | Tensor, kv_offset: int, tracing: bool) -> int | None:
    """Count the keys up to the last query's own; None if that is on a device and must not be read."""
    if isinstance(q_offset, Tensor):
        if tracing or q_length == 1:
            return None
        q_offset = int(q_offset)
    return q_offset + q_length - kv_offset


def _is_window(local_size: int, config: Any) -> bool:
    """Whether a local size is that of a sliding window: transformers gives chunks under the same name."""
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return local_size == getattr(config, "sliding_window", None) and not chunked


def _kept(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """Return the part of a mask of all positions for these keys; keys without an entry are hidden."""
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def _packed(mask_function: MaskFunction) -> tuple[Tensor | None, bool]:
    """Return the numbers of packed sequences [B, S], and whether there is a window, for a mask with nothing else."""
    packed, windowed = None, False
    for part in _parts(mask_function):
        if part is None:
            return None, False
        if part.__code__ is _PACKED:
            (packed,) = (cell.cell_contents for cell in part.__closure__)
        windowed |= part.__code__ is _WINDOW
    return packed, windowed


def _parts(mask_function: MaskFunction) -> Iterator[Any]:
    """Yield the masks whose intersection this is, None for an unknown one."""
    if mask_function is causal_mask_function or getattr(mask_function, "__code__", None) in (_PACKED, _WINDOW):
        yield mask_function
        return
    code, cells = getattr(mask_function, "__code__", None), getattr(mask_function, "__closure__", None) or ()
    inside: dict[str, Any] = {}
    if code is not None:
        inside = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells)}
    if code is _BOTH:
        parts = inside["mask_functions"]
    elif inside.keys() == {"mask_function", "position_ids"}:  # positions within each sequence give the same mask
        parts = (inside["mask_function"],)
    else:
        yield None
        return
    for part in parts:
        yield from _parts(part)


def ends_of(packed: Tensor) -> Tensor:
    """Return where sequences begin among all tokens, row after row, and the end, from their numbers [B, S]."""
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    return torch.nn.functional.pad(starts.flatten().nonzero().flatten().int(), (0, 1), value=packed.numel())


def added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 for visible, minus infinity for hidden; one mask for all batches if they are alike."""
    if visible.stride(0) == 0:
        visible = visible[:1]
    return torch.where(visible, 0.0, -torch.inf).to(dtype)
