"""Attention in NumPy, the plain form: all scores at once, then softmax, then the product; and its gradient.

Axes: B batch, H query heads, Hkv key heads (H = group * Hkv), Sq queries, Sk keys, D and Dv head widths. The options
(`spec/attention`, a record each) change the scores S, hide some, and weigh the probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import numpy as np

from ..spec import flash_attention as SPEC
from ..spec.attention import BlockMask, Keywords, OptionKeywords
from ..spec.named import names_options
from ._attention import Options, bound_with_blocks, finite, group_sum, masked_product, options_of, over_group
from ._rounding import arithmetic


@overload
def flash_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords[np.ndarray]],
) -> np.ndarray: ...


@overload
def flash_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords[np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]: ...


def flash_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    key_padding_mask: np.ndarray | None = None,
    score_mod: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | np.ndarray | None = None,
    dropout_p: float = 0.0,
    seed: int | np.ndarray | None = None,
    return_lse: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """softmax(scale * q @ k.T + mask) @ v, all scores at once.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] of one dtype (float64, float32, float16, bfloat16), H a
    multiple of Hkv, D and Dv at most 512. The position of query i is i + Sk - Sq; with causal="top_left" it is i.

    scale: of q @ k.T, 1 / sqrt(D) if None
    softcap: scores become softcap * tanh(score / softcap)
    score_mod: (score, b, h, i, j) -> score, a function of numbers; or a pair of it and its derivative by the score
    bias: added; q's dtype, any shape that broadcasts to [B, H, Sq, Sk]
    alibi_slopes [H]: - slope * |position - j| is added
    causal: key j is seen up to the query's position
    window (left, right): key j is seen from position - left to position + right; None is unbounded
    key_padding_mask [B, Sk] of bool: True keeps a key
    mask_mod: (b, h, i, j) -> whether query i sees key j
    block_mask: the result of `block_mask(mask_mod, ...)`, or its `lists`; the reference does not need it
    sinks [H]: one more logit in the softmax, without a value
    dropout_p, seed: probabilities become 0, or are divided by 1 - dropout_p, as `spec/attention/dropout.py` says;
        seed is an integer of 64 bits, or an int64 array without axes

    Variables that score_mod and mask_mod read from outside have their values at this call. The functions must not
    change them, nor import in their bodies.

    Returns o [B, H, Sq, Dv] of q's dtype. With return_lse also lse [B, H, Sq] (float32, float64 for float64), the
    natural logarithm of the sum of exponentials, including the sink's. A query that sees no key, or only scores of
    -inf, gives o = 0 and lse = -inf (or the sink). A row with a score of NaN or +inf is NaN. Its gradient sets dk and
    dv to NaN for all keys that it sees, even if a score is -inf. Keys that a mask hides are not affected.
    Arithmetic is float32 (float64 for float64). Probabilities are rounded to q's dtype before the product with v, as
    for a tensor core.
    Raises TypeError and ValueError for a wrong call.
    """
    problem, arrays = bound_with_blocks(SPEC, locals())
    o, lse = attend(q, k, v, options_of(problem, arrays))
    return (o, lse) if problem.return_lse else o


@names_options(SPEC, backward=True)
def flash_attention_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    do: np.ndarray,
    dlse: np.ndarray | None = None,
    *,
    bias_gradient: bool = True,
    **options: Unpack[Keywords[np.ndarray]],
) -> tuple[np.ndarray, ...]:
    """The gradient, from forward's inputs and results; o, lse and do are as forward returned them and as they come in.

    dlse [B, H, Sq]: the gradient of lse, if lse was used. bias_gradient: whether to return dbias. options: those of
    forward, return_lse too, though lse is needed either way. score_mod and mask_mod must read the same values as in
    forward.
    Returns dq, dk, dv, then dbias (bias's shape) if there is a bias and bias_gradient is set, then dsinks [H] if there
    are sinks; each of the dtype of its input. dS and P are rounded to q's dtype before they are multiplied with a
    matrix.
    """
    problem, arrays = bound_with_blocks(SPEC, locals(), backward=True)
    found = options_of(problem, arrays, gradient=True)
    dq, dk, dv, d_scores, delta = attend_backward(q, k, v, o, lse, do, dlse, found)
    gradients = [dq, dk, dv]
    if "bias" in arrays and problem.bias_gradient:
        bias = arrays["bias"]
        gradients.append(sum_to(d_scores, bias.shape).astype(bias.dtype))
    if "sinks" in arrays:
        gradients.append(sinks_gradient(found, lse, delta).astype(arrays["sinks"].dtype))
    return tuple(gradients)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Compute o and lse of whole sequences."""
    problem, at = options.problem, options.everywhere()
    keys, values = (over_group(arithmetic(x), problem.group) for x in (k, v))  # [B, H, Sk, D | Dv]
    with np.errstate(all="ignore"):
        products = arithmetic(q) @ keys.swapaxes(-1, -2)  # [B, H, Sq, Sk]
        scores = options.scores(products * products.dtype.type(problem.scale), at)  # [B, H, Sq, Sk]
        row_max = scores.max(axis=-1, initial=-np.inf)  # [B, H, Sq]
        if (sink := options.sinks()) is not None:
            row_max = np.maximum(row_max, sink)
        probs = np.exp(scores - finite(row_max)[..., None])  # [B, H, Sq, Sk]
        row_sum = probs.sum(axis=-1)  # [B, H, Sq]
        if sink is not None:
            row_sum = row_sum + np.exp(sink - finite(row_max))
        rounded = arithmetic((probs * options.weight(at)).astype(q.dtype))  # [B, H, Sq, Sk]
        acc = masked_product(rounded, values, scores != -np.inf)  # [B, H, Sq, Dv]
        o = acc / np.where(row_sum == 0, 1, row_sum)[..., None]  # [B, H, Sq, Dv]
        lse = finite(row_max) + np.log(row_sum)  # [B, H, Sq]
    return o.astype(q.dtype), lse


def attend_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    do: np.ndarray,
    dlse: np.ndarray | None,
    options: Options,
) -> tuple[np.ndarray, ...]:
    """Compute dq, dk, dv; also dS [B, H, Sq, Sk] and delta [B, H, Sq] for the gradients of bias and sinks."""
    problem, at = options.problem, options.everywhere()
    group = problem.group
    keys, values = (over_group(arithmetic(x), group) for x in (k, v))  # [B, H, Sk, D | Dv]
    queries, d_out = arithmetic(q), arithmetic(do)  # [B, H, Sq, D | Dv]
    factor = queries.dtype.type(problem.scale)
    with np.errstate(all="ignore"):
        # P = exp(S - lse)
        products = queries @ keys.swapaxes(-1, -2) * factor  # [B, H, Sq, Sk]
        scores = options.scores(products, at)
        counts = options.counts(scores, lse, at)
        probs = np.where(counts, np.exp(scores - finite(lse)[..., None]), 0)  # [B, H, Sq, Sk]

        # dv = (weight * P).T @ do
        weight = options.weight(at)
        weighted = arithmetic((probs * weight).astype(q.dtype))  # [B, H, Sq, Sk]
        dv = group_sum(masked_product(*_transposed(weighted, d_out, counts)), group)  # [B, Hkv, Sk, Dv]

        # dS = P * (dP - delta),  dP = weight * (do @ v.T),  delta = rowsum(do * o) - dlse
        delta = (d_out * arithmetic(o)).sum(axis=-1)  # [B, H, Sq]
        if dlse is not None:
            delta = delta - dlse
        d_probs = weight * (d_out @ values.swapaxes(-1, -2))  # [B, H, Sq, Sk]
        d_scores = np.where(counts, probs * (d_probs - delta[..., None]), 0)  # [B, H, Sq, Sk]

        # ds0 = dS * slope;  dq = scale * ds0 @ k;  dk = scale * ds0.T @ q
        bent = np.where(counts, d_scores * options.slope(products, at), 0)
        rounded = arithmetic(bent.astype(q.dtype))  # [B, H, Sq, Sk]
        dq = factor * masked_product(rounded, keys, counts)  # [B, H, Sq, D]
        dk = group_sum(factor * masked_product(*_transposed(rounded, queries, counts)), group)  # [B, Hkv, Sk, D]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_scores, delta


def sinks_gradient(options: Options, lse: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """dsink = -sum(exp(sink - lse) * delta) over the queries of a head. [H]"""
    with np.errstate(all="ignore"):
        return -(np.exp(options.sinks() - finite(lse)) * delta).sum(axis=(0, 2))


def _transposed(scores: np.ndarray, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of masked_product for scores.T @ rows."""
    return scores.swapaxes(-1, -2), rows, counts.swapaxes(-1, -2)


def sum_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes that an array of `shape` was broadcast along: the gradient of broadcasting."""
    lacking = array.ndim - len(shape)
    axes = [lacking + axis for axis, size in enumerate(shape) if size == 1]
    return array.sum(axis=(*range(lacking), *axes), keepdims=True).reshape(shape)
