"""A user's script as a type checker sees it, which `make lint` runs over it; what runs without a GPU runs as a test."""

# what must not pass is marked, and a mark that nothing needs is an error:
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import TYPE_CHECKING, assert_type

import numpy as np
import torch
from torch import Tensor

import dualops
from dualops import reference, torch_bridge


def test_results_of_the_reference():
    q = np.zeros((1, 2, 3, 4), np.float32)
    ends = np.array([0, 3], np.int32)
    assert reference.flash_attention(q, q, q, causal=True).shape == q.shape
    o, lse = assert_type(reference.flash_attention(q, q, q, return_lse=True), tuple[np.ndarray, np.ndarray])
    dq, *_ = assert_type(reference.flash_attention_backward(q, q, q, o, lse, o), tuple[np.ndarray, ...])
    assert dq.shape == q.shape and lse.shape == (1, 2, 3)
    tokens = q[0].swapaxes(0, 1)  # [S, H, D]
    o, lse = reference.flash_attention_varlen(tokens, tokens, tokens, ends, ends, return_lse=True)  # max_seqlen: unsaid
    dq, *_ = reference.flash_attention_varlen_backward(tokens, tokens, tokens, o, lse, o, ends, ends)
    assert reference.flash_attention_varlen(tokens, tokens, tokens, ends, ends, 3, 3).shape == dq.shape == tokens.shape
    assert reference.flash_attention_blocked(q, q, q, block_q=2).shape == q.shape
    assert reference.rms_norm(q, eps=1e-5).shape == reference.layer_norm(q).shape == q.shape
    y, summed = assert_type(reference.rms_norm(q, residual=q), tuple[np.ndarray, np.ndarray])
    assert y.shape == summed.shape and len(reference.layer_norm(q, residual=q, return_stats=True)) == 4
    y, preactivation = reference.matmul(q, q, transpose_b=True, return_preactivation=True)
    assert reference.matmul(q, q, transpose_b=True).shape == y.shape == preactivation.shape


def test_results_of_the_bridge():
    q = torch.zeros(1, 2, 3, 4, requires_grad=True)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    assert torch_bridge.flash_attention(q, q, q).sum().requires_grad
    o, lse = assert_type(torch_bridge.flash_attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    tokens = q[0].transpose(0, 1)
    same = torch_bridge.flash_attention_varlen(tokens, tokens, tokens, ends, ends)
    assert torch.equal(same, torch_bridge.flash_attention_varlen(tokens, tokens, tokens, ends, ends, 3, 3))
    assert lse.shape == (1, 2, 3) and same.shape == tokens.shape and o.shape == q.shape
    y, summed = assert_type(torch_bridge.layer_norm(q, residual=q), tuple[Tensor, Tensor])
    assert torch_bridge.rms_norm(q).shape == torch_bridge.matmul(q, q, transpose_b=True)[..., :1].expand_as(q).shape
    assert y.shape == summed.shape


if TYPE_CHECKING:  # arrays in, the same library's out

    class Device:
        """An array of some library."""

    def on_a_gpu(x: Tensor, d: Device, flag: bool) -> None:
        assert_type(dualops.cuda.softmax(x, axis=0), Tensor)
        assert_type(dualops.cuda.softmax_backward(d, d), Device)
        assert_type(dualops.cuda.rope(d, d, d, d), tuple[Device, Device])
        assert_type(dualops.cuda.flash_attention(d, d, d, causal=True, kernel="simt"), Device)
        o, lse = dualops.cuda.flash_attention(x, x, x, return_lse=True, bias=x)
        assert_type(dualops.cuda.flash_attention_backward(x, x, x, o, lse, x), tuple[Tensor, ...])
        assert_type(dualops.cuda.flash_attention_varlen(x, x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
        assert_type(dualops.cuda.flash_attention(x, x, x, return_lse=flag), Tensor | tuple[Tensor, Tensor])
        assert_type(dualops.cuda.rms_norm(d, stream=None), Device)
        assert_type(dualops.cuda.layer_norm(d, residual=d), tuple[Device, Device])
        assert_type(dualops.cuda.matmul(x, x, out=x), Tensor)
        len(dualops.cuda.plan("softmax", x).steps)
        dualops.cuda.flash_attention(x, x, x, windw=(1, 0))  # pyright: ignore[reportCallIssue]
        print(dualops.cudaa)  # pyright: ignore[reportAttributeAccessIssue]
        assert_type(dualops.reference.softmax(np.zeros(3)), np.ndarray)
        dualops.testing.check("softmax", d, {"x": x})
        dualops.spec.OPERATORS["softmax"].formula.upper()
