"""Attention in NumPy: the plain form (scores, softmax, product) and the blocked form of FlashAttention-2.

Axes: B batch, H query heads, Hkv key heads (H = group * Hkv), Sq queries, Sk keys, D and Dv head widths.
"""

from __future__ import annotations

import numpy as np

from ..spec import Problem
from ..spec import flash_attention as SPEC
from ._rounding import arithmetic, bound


def flash_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """softmax(scale * q @ k.T) @ v, all scores at once.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] of one dtype (float64, float32, float16, bfloat16), H a
    multiple of Hkv. causal: query i sees keys j <= i + Sk - Sq; "top_left": keys j <= i. scale: 1 / sqrt(D) if None.
    Returns o [B, H, Sq, Dv] of q's dtype; with return_lse also lse [B, H, Sq] (float32, float64 for float64), natural
    logarithm. A query that sees no key gives o = 0 and lse = -inf. Arithmetic is float32 (float64 for float64); the
    probabilities are rounded to q's dtype before they meet v, as a tensor core would have them.
    """
    problem = bound(SPEC, {"q": q, "k": k, "v": v}, causal=causal, scale=scale, return_lse=return_lse)
    keys, values = (np.repeat(arithmetic(x), problem.group, axis=1) for x in (k, v))  # [B, H, Sk, D | Dv]
    visible = visibility(problem, 0, problem.Sq, 0, problem.Sk)  # [Sq, Sk]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = arithmetic(q) @ keys.swapaxes(-1, -2)  # [B, H, Sq, Sk]
        scores = scores * scores.dtype.type(problem.scale)
        scores = np.where(visible, scores, -np.inf)
        row_max = scores.max(axis=-1, initial=-np.inf)  # [B, H, Sq]
        probs = np.exp(scores - finite(row_max)[..., None])  # [B, H, Sq, Sk]
        row_sum = probs.sum(axis=-1)  # [B, H, Sq]
        rounded = arithmetic(probs.astype(q.dtype))  # [B, H, Sq, Sk]
        acc = masked_product(rounded, values, visible)  # [B, H, Sq, Dv]
        o = acc / np.where(row_sum == 0, 1, row_sum)[..., None]  # [B, H, Sq, Dv]
        lse = finite(row_max) + np.log(row_sum)  # [B, H, Sq]
    return (o.astype(q.dtype), lse) if return_lse else o.astype(q.dtype)


def flash_attention_blocked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    block_q: int = 64,
    block_kv: int = 64,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """The same, a tile of queries against one tile of keys after another (Algorithm 1), as the kernels go.

    Never more than [block_q, block_kv] scores are alive. What is kept of the keys seen so far is the row's maximum,
    the row's sum in units of exp(maximum), and the unnormalised result in the same units.
    """
    problem = bound(SPEC, {"q": q, "k": k, "v": v}, causal=causal, scale=scale, return_lse=return_lse)
    dtype = arithmetic(q[:0]).dtype
    keys, values = (np.repeat(arithmetic(x), problem.group, axis=1) for x in (k, v))  # [B, H, Sk, D | Dv]
    o = np.empty((problem.B, problem.H, problem.Sq, problem.Dv), q.dtype)
    lse = np.empty((problem.B, problem.H, problem.Sq), dtype)
    for m0 in range(0, problem.Sq, block_q):
        queries = arithmetic(q[:, :, m0 : m0 + block_q])  # [B, H, block_q, D]
        rows = queries.shape[2]
        row_max = np.full((problem.B, problem.H, rows), -np.inf, dtype)  # [B, H, block_q]
        row_sum = np.zeros((problem.B, problem.H, rows), dtype)  # [B, H, block_q]
        acc = np.zeros((problem.B, problem.H, rows, problem.Dv), dtype)  # [B, H, block_q, Dv]
        for n0 in range(0, problem.Sk, block_kv):
            n1 = min(n0 + block_kv, problem.Sk)
            visible = visibility(problem, m0, m0 + rows, n0, n1)  # [block_q, block_kv]
            if not visible.any():
                continue
            with np.errstate(invalid="ignore", over="ignore"):
                scores = queries @ keys[:, :, n0:n1].swapaxes(-1, -2) * dtype.type(problem.scale)
                scores = np.where(visible, scores, -np.inf)  # [B, H, block_q, block_kv]
                new_max = np.maximum(row_max, scores.max(axis=-1))  # [B, H, block_q]
                rescale = np.exp(row_max - finite(new_max))  # [B, H, block_q]
                probs = np.exp(scores - finite(new_max)[..., None])  # [B, H, block_q, block_kv]
                row_sum = row_sum * rescale + probs.sum(axis=-1)  # [B, H, block_q]
                rounded = arithmetic(probs.astype(q.dtype))  # [B, H, block_q, block_kv]
                acc = acc * rescale[..., None] + masked_product(rounded, values[:, :, n0:n1], visible)
            row_max = new_max
        with np.errstate(invalid="ignore", divide="ignore"):
            o[:, :, m0 : m0 + rows] = acc / np.where(row_sum == 0, 1, row_sum)[..., None]
            lse[:, :, m0 : m0 + rows] = finite(row_max) + np.log(row_sum)
    return (o, lse) if return_lse else o


def visibility(problem: Problem, m0: int, m1: int, n0: int, n1: int) -> np.ndarray:
    """Which keys n0..n1 the queries m0..m1 see: [m1 - m0, n1 - n0]."""
    rows, columns = np.arange(m0, m1)[:, None], np.arange(n0, n1)[None, :]
    if not problem.causal:
        return np.ones((m1 - m0, n1 - n0), bool)
    offset = 0 if problem.causal == "top_left" else problem.Sk - problem.Sq
    return columns <= rows + offset


def masked_product(probs: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """probs @ values, where a value that is not visible does not count even if it is NaN or infinite."""
    if np.isfinite(values).all():
        return probs @ values
    acc = np.zeros((*probs.shape[:-1], values.shape[-1]), probs.dtype)  # [B, H, Sq, Dv]
    for row in range(probs.shape[-2]):
        seen = visible[row]
        acc[..., row, :] = np.einsum("bhk,bhkd->bhd", probs[..., row, seen], values[:, :, seen])
    return acc


def finite(row_max: np.ndarray) -> np.ndarray:
    """0 in place of the -inf of a row that has seen nothing, so that -inf - (-inf) is never formed."""
    return np.where(row_max == -np.inf, 0, row_max).astype(row_max.dtype)
