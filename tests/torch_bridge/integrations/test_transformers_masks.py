"""Masks as the mask function makes them, read by attention, against the dense mask that they stand for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from dualops.torch_bridge.integrations.transformers import attention as attention_module, masks, register
from dualops.torch_bridge.integrations.transformers.attention import attention
from tests.pairwise import pairwise

from .models import config, padding, with_cache

B, H, HKV, D = 2, 2, 1, 4


def layer(*, causal: bool = True, **own: Any) -> Any:
    return SimpleNamespace(is_causal=causal, layer_idx=3, **own)


def qkv(Sq: int, Sk: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(Sq + Sk)
    shapes = (B, H, Sq, D), (B, HKV, Sk, D), (B, HKV, Sk, D)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes)
    return q, k, v


def truth(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """[B, Sq, H, D]; 0 for a query that sees nothing."""
    scores = q @ k.repeat_interleave(H, 1).transpose(-1, -2) / D**0.5
    scores = scores.masked_fill(~visible[..., : k.shape[2]], -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v.repeat_interleave(H, 1)).transpose(1, 2)


def tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing could be read."""
    for module in (masks, attention_module):
        monkeypatch.setattr(module, "is_tracing", lambda *_: True)


def test_rows_that_lie_apart(device: str) -> None:
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv(5, 5, device))
    found, _ = attention(layer(), q, k, v, None)
    close = torch.testing.assert_close
    close(found, truth(q, k, v, torch.ones(5, 5, device=device).tril().bool()), rtol=1e-12, atol=1e-12)


CASES = [  # queries, keys, position of the first query, position of the first key
    (5, 5, 0, 0),
    (3, 8, 5, 0),
    (3, 12, 0, 0),  # a static cache, empty
    (3, 12, 4, 0),
    (1, 8, 7, 0),
    (1, 12, 4, 0),
    (1, 4, 9, 6),  # a sliding cache
    (3, 6, 9, 6),
    (1, 1, 0, 0),
]


@pairwise(case=CASES, window=[None, 1, 4, 100], padded=[None, "none", "left", "right"], blind=[False, True])
def test_every_form(
    case: tuple[int, ...], window: int | None, padded: str | None, blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blind:
        tracing(monkeypatch)
    Sq, Sk, q_offset, kv_offset = case
    positions = q_offset + Sq
    kept = None
    if padded is not None:
        kept = torch.ones(B, positions).bool() if padded == "none" else padding(padded, B, positions, "cpu").bool()
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    inputs: dict[str, Any] = {"batch_size": B, "q_length": Sq, "kv_length": Sk, "kv_offset": kv_offset}
    inputs |= {"mask_function": function, "attention_mask": kept}
    visible: Any = masking_utils.sdpa_mask(**inputs, q_offset=q_offset, allow_is_causal_skip=False)
    q, k, v = qkv(Sq, Sk)
    expected = truth(q, k, v, visible)
    for offset in (q_offset, torch.tensor(q_offset)):  # static caches have it on the device
        made = masks.attention_mask(
            **inputs, q_offset=offset, local_size=window, config=SimpleNamespace(sliding_window=window)
        )
        again = masks.attention_mask(
            **{**inputs, "attention_mask": made if made is not None and made.ndim == 3 else kept},
            q_offset=offset,
            local_size=window,
            config=SimpleNamespace(sliding_window=window),
        )
        for mask in (made, again):
            found, probabilities = attention(layer(), q, k, v, mask, sliding_window=window)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert found.is_contiguous() and probabilities is None


def test_no_mask_is_made_where_none_is_needed() -> None:
    """What is cheap: nothing, lengths and padding of [B, Sk]; and a dense mask only where there is no other way."""
    ones = torch.ones(B, 6).bool()
    plain: dict[str, Any] = {"batch_size": B, "q_length": 6, "kv_length": 6}
    assert masks.attention_mask(**plain) is None

    def shape(**more: Any) -> tuple[int, ...]:
        made = masks.attention_mask(**{**plain, **more})
        assert made is not None
        return tuple(made.shape)

    assert shape(attention_mask=ones) == (0, 1, 6)
    assert shape(attention_mask=padding("left", B, 6, "cpu").bool()) == (B, 1, 6)
    window = {
        "mask_function": masking_utils.sliding_window_causal_mask_function(3),
        "local_size": 3,
        "config": SimpleNamespace(sliding_window=3),
    }
    assert shape(**window) == (0, 6, 1)
    assert shape(**window, kv_length=9) == (0, 6, 1)  # keys that do not exist yet
    assert shape(q_length=1, q_offset=2, attention_mask=padding("left", B, 6, "cpu").bool()) == (B, 1, 1, 6)
    assert shape(mask_function=lambda b, h, q, k: (q + k) % 2 == 0) == (1, 1, 6, 6)


def masks_of(create: str, family: str, **more: Any) -> tuple[Any, Tensor]:
    """What a function of masking_utils makes for us, and the dense mask of the same arguments."""
    register()
    made = []
    for name in ("dualops", "sdpa"):
        own = config(family, attn_implementation=name if name == "dualops" else "eager", attention_chunk_size=None)
        own.attention_chunk_size = more.get("chunk")
        own._attn_implementation = name
        function = getattr(masking_utils, create)
        arguments = {"attention_mask": None, **with_cache(function, None), **more}
        arguments.pop("chunk", None)
        made.append(function(config=own, inputs_embeds=torch.zeros(B, 8, 0), **arguments))
    ours, dense = made
    return ours, torch.ones(8, 8).tril().bool()[None, None] if dense is None else dense


PACKED = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1]])


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize(
    ("create", "family", "more", "axes"),
    [
        ("create_causal_mask", "llama", {"position_ids": PACKED}, 1),
        ("create_sliding_window_causal_mask", "mistral", {"position_ids": PACKED}, 2),
        ("create_causal_mask", "llama", {"position_ids": torch.arange(8)[None]}, 0),
        ("create_chunked_causal_mask", "llama", {"chunk": 3}, 4),
        ("create_causal_mask", "llama", {"or_mask_function": lambda b, h, q, k: (q < 3) & (k < 3)}, 4),
        ("create_causal_mask", "llama", {"and_mask_function": lambda b, h, q, k: k != 2}, 4),
        ("create_causal_mask", "llama", {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]] * B)}, 4),
        ("create_causal_mask", "llama", {"position_ids": PACKED, "and_mask_function": lambda b, h, q, k: k != 2}, 4),
        ("create_causal_mask", "llama", {"allow_is_causal_skip": False}, 4),
    ],
)
def test_what_models_ask_for(
    create: str, family: str, more: dict[str, Any], axes: int, blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """axes: of the mask where values may be read; 0: there is none."""
    try:
        made, visible = masks_of(create, family, **more)
        if blind:
            tracing(monkeypatch)
            made, _ = masks_of(create, family, **more)
    except TypeError as error:  # transformers 5.17 has fewer of these arguments
        pytest.skip(str(error))
    if not blind:
        assert (0 if made is None else made.ndim) == axes
    q, k, v = qkv(8, 8)
    window = 4 if family == "mistral" else None
    found, _ = attention(layer(), q, k, v, made, sliding_window=window)
    torch.testing.assert_close(found, truth(q, k, v, visible), rtol=1e-12, atol=1e-12)


def test_looking_both_ways() -> None:
    """Without padding there is no mask, and a config that says so makes decoder layers look both ways."""
    own = config("llama", is_causal=False)
    register()
    own._attn_implementation = "dualops"
    create = masking_utils.create_causal_mask
    inputs = {"attention_mask": None, **with_cache(create, None)}
    made: Any = create(config=own, inputs_embeds=torch.zeros(B, 8, 0), **inputs)
    assert made is None
    q, k, v = qkv(8, 8)
    expected = truth(q, k, v, torch.ones(8, 8).bool())
    for module, option in ((layer(config=own), None), (layer(causal=False), None), (layer(), False)):
        found, _ = attention(module, q, k, v, None, is_causal=option)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    kept = padding("left", B, 8, "cpu")
    made = masking_utils.create_bidirectional_mask(config=own, inputs_embeds=torch.zeros(B, 8, 0), attention_mask=kept)
    assert tuple(made.shape) == (B, 1, 8)
    found, _ = attention(layer(causal=False), q, k, v, made)
    torch.testing.assert_close(found, truth(q, k, v, kept.bool()[:, None, None]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("Sk", [1, 7])
def test_attention_to_another_sequence(Sk: int) -> None:
    """Of a decoder to an encoder, with padding there: as many keys as there are, at least one."""
    kept = torch.ones(B, Sk).bool()
    kept[0, 1:] = False
    made = masks.attention_mask(
        B,
        5,
        Sk,
        mask_function=masking_utils.bidirectional_mask_function,
        attention_mask=kept,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=True,
    )
    q, k, v = qkv(5, Sk)
    found, _ = attention(layer(causal=False), q, k, v, made)
    torch.testing.assert_close(found, truth(q, k, v, kept[:, None, None]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("batches", [1, B])
@pytest.mark.parametrize("Sq", [1, 5])
def test_masks_of_ones_own(Sq: int, batches: int, heads: int) -> None:
    q, k, v = qkv(Sq, 7)
    visible = torch.rand(batches, heads, Sq, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    visible[..., 0, :] = False
    added = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    expected = truth(q, k, v, visible)
    found, _ = attention(layer(), q, k, v, visible, sliding_window=2)  # a mask of all pairs says all
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found, _ = attention(layer(), q, k, v, added)
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], rtol=1e-12, atol=1e-12)


def test_position_bias() -> None:
    q, k, v = qkv(6, 6)
    bias = torch.randn(1, H, 6, 6, dtype=torch.float64, requires_grad=True)
    kept = padding("right", B, 6, "cpu").bool()
    causal = torch.ones(6, 6).tril().bool()
    made = masks.attention_mask(B, 6, 6, attention_mask=kept)
    for mask, visible in ((None, causal), (made, causal & kept[:, None, None]), (causal[None, None], causal)):
        scores = q @ k.repeat_interleave(H, 1).transpose(-1, -2) / D**0.5 + bias
        expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v.repeat_interleave(H, 1)
        found, _ = attention(layer(), q, k, v, mask, position_bias=bias)
        torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)
        weight = torch.randn_like(found)
        one, two = (torch.autograd.grad((x * weight).sum(), bias)[0] for x in (found, expected.transpose(1, 2)))
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_what_attention_refuses() -> None:
    q, k, v = qkv(6, 6)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    windowed = torch.zeros(0, 6, 1).bool()
    padded = masks.attention_mask(B, 6, 6, attention_mask=padding("left", B, 6, "cpu").bool())
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"output_attentions": True}, NotImplementedError, "output_attentions is given, which attention 'dualops'"),
        ({"cache": object()}, NotImplementedError, "cache is given"),
        ({"head_mask": torch.ones(H)}, NotImplementedError, "head_mask is given"),
        ({"cu_seq_lens_q": ends}, ValueError, "one of cu_seq_lens_q and cu_seq_lens_k is given, expected both"),
        (
            {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "attention_mask": padded},
            ValueError,
            "cu_seq_lens_q is given, and padding; expected one of them",
        ),
        ({"attention_mask": windowed}, NotImplementedError, "mask has a sliding window, of which the layer does not"),
        ({"attention_mask": ends, "position_bias": q}, NotImplementedError, "position_bias with packed sequences"),
    ]
    for more, error, message in wrong:
        with pytest.raises(error, match=rf"SimpleNamespace of layer 3: .*{message}"):
            attention(layer(), q, k, v, **{"attention_mask": None, **more})
    attention(layer(), q, k, v, None, output_attentions=False, use_cache=True)  # what models hand on
