"""The drop-in compared with torch's own function."""

import inspect
import math
import re
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torchs

from dualops.torch_bridge.integrations.scaled_dot_product_attention import scaled_dot_product_attention
from tests.torch_bridge.integrations.conftest import drawn


def qkv(device: str, *, q: tuple[int, ...], k: tuple[int, ...], Dv: int | None = None) -> Any:
    shapes = q, k, (*k[:-1], Dv or k[-1])
    return [drawn(*shape, device=device, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def both(tensors: Any, mask: Tensor | None = None, **options: Any) -> None:
    """Results and gradients are those of torch's formula, which has not all of them where a result is empty.

    torch 2.11's flash kernel for the CPU would divide by a size of 0, which ends the process.
    """
    given = [*tensors, *([] if mask is None else [mask])]
    on_cpu = [x.detach().cpu().requires_grad_(x.requires_grad) for x in given]
    found = scaled_dot_product_attention(*given, **options)
    with sdpa_kernel(SDPBackend.MATH):
        expected = torchs(*on_cpu, **options)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)
    incoming = drawn(*found.shape, seed=9)
    one, two = (
        torch.autograd.grad(o, [x for x in leaves if x.requires_grad], incoming.to(o.device), allow_unused=True)
        for o, leaves in ((found, given), (expected, on_cpu))
    )
    for x, y in zip(one, two, strict=True):
        torch.testing.assert_close(
            x.cpu(), torch.zeros(x.shape, dtype=x.dtype) if y is None else y, rtol=1e-11, atol=1e-11
        )


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
    both(qkv(device, q=q, k=k, Dv=None if is_causal else 3), is_causal=is_causal, scale=0.7)


SIZES = {"B": 2, "H": 3, "Sq": 4, "Sk": 5, "D": 6, "Dv": 2}


@pytest.mark.parametrize("ndim", [2, 3, 4])
@pytest.mark.parametrize("option", ["none", "is_causal", "scale", "dropout_p", "bool mask", "mask", "mask of keys"])
def test_empty_axes(option: str, ndim: int) -> None:
    empty_axes(option, ndim, "cpu")


@pytest.mark.cuda
def test_empty_axes_on_a_gpu() -> None:
    """D and Dv of size 0 have kernels of their own, with each option: here with one."""
    empty_axes("mask", 4, "cuda")


def empty_axes(option: str, ndim: int, device: str) -> None:
    names = list(SIZES)[4 - ndim :]
    for empty in chain.from_iterable(combinations(names, count) for count in range(1, len(names) + 1)):
        sizes = SIZES | dict.fromkeys(empty, 0)
        leading, (Sq, Sk) = [sizes[name] for name in names[:-4]], (sizes["Sq"], sizes["Sk"])
        tensors = qkv(device, q=(*leading, Sq, sizes["D"]), k=(*leading, Sk, sizes["D"]), Dv=sizes["Dv"])
        options: Any = {
            "is_causal": {"is_causal": True},
            "scale": {"scale": 0.3},
            "dropout_p": {"dropout_p": 1.0},
            "bool mask": {"mask": drawn(Sq, Sk, device=device) > -0.5},
            "mask": {"mask": drawn(*leading, Sq, Sk, device=device).requires_grad_()},
            "mask of keys": {"mask": drawn(1, Sk, device=device) > -0.5},
        }
        both(tensors, **options.get(option, {}))


@pytest.mark.parametrize(("H", "Hkv"), [(0, 1), (0, 2), (4, 2)])
@pytest.mark.parametrize("B", [0, 2])
@pytest.mark.parametrize("Sk", [0, 5])
def test_empty_axes_of_grouped_heads(H: int, Hkv: int, B: int, Sk: int, device: str) -> None:
    both(qkv(device, q=(B, H, 3, 4), k=(B, Hkv, Sk, 4)), enable_gqa=True)
    both(qkv(device, q=(B, H, 3, 4), k=(B, Hkv, Sk, 4)), drawn(1, 3, Sk, device=device) > 0, enable_gqa=True)
    both(qkv(device, q=(H, 3, 4), k=(Hkv, Sk, 4)), enable_gqa=True, is_causal=True)


def test_no_heads_of_no_heads(device: str) -> None:
    """torch 2.11 divides by 0 here, which ends the process."""
    leaves = qkv(device, q=(2, 0, 3, 4), k=(2, 0, 5, 4))
    found = scaled_dot_product_attention(*leaves, enable_gqa=True)
    assert found.shape == (2, 0, 3, 4)
    assert [x.shape for x in torch.autograd.grad(found.sum(), leaves)] == [x.shape for x in leaves]
    q, k, v = qkv(device, q=(2, 3, 3, 4), k=(2, 0, 5, 4))
    with pytest.raises(ValueError, match="H=3, k has Hkv=0, expected H to be a multiple of Hkv"):
        scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_empty_axes_broadcast(device: str) -> None:
    both(qkv(device, q=(2, 0, 3, 4), k=(2, 1, 5, 4)))
    both(qkv(device, q=(0, 3, 3, 4), k=(1, 3, 5, 4)), drawn(1, 3, 3, 5, device=device).requires_grad_())
    both(qkv(device, q=(2, 0, 2, 3, 4), k=(2, 1, 2, 5, 4)))


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (3, 5, 4), (5, 4)], ids=str)
@pytest.mark.parametrize("mask", [False, True])
def test_dropout_of_everything_gives_0(shape: tuple[int, ...], mask: bool, device: str) -> None:
    seen = drawn(5, 5, device=device) > 0 if mask else None
    both(qkv(device, q=shape, k=shape), seen, dropout_p=1.0)
    both(qkv(device, q=shape, k=shape), seen, dropout_p=1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(is_causal: bool, device: str) -> None:
    both(qkv(device, q=(2, 6, 5, 4), k=(2, 2, 5, 4)), is_causal=is_causal, enable_gqa=True)
    both(qkv(device, q=(6, 5, 4), k=(3, 7, 4)), enable_gqa=True)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 3])
def test_dtypes_of_masks_are_torchs(dtype: torch.dtype, size: int, device: str) -> None:
    """It takes what torch takes on the CPU. Integers are refused: they are neither scores nor truth values."""
    q, k = drawn(1, 2, size, 4, dtype=dtype), drawn(1, 2, 3, 4, dtype=dtype, seed=1)
    floats = torch.float64, torch.float32, torch.float16, torch.bfloat16
    taken = set()
    for kind in (*floats, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.complex64):
        mask = torch.tensor([[0, 1, 1]] * size).reshape(size, 3).to(kind)
        arrays: Any = [x.to(device) for x in (q, k, k, mask)]
        try:
            torchs(q, k, k, mask)
        except RuntimeError:
            with pytest.raises(TypeError, match=rf"attn_mask has dtype {kind}, expected torch\.bool, torch\.float32"):
                scaled_dot_product_attention(*arrays)
            continue
        taken.add(kind)
        found = scaled_dot_product_attention(*arrays)
        expected = torchs(q.double(), k.double(), k.double(), mask if kind is torch.bool else mask.double())
        assert found.dtype is dtype
        eps = torch.finfo(dtype).eps  # of the probabilities, which sum to 1
        torch.testing.assert_close(found.cpu(), expected.to(dtype), rtol=eps, atol=eps * float(k.abs().max()))
    assert taken == {torch.bool, torch.float32, dtype}


def test_masks_under_autocast(device: str) -> None:
    """Autocast makes query and mask its own dtype before torch compares them."""
    q, mask = drawn(1, 2, 3, 4, device=device, dtype=torch.float32), drawn(3, 3, device=device, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"attn_mask has dtype torch\.bfloat16, expected torch\.bool, torch\.float32$"):
        scaled_dot_product_attention(q, q, q, mask)
    with torch.autocast(device, torch.bfloat16):
        found, theirs = (function(q, q, q, mask) for function in (scaled_dot_product_attention, torchs))
    assert found.dtype is theirs.dtype is torch.bfloat16
    wide = q.bfloat16().double()
    expected = torchs(wide, wide, wide, mask.double()).bfloat16()
    eps = torch.finfo(torch.bfloat16).eps  # of the probabilities, which sum to 1
    torch.testing.assert_close(found, expected, rtol=eps, atol=eps * float(wide.abs().max()))


def test_masks_of_more_axes(device: str) -> None:
    tensors = qkv(device, q=(2, 2, 3, 5, 4), k=(2, 2, 3, 7, 4))
    both(tensors, drawn(2, 1, 3, 5, 7, device=device) > -0.5)
    both(tensors, drawn(2, 1, 1, 7, device=device).requires_grad_())


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
    for shape in ((6, 7), (3, 2, 4, 5, 7), (1, 2, 4, 5, 7), (2, 2, 5, 7), (2, 4, 5, 0)):
        message = f"attn_mask has shape {shape}, expected one that broadcasts to (2, 4, 5, 7)"
        with pytest.raises(ValueError, match=re.escape(message)):
            scaled_dot_product_attention(q, k, v, torch.ones(shape, device=device).bool(), enable_gqa=True)
    with pytest.raises(ValueError, match="expected one that broadcasts to"):
        scaled_dot_product_attention(q[:1], k[:1], v[:1], torch.ones(2, 1, 5, 7, device=device), enable_gqa=True)
    with pytest.raises(NotImplementedError, match="key has 2 heads, value has 1, expected the same"):
        scaled_dot_product_attention(q, k, v[:, :1], enable_gqa=True)
    with pytest.raises(ValueError, match="query has 1 axes"):
        scaled_dot_product_attention(q[0, 0, 0], k, v)
    for p in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"dropout_p is {p}, expected"):
            scaled_dot_product_attention(q, k, v, dropout_p=p, enable_gqa=True)
    with pytest.raises(TypeError, match="flash_attention: k has dtype float32, q has dtype float64"):
        scaled_dot_product_attention(q, k.float(), v, enable_gqa=True)


def test_compiled(device: str) -> None:
    q, k, v = qkv(device, q=(2, 3, 5, 4), k=(2, 3, 5, 4))
    mask = drawn(5, 5, device=device) > 0
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, mask), torchs(q, k, v, mask))
