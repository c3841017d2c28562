"""Tokens behind the last sequence of varlen: whatever they hold, results and gradients are 0 there, lse is -inf."""

from typing import Any

import pytest
import torch

from dualops.torch_bridge import flash_attention_varlen, retention_varlen

from .conftest import values

ENDS, LEFT = (0, 3, 3, 40), 90  # more of them than a tile has rows


def tokens(count: int, dtype: torch.dtype, device: str, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Leaves of this number of tokens, and of `LEFT` more that are NaN."""
    made = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        made[name] = torch.full((count + LEFT, *shape), torch.nan, dtype=dtype, device=device)
        made[name][:count] = values((count, *shape), dtype, device, seed=seed)
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Bit for bit on the CPU. On a GPU another kernel may serve a call with more tokens, and adds in another order.

    dtype: of the terms, if the sum has another one.
    """
    eps = torch.finfo(dtype or found.dtype).eps
    most = 32 * eps * float(expected.abs().max()) if found.is_cuda else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=most)


@pytest.mark.parametrize(("with_sinks", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=str)
def test_attention(with_sinks: bool, dtype: torch.dtype, device: str) -> None:
    ends, count = torch.tensor(ENDS, dtype=torch.int32, device=device), ENDS[-1]
    leaves = tokens(count, dtype, device, q=(4, 64), k=(2, 64), v=(2, 64))
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    if with_sinks:
        leaves["sinks"] = torch.tensor([0.5, -1.0, 0.0, 2.0], device=device).requires_grad_()
    results = []
    for cut in (None, count):  # with the tokens, and without
        q, k, v, *sinks = (x if x.ndim == 1 else x[:cut] for x in leaves.values())
        more: dict[str, Any] = {"sinks": sinks[0]} if sinks else {}
        o, lse = flash_attention_varlen(q, k, v, ends, ends, 37, 37, **options, **more)
        do, dlse = torch.ones_like(o), torch.ones_like(lse)
        do[count:], dlse[:, count:] = torch.nan, torch.nan
        results.append((o, lse, *torch.autograd.grad((o, lse), list(leaves.values()), (do, dlse))))
    (o, lse, *found), (own_o, own_lse, *expected) = results
    same(o[:count], own_o)
    same(lse[:, :count], own_lse)
    assert not o[count:].any() and torch.isneginf(lse[:, count:]).all()
    for x, own in zip(found, expected, strict=True):
        assert x.isfinite().all()
        same(x, own, dtype)  # the sinks' gradient is a float32 sum of terms made from o, which is rounded
        assert x.ndim == 1 or not x[count:].any()


@pytest.mark.parametrize(("dtype", "normalize"), [(torch.float32, "signed"), (torch.bfloat16, None)], ids=str)
def test_retention(dtype: torch.dtype, normalize: str | None, device: str) -> None:
    ends, count = torch.tensor(ENDS, dtype=torch.int32, device=device), ENDS[-1]
    leaves = tokens(count, dtype, device, q=(2, 64), k=(2, 64), v=(2, 64))
    decay = -torch.rand(count + LEFT, 2, device=device, generator=torch.Generator(device).manual_seed(0))
    leaves["log_decay"] = decay.requires_grad_()
    results = []
    for cut in (None, count):
        q, k, v, logs = (x[:cut] for x in leaves.values())
        o = retention_varlen(q, k, v, ends, 37, log_decay=logs, normalize=normalize)
        do = torch.ones_like(o)
        do[count:] = torch.nan
        results.append((o, *torch.autograd.grad(o, list(leaves.values()), do)))
    (o, *found), (own_o, *expected) = results
    same(o[:count], own_o)
    assert not o[count:].any()
    for x, own in zip(found, expected, strict=True):
        same(x, own)
        assert not x[count:].any()
