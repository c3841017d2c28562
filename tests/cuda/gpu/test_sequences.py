"""A sequence of varlen attention has the bits that it has alone and in an even call, with any other sequences."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

import dualops.cuda

# of one split and of several; 17000 keys make fewer splits than 16384
QUERIES = 2, 70, 33, 0, 64, 9, 5, 1, 300, 1
KEYS = 1100, 90, 512, 600, 513, 40, 0, 16384, 300, 17000
LENGTHS = 0, 5, 300, 1, 517, 64, 129, 0, 1000, 193, 192, 385, 384  # by two kernels and by one
CAUSAL: dict[str, Any] = {"causal": True}
WINDOW: dict[str, Any] = {"window": (700, 0), "softcap": 3.0}
SINKS: dict[str, Any] = {"causal": True, "sinks": True}


def tokens(count: int, H: int, D: int, seed: int) -> torch.Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, H, D, device="cuda", generator=made).bfloat16()


def ends_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], device="cuda", dtype=torch.int32)


def attend(arrays: Sequence[Any], queries: Sequence[int], keys: Sequence[int], **params: Any) -> Any:
    q, k, v = arrays
    sizes: Any = {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
    ends = ends_of(queries), ends_of(keys)
    return dualops.cuda.flash_attention_varlen(q, k, v, *ends, return_lse=True, **sizes, **params)


def even(x: torch.Tensor) -> torch.Tensor:
    """[1, H, S, D] of a sequence's tokens."""
    return x.transpose(0, 1)[None].contiguous()


def parts(x: torch.Tensor, lengths: Sequence[int], axis: int = 0) -> Any:
    return x.split(list(lengths), axis)


@pytest.mark.parametrize(
    ("H", "Hkv", "D", "Dv", "params"),
    [(4, 2, 128, 128, CAUSAL), (2, 2, 64, 64, SINKS), (8, 1, 192, 128, WINDOW), (4, 1, 64, 256, CAUSAL)],
    ids=str,
)
def test_forward(H, Hkv, D, Dv, params):
    params = {**params, "sinks": torch.linspace(-1.0, 2.0, H, device="cuda")} if "sinks" in params else params
    q, k, v = tokens(sum(QUERIES), H, D, 0), tokens(sum(KEYS), Hkv, D, 1), tokens(sum(KEYS), Hkv, Dv, 2)
    o, lse = attend((q, k, v), QUERIES, KEYS, **params)
    each = [parts(x, lengths) for x, lengths in ((q, QUERIES), (k, KEYS), (v, KEYS), (o, QUERIES))]
    lses = parts(lse, QUERIES, 1)
    for *own, found, found_lse in zip(*each, lses, strict=True):
        if len(own[0]) and len(own[1]):
            alone, alone_lse = attend(own, [len(own[0])], [len(own[1])], **params)
            assert torch.equal(found, alone) and torch.equal(found_lse, alone_lse)
            whole, whole_lse = dualops.cuda.flash_attention(*map(even, own), return_lse=True, **params)
            assert torch.equal(even(found), whole) and torch.equal(found_lse[None], whole_lse)
    few = [b for b, count in enumerate(QUERIES) if count <= 64]  # whose splits are other blocks' then
    picked = [torch.cat([x[b] for b in few]) for x in each]
    counts = [QUERIES[b] for b in few], [KEYS[b] for b in few]
    again, again_lse = attend(picked[:3], *counts, **params)
    assert torch.equal(again, picked[3]) and torch.equal(again_lse, torch.cat([lses[b] for b in few], 1))


@pytest.mark.parametrize(("D", "causal"), [(64, False), (128, True)])
def test_gradient(D, causal):
    q, k, v, do = (tokens(sum(LENGTHS), 2, D, seed) for seed in range(4))
    o, lse = attend((q, k, v), LENGTHS, LENGTHS, causal=causal)
    sizes: Any = {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS)}
    ends = ends_of(LENGTHS)
    found = dualops.cuda.flash_attention_varlen_backward(q, k, v, o, lse, do, ends, ends, causal=causal, **sizes)
    each = zip(*(parts(x, LENGTHS) for x in (q, k, v, o, do, *found)), parts(lse, LENGTHS, 1), strict=True)
    for *given, dq, dk, dv, own_lse in each:
        if len(given[0]):
            own_q, own_k, own_v, own_o, own_do = map(even, given)
            arrays = own_q, own_k, own_v, own_o, own_lse[None].contiguous(), own_do
            alone = dualops.cuda.flash_attention_backward(*arrays, causal=causal)
            assert all(torch.equal(even(x), y) for x, y in zip((dq, dk, dv), alone, strict=True))


@pytest.mark.parametrize(
    ("H", "Hkv", "D", "dtype", "params"),
    [(4, 2, 128, "bfloat16", WINDOW), (2, 2, 64, "bfloat16", CAUSAL), (4, 1, 64, "float32", CAUSAL)],
    ids=str,
)
def test_key_ranges(H, Hkv, D, dtype, params):
    """The bits of a call on a copy of their keys; of dk and dv the sums of what its sequences have."""
    queries, starts, lengths = (
        (5, 300, 0, 1000, 64, 517, 1),
        (900, 0, 3, 700, 0, 1400, 8),
        (300, 512, 40, 1500, 0, 800, 2000),
    )
    shapes = (sum(queries), H), (2200, Hkv), (2200, Hkv), (sum(queries), H)
    q, k, v, do = (tokens(*shape, D, seed).to(getattr(torch, dtype)) for seed, shape in enumerate(shapes))
    rows = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths)]).cuda()
    sizes: dict[str, Any] = {"max_seqlen_q": max(queries), "max_seqlen_k": max(lengths)}
    where = {
        name: torch.tensor(numbers, device="cuda", dtype=torch.int32)
        for name, numbers in (("k_starts", starts), ("k_lengths", lengths))
    }
    results = []
    for own, more in (
        ((k, v), {**where, "total_k_lengths": sum(lengths)}),
        ((k[rows], v[rows]), {"cu_seqlens_k": ends_of(lengths)}),
    ):
        given: dict[str, Any] = {"cu_seqlens_q": ends_of(queries), **more, **sizes, **params}
        o, lse = dualops.cuda.flash_attention_varlen(q, *own, **given, return_lse=True)
        results.append((o, lse, *dualops.cuda.flash_attention_varlen_backward(q, *own, o, lse, do, **given)))
    ranges, copied = results
    for one, other in zip(ranges[:3], copied[:3], strict=True):
        assert torch.equal(one, other)
    for x, each in zip(ranges[3:], copied[3:], strict=True):
        sums = torch.zeros(x.shape, device="cuda")
        for start, length, part in zip(starts, lengths, parts(each, lengths), strict=True):
            sums[start : start + length] += part.float()
        assert torch.equal(x, sums.to(x.dtype))
