"""retention on the GPU: which kernel serves which problem, and the public functions.

passes.py             the operator and its gradient as passes of one kind
launches.py           the launches of passes by tiles
decays.py             the decay of a head or of each step, and its prefix sums
nan_repair.py         recomputes elements that unseen columns made NaN
naive.py              not fused: all scores, then products; everything but log_decay's gradient
simt.py               CUDA cores, any GPU and dtype: chunks with states between them, all at once, or one token
sm80/                 tensor cores by mma.sync, 16 bits
sm90/                 Hopper's tensor cores, bfloat16, in chunks
"""

from __future__ import annotations

from typing import Any, Unpack

from ...spec import retention as SPEC, retention_varlen as SPEC_VARLEN
from ...spec.retention import Keywords, KeywordsVarlen
from ..launch.operation import Operation
from ..public import calls
from ..unowned import with_steps
from . import naive, simt, sm80, sm90
from .arguments import unowned


def retention(
    q: Any,
    k: Any,
    v: Any,
    *,
    gamma: Any = None,
    log_decay: Any = None,
    mask: Any = None,
    scale: float | None = None,
    form: str = "chunk",
    normalize: str | None = None,
    initial_state: Any = None,
    initial_norm: Any = None,
    return_state: bool = False,
    return_row_sum: bool = False,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Sums of values that decay with their distance, weighted by scale * (q . k); Sun et al. 2023, arXiv:2307.08621.

        s_ij = scale * (q_i . k_j) * gamma^(i - j) for j <= i;   o_i = sum_j s_ij v_j / n_i

    q [B, H, Sq, D], k [B, H, Sk, D], v [B, H, Sk, Dv]: float64, float32, float16 or bfloat16, any strides with a
    contiguous last axis; D up to 256, Dv up to 512. Query i has position i + Sk - Sq.

    gamma [H], above 0 and at most 1, in float32 (float64 for float64). None means 1 - 2^(-5 - h). mask [H, Sq, Sk], of
    q's dtype or gamma's, replaces the decay. log_decay [B, H, S], of gamma's dtype, replaces gamma: the natural
    logarithm of each head's and step's decay, finite and at most 0. gamma^(i - j) is then the product of the decays of
    the steps after j, up to i, and Sq must be Sk. The values of gamma and log_decay are not checked on a GPU.

    scale: None means 1 / sqrt(D). form: "chunk" (time and memory grow with S), "parallel" (the only form for Sq != Sk,
    a mask and "abs") or "recurrent" (one token in one launch, without a workspace; several by chunks). All forms agree.
    normalize: n is 1; with "signed" max(1, |sum_j s_ij|); with "abs" max(1, sum_j |s_ij|).

    initial_state [B, H, D, Dv], of gamma's dtype: the state before token 0, as an earlier call returned it, with its
    initial_norm [B, H, D] if "signed". return_state: also return both. return_row_sum: also return the row sums that
    the gradient of a normalized call needs.

    Returns o [B, H, Sq, Dv], in the order of q's axes, then state, state_norm and row_sum [B, H, Sq] as requested.

    Other operators are one call each: lightning attention-2 (gamma=exp(-slopes), scale=1), simple GLA
    (log_decay=log_gates) and Mamba-2's SSD, retention(C, B, dtx, log_decay=dt * A, scale=1.0), with C and B of all
    heads broadcast and dtx = dt[..., None] * x in x's dtype.

    Workspace: the rungs simt and sm80 need the states before the chunks, B * H * ceil(S / chunk) * D * Dv numbers, with
    chunks of 32 to 256 tokens (`plan` names it). sm90 needs the state before each segment if sequences are few, B * H *
    segments * D * Dv numbers, otherwise nothing. naive needs B * H * Sq * Sk scores. log_decay takes 2 * B * H * (S +
    1) numbers more for its gradient, and if states are in the workspace.

    out: an array for o, or a tuple for all results, sharing no memory with the inputs. kernel: a rung instead of the
    best one. stream: a stream object or handle instead of the library's current stream. Raises TypeError and ValueError
    for a wrong call, NotImplementedError if this device or rung can't do it. No gradient is recorded: `torch_bridge`
    has the operator with autograd.
    """
    arrays = (q, k, v, gamma, log_decay, mask, initial_state, initial_norm)
    params = (scale, form, normalize, return_state, return_row_sum)
    return forward(arrays, params, out, kernel, stream)


@calls("backward", SPEC, backward=True)
def retention_backward(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    *,
    o: Any = None,
    row_sum: Any = None,
    dstate: Any = None,
    dstate_norm: Any = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
    **options: Unpack[Keywords[Any]],
) -> Any:
    """The gradient of `retention`, from its arguments and do [B, H, Sq, Dv].

    row_sum, as forward returned it, is required for a normalized call; o too, if "signed". dstate [B, H, D, Dv] and
    dstate_norm [B, H, D]: the gradients of the states that forward returned, if they were used. options are those of
    `retention`, with the values of the forward call.

    Returns dq, dk, dv, then dinitial_state, dinitial_norm and dlog_decay for the inputs that were given, each in the
    dtype of its input.

    Results are bit-equal from run to run, on every GPU of a kind: no atomics. sm90 cuts few sequences into segments, by
    B * H and Sk alone, forward too. So a sequence of a batch may differ in its last bits when it runs alone. Workspace:
    as `retention`, and a weight and a term for each query of a normalized call. dlog_decay needs the states twice; on
    sm90 two numbers a token instead. Of 16-bit inputs it has the roundings of dq and dk before they are rounded
    themselves, and a NaN may reach all steps of its sequence.
    """


@calls("forward_varlen", SPEC_VARLEN)
def retention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    max_seqlen: int | None = None,
    *,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
    **options: Unpack[KeywordsVarlen[Any]],
) -> Any:
    """`retention` of B sequences whose tokens follow one another, without padding and without synchronization; by
    chunks.

    q and k [total, H, D], v [total, H, Dv]. Sequence b has the tokens cu_seqlens[b] to cu_seqlens[b + 1]. cu_seqlens [B
    + 1] of int32 begins at 0 and never decreases. max_seqlen is the length of the longest sequence, or more. Tokens
    after the last sequence belong to no sequence: o, row_sum and every gradient are 0 there, whatever do holds.

    The values of cu_seqlens on a GPU are not checked. A wrong one reads and writes beyond its sequence. A token beyond
    max_seqlen is left out. options are those of `retention`; log_decay is [total, H], states are [B, H, D, Dv], norms
    [B, H, D]. A max_seqlen of None means the number of tokens: the result is the same, maybe later.

    Returns o [total, H, Dv], then state, state_norm and row_sum [H, total] as requested.
    """


@calls("backward_varlen", SPEC_VARLEN, backward=True)
def retention_varlen_backward(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    cu_seqlens: Any,
    max_seqlen: int | None = None,
    *,
    o: Any = None,
    row_sum: Any = None,
    dstate: Any = None,
    dstate_norm: Any = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
    **options: Unpack[KeywordsVarlen[Any]],
) -> Any:
    """The gradient of `retention_varlen`: dq, dk, dv, then dinitial_state, dinitial_norm, dlog_decay for the given
    inputs.

    The arguments are those of `retention_backward` and `retention_varlen`; row_sum is [H, total].
    """


RUNGS = (sm90.choices, sm80.choices, simt.choices, sm90.few_choices, sm80.few_choices, naive.choices)
VARLEN_RUNGS = [with_steps(rung, unowned) for rung in RUNGS]

forward = Operation(SPEC, rungs=RUNGS)
backward = Operation(SPEC, rungs=RUNGS, backward=True)
forward_varlen = Operation(SPEC_VARLEN, rungs=VARLEN_RUNGS)
backward_varlen = Operation(SPEC_VARLEN, rungs=VARLEN_RUNGS, backward=True)
