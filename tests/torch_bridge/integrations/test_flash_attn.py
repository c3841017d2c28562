"""flash-attn's functions: its options, against attention written out; views, caches, and what is refused."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dualops.torch_bridge.integrations import flash_attn
from dualops.torch_bridge.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from tests.pairwise import pairwise
from tests.torch_bridge.integrations.conftest import drawn

B, H, HKV, D = 2, 4, 2, 8


def qkv(Sq: int, Sk: int, device: str) -> Any:
    q, k, v = (
        drawn(B, S, heads, D, device=device, seed=i) for i, (S, heads) in enumerate([(Sq, H), (Sk, HKV), (Sk, HKV)])
    )
    return q, k, v


def truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """flash-attn's documentation as a formula, [B, Sq, H, D]."""
    Sq, Sk = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(Sq, device=q.device)[:, None] + Sk - Sq, torch.arange(Sk, device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (i - j).abs()
    left, right = window_size
    seen = torch.ones(Sq, Sk, dtype=torch.bool, device=q.device)
    if causal or right >= 0:
        seen = seen & (j <= i + (0 if causal else right))
    if left >= 0:
        seen = seen & (j >= i - left)
    probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhij,bjhd->bihd", probabilities, v)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"causal": True, "window_size": (2, -1), "softmax_scale": 0.3},
    {"softcap": 2.0, "window_size": (-1, 0)},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64), "causal": True},
    {"alibi_slopes": torch.tensor([0.3, 0.2, 0.1, 0.7], dtype=torch.float32)},
]


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- functions of whole tensors ------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(6, 6), (3, 7)])
def test_flash_attn_func(lengths: tuple[int, int], options: dict[str, Any], device: str) -> None:
    leaves: Any = [x.requires_grad_() for x in qkv(*lengths, device)]
    options = on(device, options)
    found, expected = flash_attn_func(*leaves, **options), truth(*leaves, **options)
    assert found.is_contiguous()
    same(found, expected)
    incoming = drawn(*found.shape, device=device, seed=5)
    for x, y in zip(*(torch.autograd.grad(o, leaves, incoming) for o in (found, expected)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flash_attn_varlen_func(options: dict[str, Any], device: str) -> None:
    options = on(device, options)
    lengths_q, lengths_k = (3, 1, 4), (5, 2, 4)
    q = drawn(sum(lengths_q), H, D, device=device)
    k, v = (drawn(sum(lengths_k), HKV, D, device=device, seed=i) for i in (1, 2))
    ends_q, ends_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (lengths_q, lengths_k)
    )
    found = flash_attn_varlen_func(q, k, v, ends_q, ends_k, max(lengths_q), max(lengths_k), **options)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    same(found, torch.cat([truth(*(x[None] for x in part), **options)[0] for part in parts]))


def test_logsumexp(device: str) -> None:
    q, k, v = qkv(4, 6, device)
    found, lse, nothing = flash_attn_func(q, k, v, return_attn_probs=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * D**-0.5
    same(lse, scores.logsumexp(-1))
    assert nothing is None
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    ends_q, ends_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (4, 6))
    packed, lse_packed, _ = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 4, 6, return_attn_probs=True)
    same(packed, found.flatten(0, 1))
    same(lse_packed, lse.transpose(0, 1).flatten(1))


def test_dropout_is_of_torchs_generator(device: str) -> None:
    q, k, v = qkv(6, 6, device)
    torch.manual_seed(1)
    one = flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(1)
    assert torch.equal(one, flash_attn_func(q, k, v, 0.5))
    assert not torch.equal(one, flash_attn_func(q, k, v))


# --- packed tensors ------------------------------------------------------------------------------


PACKED = ("qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked")


def packed(name: str, device: str) -> tuple[list[Tensor], Callable[..., Any], Callable[..., Any]]:
    """Leaves, of which the last one is packed; a call with them; and the call with q, k and v of their own."""
    ends_q, ends_k = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 2, 5], [0, 4, 6]))
    rows_q, rows_k = ((5,), (6,)) if "varlen" in name else ((B, 5), (B, 7))
    if "qkv" in name:
        leaves = [drawn(*rows_q, 3, H, D, device=device)]
        lengths, of_plain = (ends_q, 3), (ends_q, ends_q, 3, 3)
    else:
        leaves = [drawn(*rows_q, H, D, device=device), drawn(*rows_k, 2, HKV, D, device=device, seed=1)]
        lengths = of_plain = (ends_q, ends_k, 3, 4)
    if "varlen" not in name:
        lengths = of_plain = ()
    *first, last = (x.requires_grad_() for x in leaves)
    plain = flash_attn_varlen_func if "varlen" in name else flash_attn_func
    return (
        leaves,
        partial(getattr(flash_attn, f"flash_attn_{name}_func"), *leaves, *lengths),
        partial(plain, *first, *last.unbind(-3), *of_plain),
    )


@pytest.mark.parametrize("name", PACKED)
def test_packed_tensors(name: str, device: str) -> None:
    """Results, logsumexp and gradients are those of the parts, with every option."""
    leaves, call, plain = packed(name, device)
    options = on(device, OPTIONS[3] | OPTIONS[4] | OPTIONS[6])
    (found, lse, nothing), (expected, expected_lse, _) = (
        each(**options, return_attn_probs=True) for each in (call, plain)
    )
    assert nothing is None
    same(found, expected)
    same(lse, expected_lse)
    same(call(**options), expected)
    incoming = drawn(*found.shape, device=device, seed=5)
    for x, y in zip(*(torch.autograd.grad(o, leaves, incoming) for o in (found, expected)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", PACKED)
def test_packed_tensors_are_read_where_they_are(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    function = "flash_attention_varlen" if "varlen" in name else "flash_attention"
    original = getattr(flash_attn, function)
    monkeypatch.setattr(flash_attn, function, lambda *args, **more: seen.extend(args[:3]) or original(*args, **more))
    (*first, last), call, _ = packed(name, device)
    call()
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (*first, *last.unbind(-3))]


def test_shapes_of_packed_tensors(device: str) -> None:
    qkv, ends = drawn(B, 5, 3, H, D, device=device), torch.tensor([0, 5], dtype=torch.int32, device=device)
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    wrong: list[tuple[Any, str]] = [
        (lambda: flash_attn_qkvpacked_func(kv),
         "_qkvpacked_func: qkv has shape (2, 5, 2, 4, 8), expected [B, S, 3, H, D]"),
        (lambda: flash_attn_kvpacked_func(q, qkv),
         "_kvpacked_func: kv has shape (2, 5, 3, 4, 8), expected [B, S, 2, H, D]"),
        (lambda: flash_attn_varlen_qkvpacked_func(qkv, ends, 5),
         "_varlen_qkvpacked_func: qkv has shape (2, 5, 3, 4, 8), expected [total, 3, H, D]"),
        (lambda: flash_attn_varlen_kvpacked_func(q[0], q[0], ends, ends, 5, 5),
         "_varlen_kvpacked_func: kv has shape (5, 4, 8), expected [total, 2, H, D]"),
    ]  # fmt: skip
    for call, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


# --- caches --------------------------------------------------------------------------------------


def rotation(x: Tensor, first: int, cos: Tensor, sin: Tensor, interleaved: bool, moving: bool = True) -> Tensor:
    """Of one sequence [S, heads, D], whose tokens come after `first` others."""
    half = cos.shape[-1]
    places = first + (
        torch.arange(len(x), device=x.device) if moving else torch.zeros(len(x), dtype=torch.int64, device=x.device)
    )
    c, s = cos[places][:, None], sin[places][:, None]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    one, two = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pair = one * c - two * s, two * c + one * s
    return torch.cat((torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest), -1)


@pairwise(
    options=[each for each in OPTIONS if "alibi_slopes" not in each],
    lengths=["number", "tensor", "all"],
    Sq=[1, 3],
    new=[None, "plain", "halves", "interleaved"],
)
def test_flash_attn_with_kvcache(options: dict[str, Any], lengths: str, Sq: int, new: str | None, device: str) -> None:
    """new: how keys that the call adds are rotated, None where it adds none."""
    Smax, count = 9, 3 if new else 0
    rotary = new if new != "plain" else None
    q, k_cache, v_cache = qkv(Sq, Smax, device)
    k, v = (drawn(B, count, HKV, D, device=device, seed=i) for i in (7, 8))
    there = {"number": [4, 4], "tensor": [5, 2], "all": [Smax - count] * B}[lengths]
    cache_seqlens = {"number": 4, "tensor": torch.tensor(there, dtype=torch.int32, device=device), "all": None}[lengths]
    cos, sin = (
        f(torch.arange(20, device=device)[:, None] * torch.tensor([1.0, 0.1], device=device).double())
        for f in (torch.cos, torch.sin)
    )
    expected, caches = [], []
    moving = bool(options.get("causal")) or "window_size" in options
    for b, n in enumerate(there):
        query, key = q[b], k[b]
        if rotary:
            query = rotation(query, n, cos, sin, rotary == "interleaved", moving)
            key = rotation(key, n, cos, sin, rotary == "interleaved")
        keys, entries = (torch.cat((x[b, :n], y)) for x, y in ((k_cache, key), (v_cache, v[b])))
        caches.append(keys)
        expected.append(truth(query[None], keys[None], entries[None], **options)[0])
    more: dict[str, Any] = {"k": k, "v": v} if new else {}
    if rotary:
        more |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary == "interleaved"}
    before = None if not isinstance(cache_seqlens, Tensor) else cache_seqlens.clone()
    found, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, **more, **options, return_softmax_lse=True
    )
    same(found, torch.stack(expected))
    assert lse.shape == (B, H, Sq)
    assert before is None or torch.equal(before, cache_seqlens)  # pyright: ignore[reportArgumentType]
    for b, keys in enumerate(caches):
        same(k_cache[b, : len(keys)], keys)


def test_slopes_with_a_cache(device: str) -> None:
    q, k, v = qkv(2, 7, device)
    slopes = torch.tensor([0.3, 0.2, 0.1, 0.7], device=device)
    same(
        flash_attn_with_kvcache(q, k, v, cache_seqlens=5, alibi_slopes=slopes, causal=True),
        truth(q, k[:, :5], v[:, :5], alibi_slopes=slopes, causal=True),
    )


# --- what is refused -----------------------------------------------------------------------------


def test_what_is_not_implemented_is_named(device: str) -> None:
    q, k, v = qkv(3, 5, device)
    cache = torch.zeros(B, dtype=torch.int32, device=device)
    ends = torch.tensor([0, 3], dtype=torch.int32, device=device)
    slopes = torch.ones(B, H, device=device)
    refused: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (flash_attn_func, (q, k, v), {"alibi_slopes": slopes}, r"flash_attn_func: alibi_slopes has shape \(2, 4\), ex"),
        (flash_attn_qkvpacked_func, (q[:, :, None].expand(-1, -1, 3, -1, -1),), {"alibi_slopes": slopes},
         r"flash_attn_qkvpacked_func: alibi_slopes has shape \(2, 4\)"),
        (flash_attn_func, (q, k, v, 0.5), {"return_attn_probs": True},
         "return_attn_probs with dropout_p=0.5 is not impl"),
        (flash_attn_varlen_func, (q[0], k[0], v[0], ends, ends, 3, 3), {"block_table": cache},
         "flash_attn_varlen_func: block_table is given, which is not implemented"),
        *(
            (flash_attn_with_kvcache, (q, k, v), {name: cache}, f"flash_attn_with_kvcache: {name} is given")
            for name in ("cache_batch_idx", "cache_leftpad", "block_table")
        ),
        (flash_attn_with_kvcache, (q, k, v), {"cache_seqlens": cache, "alibi_slopes": slopes[0]},
         "alibi_slopes with a tensor cache_seqlens is not implemented"),
    ]  # fmt: skip
    for function, args, more, message in refused:
        with pytest.raises(NotImplementedError, match=message):
            function(*args, **more)


def test_wrong_calls(device: str) -> None:
    q, k, v = qkv(3, 5, device)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"k": k}, "one of k and v is given, expected both or none"),
        ({"rotary_cos": k, "rotary_sin": k}, "rotary_cos is given, expected rotary_sin, k and v too"),
        ({"k": k, "v": v, "cache_seqlens": 1}, r"k_cache has room for 5 keys, expected 1 \+ 5"),
    ]
    for more, message in wrong:
        before = k.clone()
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(q, k, v, **more)
        assert torch.equal(before, k)


def test_signatures_are_flash_attns() -> None:
    common = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    cache = (
        "rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal window_size"
    )
    for function, names in (
        (flash_attn_func, f"q k v {common}"),
        (flash_attn_varlen_func, f"q k v {lengths} {common} block_table"),
        (flash_attn_qkvpacked_func, f"qkv {common}"),
        (flash_attn_kvpacked_func, f"q kv {common}"),
        (flash_attn_varlen_qkvpacked_func, f"qkv cu_seqlens max_seqlen {common}"),
        (flash_attn_varlen_kvpacked_func, f"q kv {lengths} {common}"),
        (
            flash_attn_with_kvcache,
            f"q k_cache v_cache k v {cache} softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
        ),
    ):
        assert list(inspect.signature(function).parameters) == names.split()
