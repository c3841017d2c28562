"""Block masks in torch: made for a tensor, taken by attention and its gradient, in whatever way the call goes."""

from typing import Any

import numpy as np
import pytest
import torch

import dualops
from dualops import reference
from dualops.torch_bridge import block_mask, flash_attention

from .attention import woven

SIZES = (150, 140)


def tensors(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(2, 4, S, 8, generator=generator) for S in (SIZES[0], SIZES[1], SIZES[1]))
    return [x.to(device).requires_grad_() for x in made]


def test_lists(device):
    q, _, _ = tensors(device)
    made = block_mask(woven, 2, 4, *SIZES, like=q)
    assert made.lists.device == q.device and made.lists.dtype == torch.int32
    assert np.array_equal(made.lists.cpu(), reference.block_mask(woven, 2, 4, *SIZES).lists)
    assert block_mask(woven, 2, 4, *SIZES, like=q) is made
    assert dualops.block_mask(woven, 2, 4, *SIZES, like=q) is made


def test_a_call_and_its_gradient(device):
    given = tensors(device)
    made = block_mask(woven, 2, 4, *SIZES, like=given[0])
    with_it, without = (flash_attention(*given, mask_mod=woven, block_mask=one) for one in (made, None))
    assert torch.equal(with_it, without)
    do = torch.ones_like(with_it)
    for one, other in zip(*(torch.autograd.grad(o, given, do) for o in (with_it, without))):
        assert torch.equal(one, other)


def test_compiled(device):
    given = tensors(device)
    made = block_mask(woven, 2, 4, *SIZES, like=given[0])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, mask_mod=woven, block_mask=made)

    assert torch.equal(call(*given), flash_attention(*given, mask_mod=woven))


def test_one_on_another_device():
    q, k, v = (x.detach() for x in tensors("cpu"))
    lists = torch.zeros(1, 1, 2, 3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="block_mask is on meta, q on cpu, expected one device"):
        flash_attention(q, k, v, mask_mod=woven, block_mask=lists)


def test_like_is_a_tensor():
    with pytest.raises(TypeError, match=r"^block_mask: like is a list, expected a torch\.Tensor"):
        block_mask(woven, 1, 1, 3, 3, like=[1.0])  # pyright: ignore[reportArgumentType]


def test_of_numpy_and_in_other_libraries():
    assert isinstance(dualops.block_mask(woven, 1, 1, 3, 3, like=np.zeros(1)).lists, np.ndarray)
