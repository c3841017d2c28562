"""Retention of packed sequences of different lengths: the chunk form on each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import numpy as np

from ..spec import ArrayMeta, Problem, retention as ONE, retention_varlen as SPEC
from ..spec.meta import numpy_dtype
from ..spec.named import names_options
from ..spec.retention import KeywordsVarlen
from ._rounding import bound
from .retention import retain, retain_backward

# the order of axes among all tokens: by token and head, by head and token, by sequence
_TOKENS = ("q", "k", "v", "log_decay", "o", "do", "dq", "dk", "dv", "dlog_decay")
_ROWS = ("row_sum",)
_STATES = ("initial_state", "initial_norm", "state", "state_norm", "dstate", "dstate_norm")
_STATES += ("dinitial_state", "dinitial_norm")


@names_options(SPEC)
def retention_varlen(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens: np.ndarray,
    max_seqlen: int | None = None,
    **options: Unpack[KeywordsVarlen[np.ndarray]],
) -> Any:
    """`retention` in its chunk form, of B sequences of different lengths, packed without padding.

    q, k [total, H, D], v [total, H, Dv]. Sequence b has tokens cu_seqlens[b] to cu_seqlens[b + 1]. cu_seqlens [B + 1]
    of int32 begin at 0 and are nondecreasing; max_seqlen is the length of the longest sequence, or more. Tokens after
    the last sequence belong to none: their o and row_sum are 0. normalize: None or "signed". log_decay is [total, H].
    options are those of `retention`; each sequence has its own state.
    A max_seqlen of None means the number of all tokens.
    Returns o [total, H, Dv], then the results on request: the states [B, H, D, Dv], their norms [B, H, D], and
    row_sum [H, total].
    """
    problem, arrays = bound(SPEC, locals())
    wanted = [output for output in SPEC.outputs if output.when(problem)]
    results = {output.name: np.zeros(output.shape(problem), numpy_dtype(output.dtype(problem))) for output in wanted}
    for b, tokens, one, inputs in sequences(problem, arrays):
        found = retain(one, inputs)
        for name, result in results.items():
            _of_sequence(name, result, b, tokens)[...] = found[name]
    found = tuple(results.values())
    return found[0] if len(found) == 1 else found


@names_options(SPEC, backward=True)
def retention_varlen_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    cu_seqlens: np.ndarray,
    max_seqlen: int | None = None,
    *,
    o: np.ndarray | None = None,
    row_sum: np.ndarray | None = None,
    dstate: np.ndarray | None = None,
    dstate_norm: np.ndarray | None = None,
    **options: Unpack[KeywordsVarlen[np.ndarray]],
) -> tuple[np.ndarray, ...]:
    """The gradient: dq, dk, dv as q, k, v, then those of initial_state, initial_norm and log_decay.

    Tokens that belong to no sequence have gradients of 0, whatever their do is. See `retention_backward`.
    """
    problem, arrays = bound(SPEC, locals(), backward=True)
    wanted = [output for output in SPEC.gradients if output.when(problem)]
    results = {output.name: np.zeros(output.shape(problem), numpy_dtype(output.dtype(problem))) for output in wanted}
    for b, tokens, one, inputs in sequences(problem, arrays):
        found = retain_backward(one, inputs)
        for name, result in results.items():
            _of_sequence(name, result, b, tokens)[...] = found[name]
    return tuple(results.values())


def sequences(
    problem: Problem, arrays: Mapping[str, np.ndarray]
) -> Iterator[tuple[int, slice, Problem, dict[str, np.ndarray]]]:
    """Yield number and tokens of each sequence, and its call as a batch of one."""
    ends = arrays["cu_seqlens"].astype(np.int64)
    params = {param.name: problem.params[param.name] for param in ONE.params if param.name in problem.params}
    bind = ONE.bind_backward if "do" in arrays else ONE.bind
    for b in range(problem.B):
        tokens = slice(ends[b], ends[b + 1])
        inputs = {name: _of_sequence(name, x, b, tokens) for name, x in arrays.items() if name != "cu_seqlens"}
        # contiguous copies: the layout of the whole was checked already
        metas = {name: ArrayMeta.of_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()}
        yield b, tokens, bind(metas, params), inputs


def _of_sequence(name: str, array: np.ndarray, b: int, tokens: slice) -> np.ndarray:
    """Return a view of sequence b's part of an array, as a batch of one."""
    if name in _TOKENS:
        return array[tokens].swapaxes(0, 1)[None]  # [1, H, S, D]
    if name in _ROWS:
        return array[None, :, tokens]  # [1, H, S]
    return array[b : b + 1] if name in _STATES else array
