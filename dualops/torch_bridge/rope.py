"""Rotary position embeddings for torch tensors. Semantics: `dualops.spec.rope`; integration with torch: `interop`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..spec import rope as SPEC, rope_tables as SPEC_TABLES
from ..spec.domains import shown
from ..spec.meta import FLOATS
from .compiled import constant
from .interop import register
from .ways import plain, transformed, watched

_operator = register(SPEC, reference.rope, reference.rope_backward, kinds={"dim": "int?"}, fixed={"inplace": False})
_operator_tables = register(
    SPEC_TABLES, reference.rope_tables, kinds={"dim": "int", "base": "float?", "scaling": "text"}
)

_NAMES = {getattr(torch, name): name for name in FLOATS}


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    dim: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """q and k with their first R dimensions rotated, pair by pair; differentiable once, by q and k. Su et al. 2021,
    arXiv:2104.09864.

    q [B, H, S, D], k [B, Hkv, S, D] of one dtype (float64, float32, float16, bfloat16) on a CUDA device or the CPU, any
    strides with a contiguous last axis, such as transposed views of projections. cos, sin of that dtype or of float32
    (float64 for float64), with R/2 columns, R at most D, in one of two forms: [Smax, R/2] has a row for each position,
    [B, S, R/2] one for each token, or [1, S, R/2]. `rope_tables` makes both.

    positions [S] or [B, S] of int64 or int32: the row of [Smax, R/2] for each token; by default token s uses row s. On
    a CUDA device they are not checked, which would wait for it: a token whose position has no row becomes NaN in its
    first R dimensions.
    dim: R, if less than D. It decides whether a table has R/2 columns, or R columns with two equal halves as Hugging
    Face's (half-rotated pairs only)
    interleaved: dimensions 2i and 2i + 1 are a pair (GPT-J), not i and i + R/2 (Llama, NeoX)
    inplace: write over q and k, and return them; only if no gradient is recorded. Compiled functions, and the CPU,
    rotate into new memory and copy

    Returns (q, k) rotated, of their shapes, dtypes and orders of axes. Arithmetic is float32 (float64 for float64),
    rounded once; dimensions from R on are unchanged. Autocast changes nothing. Gradients are deterministic.

    Works under torch.compile (fullgraph, dynamic B, H and S), torch.export and, outside torch.compile, torch.func.grad.
    CUDA tensors run on torch's current stream. CPU tensors use the NumPy reference, which is slow.

    Raises TypeError and ValueError for a wrong call. Raises NotImplementedError for vmap, for a gradient of the
    gradient or of cos and sin, and for inplace if a gradient would be recorded.

    >>> import torch
    >>> q = torch.tensor([[[[1.0, 0.0]]]])
    >>> rope(q, q, torch.tensor([[0.0]]), torch.tensor([[1.0]]))[0]
    tensor([[[[0., 1.]]]])
    """
    arrays = (q, k, cos, sin, positions)
    if inplace is False:
        return _operator(*arrays, dim, interleaved)
    if inplace is not True:
        raise TypeError(f"{SPEC.name}: inplace is {shown(inplace)}, expected True or False")
    if torch.is_grad_enabled():
        for name, x in (("q", q), ("k", k)):
            if isinstance(x, Tensor) and x.requires_grad:
                raise NotImplementedError(
                    f"{SPEC.name}: inplace is True and {name} requires a gradient, which is not implemented; "
                    "leave inplace out, or call it under torch.no_grad()"
                )
    if torch.compiler.is_dynamo_compiling() or not _straight(arrays):
        for x, rotated in zip((q, k), _operator(*arrays, dim, interleaved)):
            x.copy_(rotated)
    else:
        _operator.kernel(q, k, cos, sin, positions=positions, dim=dim, interleaved=interleaved, inplace=True)
        for x in (q, k):
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)  # a graph that saved it for a gradient must notice
    return q, k


def _straight(arrays: tuple[Any, ...]) -> bool:
    """Whether a call may bypass torch's machinery and call the kernels directly."""
    found = None if watched() or transformed() else plain(arrays)
    return found is not None and found.on_gpu


def rope_tables(
    positions: Tensor,
    dim: int,
    *,
    base: float | None = None,
    scaling: tuple[Any, ...] | Mapping[str, Any] | None = None,
    dtype: torch.dtype | str = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of positions, in the form that `rope` takes; without a gradient.

    positions [S] or [B, S] of int64 or int32, of any sign; dim: R, even; base: that of the frequencies base **
    (-2i / R), by default the scaling's, or 10000. scaling changes the frequencies. It is Hugging Face's dict,
    config.rope_parameters (for a model with several, that of one kind of layers), or a tuple:

    ("linear", factor): all are divided by the factor
    ("llama3", factor, low, high, original): frequencies with less than `low` turns in `original` positions are divided
    by the factor, those with more than `high` turns stay, and those between are interpolated
    ("yarn", factor, original, fast=32, slow=1, attention_factor, truncate=True): interpolated by pair, between the
    pairs with `slow` and `fast` turns, rounded outwards to whole pairs. cos and sin are multiplied by attention_factor.
    Its default is 0.1 log(factor) + 1, or what a dict's mscale and mscale_all_dim give
    ("dynamic", factor, original, length): the base grows with the length of the sequence beyond `original`; a dict
    needs both, as "max_position_embeddings" and "seq_len", which Hugging Face keeps elsewhere

    A dict may have the base, as rope_theta, and a partial_rotary_factor: then dim is D and R is int(D * factor). The
    longrope, proportional and multimodal scalings are refused.

    Returns (cos, sin) [S, R/2] or [B, S, R/2] of `dtype` (float32, float64, float16 or bfloat16) on the device of
    positions. They are computed in float64, then rounded: a position of a million is as exact as one of ten. Works
    under torch.compile and torch.export. Raises TypeError and ValueError for a wrong call.

    >>> import torch
    >>> rope_tables(torch.tensor([0]), 4)
    (tensor([[1., 1.]]), tensor([[0., 0.]]))
    """
    if isinstance(scaling, Mapping):
        scaling = _normal(tuple(scaling.items()))
    name = _NAMES.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype
    return _operator_tables(positions, dim, base, scaling, name)


@constant
def _normal(scaling: tuple[tuple[str, Any], ...]) -> tuple[Any, ...] | None:
    """Return the tuple of a dict's entries, which the dispatcher can hold as text."""
    (domain,) = (param.domain for param in SPEC_TABLES.params if param.name == "scaling")
    try:
        return domain(dict(scaling))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{SPEC_TABLES.name}: scaling is {shown(dict(scaling))}, {error}") from None
