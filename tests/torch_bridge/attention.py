"""Arguments for the bridge's tests of attention: small ones, and what is special about torch."""

import math
from typing import Any, NamedTuple

import torch

from .conftest import values

B, H, HKV, SQ, SK, D, DV = 2, 4, 2, 3, 5, 4, 3
LENGTHS_Q, LENGTHS_K = (2, 0, 4, 1), (3, 2, 2, 0)
STARTS, LENGTHS = (2, 0, 1, 1), (5, 4, 6, 2)  # ranges of keys, of sequences of SQ queries


def woven(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A mask_mod that follows no other mask's edges."""
    return (i + 2 * j + 3 * h + b) % 4 != 0


def squashed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A score_mod whose derivative is given, too, since it branches."""
    return math.tanh(score) if h % 2 else 0.5 * score


def squashed_slope(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 1 - math.tanh(score) ** 2 if h % 2 else 0.5


class Arguments(NamedTuple):
    """Of a call of one of the functions."""

    tensors: dict[str, torch.Tensor]  # what is differentiable, leaves; k and v have heads of their own
    more: dict[str, Any]

    def __call__(self, function: Any, *tensors: torch.Tensor, **more: Any) -> Any:
        """The call, with other tensors in place of the differentiable ones if they are given."""
        return function(**(dict(zip(self.tensors, tensors)) if tensors else self.tensors), **{**self.more, **more})


def plain(*options: str, dtype: torch.dtype = torch.float64, device: str = "cpu", **more: Any) -> Arguments:
    """For `flash_attention`; options: what ALL names."""
    shapes = {"q": (B, H, SQ, D), "k": (B, HKV, SK, D), "v": (B, HKV, SK, DV), "bias": (H, 1, SK), "sinks": (H,)}
    return _arguments(shapes, options, dtype, device, more)


def varlen(*options: str, dtype: torch.dtype = torch.float64, device: str = "cpu", **more: Any) -> Arguments:
    """For `flash_attention_varlen`; options: those of ALL that it has."""
    more |= {"cu_seqlens_k": _ends(LENGTHS_K, device), "max_seqlen_k": max(LENGTHS_K)}
    return _packed(options, dtype, device, more)


def ranges(*options: str, dtype: torch.dtype = torch.float64, device: str = "cpu", **more: Any) -> Arguments:
    """The same with key ranges, which overlap."""
    named = (("k_starts", STARTS), ("k_lengths", LENGTHS))
    more |= {name: torch.tensor(numbers, dtype=torch.int32, device=device) for name, numbers in named}
    more |= {"max_seqlen_k": max(LENGTHS), "total_k_lengths": sum(LENGTHS)}
    return _packed(options, dtype, device, more)


def _packed(options: tuple[str, ...], dtype: torch.dtype, device: str, more: dict[str, Any]) -> Arguments:
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    shapes = {"q": (total_q, H, D), "k": (total_k, HKV, D), "v": (total_k, HKV, DV), "sinks": (H,)}
    more |= {"cu_seqlens_q": _ends(LENGTHS_Q, device), "max_seqlen_q": max(LENGTHS_Q)}
    return _arguments(shapes, [name for name in options if name in ALL_VARLEN], dtype, device, more)


def _ends(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


ALL: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "pair": {"score_mod": (squashed, squashed_slope)},
    "dropout": {"dropout_p": 0.3, "seed": 7},
    "alibi": {},
    "padding": {},
    "bias": {},
    "sinks": {},
}
ALL_VARLEN = tuple(name for name in ALL if name not in ("padding", "bias"))


def _arguments(
    shapes: dict[str, Any], options: Any, dtype: torch.dtype, device: str, more: dict[str, Any]
) -> Arguments:
    wanted = {"q", "k", "v", *options}
    tensors = {
        name: values(shape, dtype, device, seed=place).requires_grad_()
        for place, (name, shape) in enumerate(shapes.items())
        if name in wanted
    }
    given: dict[str, Any] = {}
    for name in options:
        given |= ALL[name]
    if "alibi" in options:
        given["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device, dtype=dtype)
    if "padding" in options:
        given["key_padding_mask"] = torch.arange(B * SK, device=device).reshape(B, SK) % 3 != 0
    return Arguments(tensors, given | more)
