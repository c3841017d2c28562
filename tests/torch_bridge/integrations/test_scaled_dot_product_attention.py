"""The drop-in compared with torch's own function."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs

from dualops.torch_bridge.integrations.scaled_dot_product_attention import scaled_dot_product_attention
from tests.torch_bridge.integrations.conftest import drawn


def qkv(device: str, *, q: tuple[int, ...], k: tuple[int, ...], Dv: int | None = None) -> Any:
    shapes = q, k, (*k[:-1], Dv or k[-1])
    return [drawn(*shape, device=device, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def both(tensors: Any, mask: Tensor | None = None, **options: Any) -> None:
    """Results and gradients are torch's."""
    leaves = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    q, k, v = tensors
    found, expected = (function(q, k, v, mask, **options) for function in (scaled_dot_product_attention, torchs))
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    incoming = drawn(*found.shape, device=found.device.type, seed=9)
    one, two = (torch.autograd.grad(x, leaves, incoming) for x in (found, expected))
    for x, y in zip(one, two, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def test_the_signature_is_torchs() -> None:
    """torch's function is built in and has none, but its documentation does."""
    documented = " ".join((torchs.__doc__ or "").split())
    names = [
        name if parameter.default is parameter.empty else f"{name}={parameter.default}"
        for name, parameter in inspect.signature(scaled_dot_product_attention).parameters.items()
    ]
    assert f"scaled_dot_product_attention({', '.join(names)}) -> Tensor" in documented


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((2, 3, 5, 4), (2, 3, 7, 4)),
        ((3, 5, 4), (3, 7, 4)),
        ((5, 4), (7, 4)),
        ((2, 2, 3, 5, 4), (2, 2, 3, 7, 4)),
        ((2, 1, 3, 5, 4), (1, 2, 3, 7, 4)),
        ((2, 3, 5, 4), (2, 1, 7, 4)),
        ((2, 1, 5, 4), (2, 3, 7, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_number_of_axes(q: tuple[int, ...], k: tuple[int, ...], is_causal: bool, device: str) -> None:
    both(qkv(device, q=q, k=k, Dv=3), is_causal=is_causal, scale=0.7)


@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(is_causal: bool, device: str) -> None:
    both(qkv(device, q=(2, 6, 5, 4), k=(2, 2, 5, 4)), is_causal=is_causal, enable_gqa=True)
    both(qkv(device, q=(6, 5, 4), k=(3, 7, 4)), enable_gqa=True)


@pytest.mark.parametrize("lengths", [(5, 5), (3, 8), (8, 3)])
def test_causal_is_aligned_at_the_first_key(lengths: tuple[int, int], device: str) -> None:
    Sq, Sk = lengths
    both(qkv(device, q=(2, 3, Sq, 4), k=(2, 3, Sk, 4)), is_causal=True)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (2, 1, 5, 7), (2, 3, 1, 7), (2, 1, 1, 7), (1, 7), (5, 1)])
@pytest.mark.parametrize("kind", ["bool", "float", "minus infinity"])
def test_masks(shape: tuple[int, ...], kind: str, device: str) -> None:
    mask = drawn(*shape, device=device, seed=4)
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0, -1:] = False
    elif kind == "float":
        mask.requires_grad_()
    else:
        mask = mask.masked_fill(mask < -1, -torch.inf)
    both(qkv(device, q=(2, 3, 5, 4), k=(2, 3, 7, 4)), mask)


def test_masks_of_more_axes(device: str) -> None:
    tensors = qkv(device, q=(2, 2, 3, 5, 4), k=(2, 2, 3, 7, 4))
    both(tensors, drawn(2, 1, 3, 5, 7, device=device) > -0.5)
    both(tensors, drawn(2, 1, 1, 7, device=device).requires_grad_())


def test_a_query_that_sees_nothing_is_0(device: str) -> None:
    q, k, v = qkv(device, q=(1, 1, 3, 4), k=(1, 1, 5, 4))
    mask = torch.tensor([[True] * 5, [False] * 5, [True] * 5], device=device)
    found = scaled_dot_product_attention(q, k, v, mask)
    assert (found[:, :, 1] == 0).all()
    both([q, k, v], mask)


def test_strides_are_of_no_matter(device: str) -> None:
    """Views of [B, S, H, D] memory, and a last axis that is not contiguous."""
    q, k, v = (drawn(2, 5, 3, 4, device=device, seed=i).transpose(1, 2) for i in range(3))
    both([q.requires_grad_(), k.requires_grad_(), v.mT.contiguous().mT.requires_grad_()])


def test_dropout(device: str) -> None:
    q, k, v = qkv(device, q=(2, 4, 64, 4), k=(2, 4, 64, 4))
    ones = torch.ones_like(v)
    torch.manual_seed(0)
    one = scaled_dot_product_attention(q, k, ones, dropout_p=0.3)
    torch.manual_seed(0)
    assert torch.equal(one, scaled_dot_product_attention(q, k, ones, dropout_p=0.3))
    assert abs(float(one.mean()) - 1) < 0.05 < float(one.std())


def test_errors(device: str) -> None:
    q, k, v = qkv(device, q=(2, 4, 5, 4), k=(2, 2, 7, 4))
    with pytest.raises(
        ValueError, match="query, key and value have 4, 2, 2 heads, expected the same or 1, or enable_gqa"
    ):
        scaled_dot_product_attention(q, k, v)
    with pytest.raises(ValueError, match="attn_mask is given and is_causal is True, expected one of them"):
        scaled_dot_product_attention(q, k, v, torch.ones(5, 7, device=device).bool(), is_causal=True, enable_gqa=True)
    with pytest.raises(
        ValueError, match=r"attn_mask has shape \(6, 7\), expected one that broadcasts to \(2, 4, 5, 7\)"
    ):
        scaled_dot_product_attention(q, k, v, torch.ones(6, 7, device=device).bool(), enable_gqa=True)
    with pytest.raises(NotImplementedError, match="key has 2 heads, value has 1, expected the same"):
        scaled_dot_product_attention(q, k, v[:, :1], enable_gqa=True)
    with pytest.raises(ValueError, match="query has 1 axes"):
        scaled_dot_product_attention(q[0, 0, 0], k, v)
    with pytest.raises(TypeError, match="flash_attention: k has dtype float32, q has dtype float64"):
        scaled_dot_product_attention(q, k.float(), v, enable_gqa=True)


def test_compiled(device: str) -> None:
    q, k, v = qkv(device, q=(2, 3, 5, 4), k=(2, 3, 5, 4))
    mask = drawn(5, 5, device=device) > 0
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, mask), torchs(q, k, v, mask))
