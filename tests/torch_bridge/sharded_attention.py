"""Calls of attention and retention on DTensors."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dualops import torch_bridge as ours

from .conftest import values
from .sharded import S0, S1, S2, Case, P, R

B, H, SQ, SK, D = 2, 4, 5, 6, 8
SLOPES = values((H,), torch.float32, "cpu", seed=20).abs()
KEPT = torch.arange(B * SK).reshape(B, SK) % 5 != 1
ENDS = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
STARTS, LENGTHS = (torch.tensor(numbers, dtype=torch.int32) for numbers in ((2, 0, 1), (5, 4, 8)))


def attention(
    word: Any, heads: int = H, result: Any = "as given", batch: int = B, Hkv: int | None = None, **more: Any
) -> Case:
    """more: (shape or tensor, its placement, that of its gradient); all others are parameters."""
    kv = (batch, Hkv or heads, SK, D)
    shared, result = (R if Hkv == 1 else word), word if result == "as given" else result
    extra = {name: each for name, each in more.items() if isinstance(each, tuple) and len(each) == 3}
    summed = {R: P if Hkv == 1 else R}.get(shared, shared) if result else None
    return Case(
        partial(ours.flash_attention, return_lse=True),
        {"q": (batch, heads, SQ, D), "k": kv, "v": kv} | {name: each[0] for name, each in extra.items()},
        {"q": word, "k": shared, "v": shared} | {name: each[1] for name, each in extra.items()},
        (result, result),
        {"q": result, **dict.fromkeys("kv", summed if result != R else R)}
        | {name: each[2] for name, each in extra.items()},
        {name: each for name, each in more.items() if name not in extra},
    )


def even_keys(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j % 2 == 0) | (i > j)


def heads_apart(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j + h // 2) % 2 == 0


def batches_apart(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * (1.0 + b) - 0.125 * j


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of sharded tokens, computed with sharded heads."""
    from torch.distributed.tensor import DTensor, Shard

    def to(axis: int, x: Tensor) -> Tensor:
        return x.redistribute(placements=[Shard(axis)]) if isinstance(x, DTensor) else x

    return to(2, ours.flash_attention(to(1, q), to(1, k), to(1, v), causal=True, window=(3, None)))


def varlen(word: Any, Hkv: int = 2, ranges: bool = False, **more: Any) -> Case:
    shapes = {"q": (9, H, D), "k": (9, Hkv, D), "v": (9, Hkv, D)}
    keys = {"k_starts": STARTS, "k_lengths": LENGTHS} if ranges else {"cu_seqlens_k": ENDS}
    return Case(
        partial(ours.flash_attention_varlen, causal=True, alibi_slopes=None),
        {**shapes, "cu_seqlens_q": ENDS, **keys, "sinks": (H,)},
        dict.fromkeys("qkv", word) | {"sinks": S0},
        (word,),
        dict.fromkeys("qkv", word) | {"sinks": S0},
        more,
    )


GAMMA = torch.tensor([0.5, 0.75, 0.875, 1.0])
QKV = {"q": (B, H, SQ, D), "k": (B, H, SQ, D), "v": (B, H, SQ, 3)}


def retention(word: Any, result: Any, *, state: bool = False, decay: Any = None, **tensors: Any) -> Case:
    """tensors: (shape or tensor, its placement, that of its gradient)."""
    return Case(
        ours.retention,
        QKV | {name: each[0] for name, each in tensors.items()},
        dict.fromkeys("qkv", word) | {name: each[1] for name, each in tensors.items()},
        (result,) * (2 if state else 1),
        dict.fromkeys("qkv", result) | {name: each[2] for name, each in tensors.items()},
        {"return_state": state},
    )


ATTENTION = {
    "attention batch": attention(S0, key_padding_mask=(KEPT, S0, R), sinks=((H,), R, P), bias=((B, 1, SQ, SK), S0, S0)),
    "attention batch, bias for all": attention(S0, bias=((SQ, SK), R, P), causal=True),
    "attention heads": attention(S1, alibi_slopes=(SLOPES, S0, R), sinks=((H,), S0, S0), causal=True, window=(4, 0)),
    "attention heads, bias a head": attention(S1, bias=((1, H, SQ, SK), S1, S1), softcap=3.0),
    "attention heads, bias without them": attention(S1, bias=((B, 1, 1, SK), R, P), key_padding_mask=(KEPT, R, R)),
    "attention three heads": attention(S1, heads=3),
    "attention grouped heads": attention(S1, Hkv=2, sinks=((H,), S0, S0), causal=True),
    "attention one head of k": attention(S1, Hkv=1, causal=True),
    "attention groups that can't be split": attention(S1, heads=6, Hkv=3, batch=1, result=R),
    "attention batch and heads": attention((S0, S1), Hkv=2, sinks=((H,), (R, S0), (P, S0))),
    "attention heads twice": attention((S1, S1)),
    "attention groups twice": attention((S1, S1), heads=12, Hkv=6, batch=1, result=None),
    "attention tokens": attention(S2, result=None, causal=True),
    "attention dropout": attention(S1, result=R, dropout_p=0.5, seed=7),
    "attention mask_mod": attention(S1, mask_mod=even_keys),
    # the same tensors: what is remembered of one function must not serve the other
    "attention mask_mod by heads": attention(S1, result=None, mask_mod=heads_apart),
    "attention mask_mod by heads, one batch": attention(S1, batch=1, result=R, mask_mod=heads_apart),
    "attention mask_mod by heads, batch": attention(S0, mask_mod=heads_apart),
    "attention score_mod by batches": attention(S0, heads=1, result=R, score_mod=batches_apart),
    "attention score_mod by batches, heads": attention(S1, score_mod=batches_apart),
    "attention block_mask": attention(
        S1, mask_mod=even_keys, block_mask=(ours.block_mask(even_keys, None, None, SQ, SK, like=SLOPES).lists, R, R)
    ),
    "ulysses": Case(
        ulysses,
        {"q": (1, H, 6, D), "k": (1, 2, 6, D), "v": (1, 2, 6, D)},
        dict.fromkeys("qkv", S2),
        (S2,),
        dict.fromkeys("qkv", S2),
    ),
    "varlen heads": varlen(S1),
    "varlen heads, key ranges": varlen(S1, ranges=True),
    "varlen score_mod": varlen(S1, score_mod=batches_apart),
    "retention batch": retention(S0, S0, state=True, initial_state=((B, H, D, 3), S0, S0)),
    "retention heads": retention(S1, S1, gamma=(GAMMA, S0, R), state=True, initial_state=((B, H, D, 3), S1, S1)),
    "retention heads by their numbers": retention(S1, None),
    "retention log_decay": retention(
        S1, S1, log_decay=(-values((B, H, SQ), torch.float32, "cpu", seed=21).abs(), S1, R)
    ),
    "retention varlen": Case(
        ours.retention_varlen,
        {"q": (9, H, D), "k": (9, H, D), "v": (9, H, 3), "cu_seqlens": ENDS, "gamma": GAMMA},
        dict.fromkeys("qkv", S1) | {"gamma": S0},
        (S1,),
        dict.fromkeys("qkv", S1),
    ),
}
