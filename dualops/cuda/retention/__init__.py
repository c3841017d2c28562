"""retention on the GPU: which kernel serves which problem, and the public functions.

passes.py          the operator and its gradient as passes of one kind
decays.py          gamma, or log_decay, as a kernel asks for it; decay_prefix_sums.py: the sums that this is made of
naive.py           the unfused idea: all scores, then products; all but the gradient of log_decay
simt.py            tiles on CUDA cores, any GPU and dtype: chunks with states between them, all at once, or step by step
sm80/              the same passes on tensor cores by mma.sync, 16 bits
sm90/              in chunks on Hopper's tensor cores, bfloat16
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
    contiguous last axis; D up to 256, Dv up to 512. Query i stands at position i + Sk - Sq.
    gamma [H], above 0 and at most 1, in float32 (float64 for float64): None is 1 - 2^(-5 - h). mask [H, Sq, Sk], of q's
    dtype or gamma's: in place of the decay.
    log_decay [B, H, S], dtype as gamma: in place of gamma the natural logarithm of each head's and step's decay, finite
    and at most 0; gamma^(i - j) is then the product of the decays of the steps after j, up to i, and Sq is Sk. On a GPU
    the values of gamma and log_decay are not looked at.
    scale: None is 1 / sqrt(D). form: "chunk" (time and memory as S), "parallel" (the only one for Sq != Sk, a mask and
    "abs") or "recurrent" (token after token, for one or a few); they agree. normalize: n is 1; with "signed"
    max(1, |sum_j s_ij|), with "abs" max(1, sum_j |s_ij|).
    initial_state [B, H, D, Dv], dtype as gamma: what stood before token 0, as the state of an earlier call, with its
    initial_norm [B, H, D] if "signed". return_state: also return these two. return_row_sum: also return what the
    gradient of a normalized call needs.
    Returns o [B, H, Sq, Dv], in the order of q's axes, then state, state_norm and row_sum [B, H, Sq] as asked for.
    Others are one call each: lightning attention-2 (gamma=exp(-slopes), scale=1), simple GLA (log_decay=log_gates) and
    Mamba-2's SSD, retention(C, B, dtx, log_decay=dt * A, scale=1.0), with C and B of all heads broadcast and dtx being
    dt[..., None] * x in x's dtype.
    Beside their results the rungs simt and sm80 need the states before the chunks, B * H * ceil(S / chunk) * D * Dv
    numbers, with chunks of 32 to 256 tokens (`plan` says it); sm90 that before each segment where sequences are few,
    B * H * segments * D * Dv numbers, and else none; naive needs B * H * Sq * Sk scores. log_decay takes
    2 * B * H * (S + 1) more where there are states in the workspace, and for its gradient.

    out: an array for o, or a tuple for all results, sharing no memory with the inputs. kernel: a rung instead of the
    best. stream: a stream object or handle instead of the library's current one. Raises TypeError and ValueError for a
    wrong call, NotImplementedError where this device or rung can't do it. No gradient is recorded: `torch_bridge` has
    the operator with autograd.
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
    """The gradient of `retention`, from what it took and do [B, H, Sq, Dv].

    row_sum as forward gave it, if the call was normalized, and o too, if "signed". dstate [B, H, D, Dv] and dstate_norm
    [B, H, D]: the gradients of the states that forward returned, where they were used. options are those of
    `retention`, and must be what they were.
    Returns dq, dk, dv, then dinitial_state, dinitial_norm and dlog_decay of what was given, each in the dtype of its
    input.
    Bit-equal from run to run, on every GPU of a kind: no atomics. On sm90 few sequences are cut into segments, by B * H
    and Sk alone, forward too: one of a batch, run alone, may have other last bits. Memory beside the results: as
    `retention`, and a weight and a term for each query of a normalized call; for dlog_decay the states twice, on tensor
    cores once.
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
    """`retention` of B sequences whose tokens lie one after another, without padding and without waiting; by chunks.

    q and k [total, H, D], v [total, H, Dv]. Sequence b has the tokens cu_seqlens[b] to cu_seqlens[b + 1]; cu_seqlens
    [B + 1] of int32 begins at 0 and never falls; max_seqlen is the length of the longest, or more. Tokens behind the
    last sequence belong to none: o, row_sum and every gradient are 0 there, whatever do holds.
    Where cu_seqlens is on a GPU its values are not looked at: a wrong one reads and writes beyond its sequence, a token
    beyond max_seqlen is left out. options are those of `retention`; log_decay is [total, H], states are [B, H, D, Dv],
    norms [B, H, D].
    A max_seqlen of None is as many as there are tokens: the same result, maybe later.
    Returns o [total, H, Dv], then state, state_norm and row_sum [H, total] as asked for.
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
    """The gradient of `retention_varlen`: dq, dk, dv, then dinitial_state, dinitial_norm, dlog_decay of what was given.

    Arguments as `retention_backward` and `retention_varlen` have them; row_sum is [H, total].
    """


FORWARD = (
    sm90.forward_choices,
    sm80.forward_choices,
    simt.forward_choices,
    sm90.few_choices,
    sm80.few_choices,
    naive.forward_choices,
)
BACKWARD = (
    sm90.backward_choices,
    sm80.backward_choices,
    simt.backward_choices,
    sm90.few_backward_choices,
    sm80.few_backward_choices,
    naive.backward_choices,
)

forward = Operation(SPEC, rungs=FORWARD)
backward = Operation(SPEC, rungs=BACKWARD, backward=True)
forward_varlen = Operation(SPEC_VARLEN, rungs=[with_steps(rung, unowned) for rung in FORWARD])
backward_varlen = Operation(SPEC_VARLEN, rungs=[with_steps(rung, unowned) for rung in BACKWARD], backward=True)
