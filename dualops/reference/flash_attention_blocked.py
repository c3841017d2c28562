"""Attention in NumPy, the blocked form of FlashAttention-2 (Dao 2023, arXiv:2307.08691), as the kernels compute it.

At most [block_q, block_kv] scores of a head exist at a time. Forward takes one tile of keys after another. It keeps, of
the keys so far, the row's maximum, the row's sum in units of exp(maximum), and the unnormalised result in the same
units (Algorithm 1). Backward recomputes each tile of probabilities from lse (Algorithm 2): first for dk and dv, which
belong to a tile of keys, then for dq, which belongs to a tile of queries. So no sum needs another's result. Tiles that
the masks hide completely are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Unpack, overload

import numpy as np

from ..spec import flash_attention as SPEC
from ..spec.attention import Keywords, OptionKeywords
from ..spec.named import names_options
from ._attention import bound_with_blocks, finite, group_sum, masked_product, options_of, over_group
from ._rounding import arithmetic
from .flash_attention import sum_to

BLOCK = 64


@overload
def flash_attention_blocked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    block_q: int = BLOCK,
    block_kv: int = BLOCK,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords[np.ndarray]],
) -> np.ndarray: ...


@overload
def flash_attention_blocked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    block_q: int = BLOCK,
    block_kv: int = BLOCK,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords[np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]: ...


@names_options(SPEC)
def flash_attention_blocked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    block_q: int = BLOCK,
    block_kv: int = BLOCK,
    **options: Unpack[Keywords[np.ndarray]],
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """`flash_attention`, one tile of queries and one tile of keys at a time.

    Arguments and results are those of `flash_attention`; block_q, block_kv: queries and keys of a tile.
    """
    problem, arrays = bound_with_blocks(SPEC, locals())
    asked = options_of(problem, arrays)
    dtype = arithmetic(q[:0]).dtype
    keys, values = (over_group(arithmetic(x), problem.group) for x in (k, v))  # [B, H, Sk, D | Dv]
    o = np.empty((problem.B, problem.H, problem.Sq, problem.Dv), q.dtype)
    lse = np.empty((problem.B, problem.H, problem.Sq), dtype)
    sink = asked.sinks()
    for m0, m1 in _tiles(0, problem.Sq, block_q):
        queries = arithmetic(q[:, :, m0:m1])  # [B, H, block_q, D]
        row_max = np.full((problem.B, problem.H, m1 - m0), -np.inf, dtype)  # [B, H, block_q]
        row_sum = np.zeros_like(row_max)  # [B, H, block_q]
        acc = np.zeros((problem.B, problem.H, m1 - m0, problem.Dv), dtype)  # [B, H, block_q, Dv]
        with np.errstate(all="ignore"):
            if sink is not None:
                row_max = np.broadcast_to(sink, row_max.shape).astype(dtype)
                row_sum = np.exp(row_max - finite(row_max))
            for n0, n1 in _tiles(*asked.key_range(m0, m1), block_kv):
                at = asked.at(m0, m1, n0, n1)
                products = queries @ keys[:, :, n0:n1].swapaxes(-1, -2) * dtype.type(problem.scale)
                scores = asked.scores(products, at)  # [B, H, block_q, block_kv]
                new_max = np.maximum(row_max, scores.max(axis=-1))  # [B, H, block_q]
                rescale = np.exp(row_max - finite(new_max))  # [B, H, block_q]
                probs = np.exp(scores - finite(new_max)[..., None])  # [B, H, block_q, block_kv]
                row_sum = row_sum * rescale + probs.sum(axis=-1)  # [B, H, block_q]
                rounded = arithmetic((probs * asked.weight(at)).astype(q.dtype))  # [B, H, block_q, block_kv]
                product = masked_product(rounded, values[:, :, n0:n1], scores != -np.inf)
                acc = acc * rescale[..., None] + product
                row_max = new_max
            o[:, :, m0:m1] = acc / np.where(row_sum == 0, 1, row_sum)[..., None]
            lse[:, :, m0:m1] = finite(row_max) + np.log(row_sum)
    return (o, lse) if problem.return_lse else o


@names_options(SPEC, backward=True)
def flash_attention_backward_blocked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    do: np.ndarray,
    dlse: np.ndarray | None = None,
    *,
    block_q: int = BLOCK,
    block_kv: int = BLOCK,
    bias_gradient: bool = True,
    **options: Unpack[Keywords[np.ndarray]],
) -> tuple[np.ndarray, ...]:
    """`flash_attention_backward`, tile by tile, with the same arguments and results."""
    problem, arrays = bound_with_blocks(SPEC, locals(), backward=True)
    asked, group = options_of(problem, arrays, gradient=True), problem.group
    keys, values = (over_group(arithmetic(x), group) for x in (k, v))  # [B, H, Sk, D | Dv]
    queries, d_out = arithmetic(q), arithmetic(do)  # [B, H, Sq, D | Dv]
    factor = queries.dtype.type(problem.scale)
    delta = (d_out * arithmetic(o)).sum(axis=-1) - (0 if dlse is None else dlse)  # [B, H, Sq]

    def tile(m0: int, m1: int, n0: int, n1: int) -> tuple[np.ndarray, ...]:
        """Compute rounded weight * P and ds0, dS, and which scores count, of one tile. [B, H, block_q, block_kv]"""
        at = asked.at(m0, m1, n0, n1)
        products = queries[:, :, m0:m1] @ keys[:, :, n0:n1].swapaxes(-1, -2) * factor
        scores = asked.scores(products, at)
        counts, weight = asked.counts(scores, lse[:, :, m0:m1], at), asked.weight(at)
        probs = np.where(counts, np.exp(scores - finite(lse[:, :, m0:m1])[..., None]), 0)
        d_probs = weight * (d_out[:, :, m0:m1] @ values[:, :, n0:n1].swapaxes(-1, -2))
        d_scores = np.where(counts, probs * (d_probs - delta[:, :, m0:m1, None]), 0)
        bent = np.where(counts, d_scores * asked.slope(products, at), 0)
        return *(arithmetic(x.astype(q.dtype)) for x in (probs * weight, bent)), d_scores, counts

    dq, dk, dv = np.zeros_like(queries), np.zeros_like(keys), np.zeros_like(values)
    with np.errstate(all="ignore"):
        for n0, n1 in _tiles(0, problem.Sk, block_kv):
            for m0, m1 in _tiles(*asked.query_range(n0, n1), block_q):
                weighted, bent, _, counts = (x.swapaxes(-1, -2) for x in tile(m0, m1, n0, n1))
                dv[:, :, n0:n1] += masked_product(weighted, d_out[:, :, m0:m1], counts)
                dk[:, :, n0:n1] += factor * masked_product(bent, queries[:, :, m0:m1], counts)
        for m0, m1 in _tiles(0, problem.Sq, block_q):
            for n0, n1 in _tiles(*asked.key_range(m0, m1), block_kv):
                _, bent, _, counts = tile(m0, m1, n0, n1)
                dq[:, :, m0:m1] += factor * masked_product(bent, keys[:, :, n0:n1], counts)
        gradients = [dq.astype(q.dtype), group_sum(dk, group).astype(k.dtype), group_sum(dv, group).astype(v.dtype)]
        if "bias" in arrays and problem.bias_gradient:
            d_bias = np.zeros(arrays["bias"].shape, delta.dtype)
            for m0, m1 in _tiles(0, problem.Sq, block_q):
                for n0, n1 in _tiles(*asked.key_range(m0, m1), block_kv):
                    place = (..., *_part(d_bias.shape, -2, m0, m1), *_part(d_bias.shape, -1, n0, n1))
                    d_bias[place] += sum_to(tile(m0, m1, n0, n1)[2], d_bias[place].shape)
            gradients.append(d_bias.astype(arrays["bias"].dtype))
        if "sinks" in arrays:
            lost = np.exp(asked.sinks() - finite(lse)) * delta  # [B, H, Sq]
            gradients.append(-lost.sum(axis=(0, 2)).astype(arrays["sinks"].dtype))
    return tuple(gradients)


def _part(shape: tuple[int, ...], axis: int, first: int, end: int) -> tuple[slice, ...]:
    """Return the part of an axis that a tile's scores were broadcast from, if the axis exists."""
    if len(shape) < -axis:
        return ()
    return (slice(None) if shape[axis] == 1 else slice(first, end),)


def _tiles(first: int, end: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges of at most `block`."""
    for start in range(first, end, block):
        yield start, min(start + block, end)
