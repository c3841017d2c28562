"""Attention of packed sequences of different lengths: the plain form on each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Unpack, overload

import numpy as np

from ..spec import ArrayMeta, Problem, flash_attention as ONE, flash_attention_varlen as SPEC
from ..spec.attention import OPTIONS_VARLEN, KeywordsVarlen, OptionKeywordsVarlen
from ..spec.lengths import spans_of
from ..spec.meta import compute_dtype, numpy_dtype
from ..spec.named import names_options
from ._attention import Options, options_of
from ._rounding import abs_strides, bound
from .flash_attention import attend, attend_backward, sinks_gradient

OPTIONAL = [entry.name for option in OPTIONS_VARLEN for entry in option.inputs]


class Sequence(NamedTuple):
    """One of the sequences: the places of its queries and keys among all tokens, and its options."""

    queries: slice
    keys: slice
    options: Options


@overload
def flash_attention_varlen(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywordsVarlen[np.ndarray]],
) -> np.ndarray: ...


@overload
def flash_attention_varlen(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywordsVarlen[np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]: ...


@names_options(SPEC)
def flash_attention_varlen(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Unpack[KeywordsVarlen[np.ndarray]],
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """`flash_attention` of B sequences of different lengths, packed without padding.

    q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv]. Sequence b has queries cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] and keys cu_seqlens_k[b] to cu_seqlens_k[b + 1]. cu_seqlens [B + 1] of int32 begin at 0 and are
    nondecreasing. max_seqlen_q and max_seqlen_k are the lengths of the longest sequences, or more. Tokens after the
    last sequence belong to none: their o is 0 and their lse -inf. options are those of `flash_attention`; b counts the
    sequences, and i and j the tokens within a sequence.
    k_starts and k_lengths [B] of int32 may replace cu_seqlens_k: sequence b has the keys k_starts[b] to k_starts[b] +
    k_lengths[b]. Such ranges may overlap, leave gaps and come in any order.
    A max_seqlen of None means the number of all tokens.
    Returns o [total_q, H, Dv]; with return_lse also lse [H, total_q].
    """
    problem, arrays = bound(SPEC, locals())
    o = np.zeros((problem.total_q, problem.H, problem.Dv), q.dtype)
    lse = np.full((problem.H, problem.total_q), -np.inf, numpy_dtype(compute_dtype(problem.dtype)))
    for queries, keys, found in sequences(problem, arrays):
        o_one, lse_one = attend(_heads(q[queries]), _heads(k[keys]), _heads(v[keys]), found)
        o[queries], lse[:, queries] = _tokens(o_one), lse_one[0]
    return (o, lse) if problem.return_lse else o


@names_options(SPEC, backward=True)
def flash_attention_varlen_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    do: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    dlse: np.ndarray | None = None,
    **options: Unpack[KeywordsVarlen[np.ndarray]],
) -> tuple[np.ndarray, ...]:
    """The gradient: dq, dk, dv as q, k, v, then dsinks [H] if there are sinks. See `flash_attention_backward`.

    Tokens that belong to no sequence have gradients of 0, whatever their do and dlse are. A key in several ranges has
    the sum of the gradients from each sequence.
    """
    problem, arrays = bound(SPEC, locals(), backward=True)
    dq, dk, dv = np.zeros_like(q), np.zeros(k.shape, lse.dtype), np.zeros(v.shape, lse.dtype)
    d_sinks = np.zeros(problem.H, lse.dtype)
    for queries, keys, found in sequences(problem, arrays, gradient=True):
        q_one, k_one, v_one = _heads(q[queries]), _heads(k[keys]), _heads(v[keys])
        lse_one, dlse_one = lse[None, :, queries], None if dlse is None else dlse[None, :, queries]
        *gradients, _, delta = attend_backward(
            q_one, k_one, v_one, _heads(o[queries]), lse_one, _heads(do[queries]), dlse_one, found
        )
        dq_one, dk_one, dv_one = map(_tokens, gradients)
        dq[queries] = dq_one
        dk[keys] += dk_one
        dv[keys] += dv_one
        if "sinks" in arrays:
            d_sinks += sinks_gradient(found, lse_one, delta)
    found = (dq, dk.astype(k.dtype), dv.astype(v.dtype))
    return (*found, d_sinks.astype(arrays["sinks"].dtype)) if "sinks" in arrays else found


def sequences(problem: Problem, arrays: Mapping[str, Any], *, gradient: bool = False) -> Iterator[Sequence]:
    """Yield the sequences of a call, each with its options as a batch of one."""
    params = {param.name: problem.params[param.name] for param in ONE.params}
    for b, (queries, keys) in enumerate(spans_of(arrays)):
        here = {"q": _heads(arrays["q"][queries]), "k": _heads(arrays["k"][keys]), "v": _heads(arrays["v"][keys])}
        here |= {name: arrays[name] for name in OPTIONAL if name in arrays}
        metas = {
            name: ArrayMeta.of_numpy(abs_strides(x)) if isinstance(x, np.ndarray) else problem.arrays[name]
            for name, x in here.items()
        }
        yield Sequence(queries, keys, options_of(ONE.bind(metas, params), here, first=b, gradient=gradient))


def _heads(tokens: np.ndarray) -> np.ndarray:
    """[S, H, D] -> [1, H, S, D]"""
    return tokens.swapaxes(0, 1)[None]


def _tokens(heads: np.ndarray) -> np.ndarray:
    """[1, H, S, D] -> [S, H, D]"""
    return heads[0].swapaxes(0, 1)
