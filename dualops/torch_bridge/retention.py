"""Retention for torch tensors. Semantics: `dualops.spec.retention`; integration with torch: `interop`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import reference
from ..spec import retention as SPEC, retention_varlen as SPEC_VARLEN
from ..spec.domains import shown
from .arguments import longest_or_all
from .interop import register

_KINDS = {"scale": "float?", "normalize": "str?", "max_seqlen": "SymInt"}
_ROW_SUM = {"return_row_sum": True}  # backward needs it

_operator = register(
    SPEC, reference.retention, reference.retention_backward, kinds=_KINDS, fixed=_ROW_SUM, autocast="lower"
)
_operator_varlen = register(
    SPEC_VARLEN,
    reference.retention_varlen,
    reference.retention_varlen_backward,
    kinds=_KINDS,
    fixed=_ROW_SUM,
    autocast="lower",
)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gamma: Tensor | None = None,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    form: str = "chunk",
    normalize: str | None = None,
    mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_norm: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Retention of RetNet, o_i = sum_j s_ij v_j / n_i with s_ij = scale * (q_i . k_j) * gamma^(i - j) for j <= i.
    Sun et al. 2023, arXiv:2307.08621.

    q [B, H, Sq, D], k [B, H, Sk, D], v [B, H, Sk, Dv] of one dtype (float64, float32, float16, bfloat16) on a CUDA
    device or the CPU, any strides with a contiguous last axis, D at most 256, Dv at most 512. Results and states are
    differentiable once, by q, k, v, initial_state, initial_norm and log_decay.

    gamma [H]: the decay of each head, above 0 and at most 1; float32 (float64 for float64); 1 - 2^(-5 - h) if None
    log_decay [B, H, S]: in place of gamma, the natural logarithm of the decay of each head and step, finite and at most
        0; gamma's dtype. gamma^(i - j) is then the product of the decays of the steps after j, up to i; Sq is Sk
    scale: of q @ k.T, 1 / sqrt(D) if None
    form: "chunk", in time and memory linear in the length; "recurrent", for one token, to decode; "parallel",
        all pairs at once. Their results are the same. Sq is Sk except in the parallel form, where the distance is
        i + Sk - Sq - j
    normalize: None: n = 1; "signed": n_i = max(1, |sum_j s_ij|); "abs", only in the parallel form:
        n_i = max(1, sum_j |s_ij|), which has no gradient
    mask [H, Sq, Sk]: in place of the decay, for all j; only in the parallel form; q's dtype or gamma's
    initial_state [B, H, D, Dv]: the state that an earlier call returned; gamma's dtype. With "signed" also
        initial_norm [B, H, D], that call's state_norm

    Returns o [B, H, Sq, Dv] of q's dtype, its axes in memory in the order of q's; with return_state (o, state), and
    with "signed" (o, state, state_norm): a second call with the state of the first gives the same as one call of all
    tokens. Gradients are deterministic. Under autocast q, k and v take autocast's dtype; gamma, log_decay and states
    keep their dtypes, a mask becomes float32.

    Works under torch.compile (fullgraph, dynamic B, H, Sq and Sk), torch.export and, outside torch.compile,
    torch.func.grad. CUDA tensors run on torch's current stream. CPU tensors use the NumPy reference, which is slow.
    Values of gamma and log_decay are only checked on the CPU.

    With its decays, this operator also computes the following; C and B of [B, S, D] are shared by all heads:

        lightning attention-2    retention(q, k, v, gamma=torch.exp(-slopes), scale=1.0)               slopes [H]
        simple GLA               retention(q, k, v, log_decay=log_gates)                               [B, H, S]
        SSD of Mamba-2           retention(C, B, dtx, log_decay=dt * A, scale=1.0)                     dt [B, H, S]

    where C and B are C[:, None].expand(-1, H, -1, -1), which needs no memory, and dtx is
    (dt[..., None] * x).to(x.dtype); dt is positive and A [H, 1] negative. If q has 16 bits, slopes, log_gates, dt and A
    are float32.

    Raises TypeError and ValueError for a wrong call. Raises NotImplementedError for vmap, for a gradient of the
    gradient, of gamma or of mask, and for a call that the device does not support.

    >>> import torch
    >>> q = k = torch.ones(1, 1, 3, 1)
    >>> v = torch.tensor([[[[1.0], [0.0], [0.0]]]])
    >>> retention(q, k, v, gamma=torch.tensor([0.5]))
    tensor([[[[1.0000],
              [0.5000],
              [0.2500]]]])
    """
    arrays = (q, k, v, gamma, log_decay, mask, initial_state, initial_norm)
    return _wanted(SPEC.name, _operator(*arrays, scale, form, normalize, return_state), normalize, return_state)


def retention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    *,
    gamma: Tensor | None = None,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    normalize: str | None = None,
    initial_state: Tensor | None = None,
    initial_norm: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """`retention` in its chunk form, of B sequences of different lengths, packed without padding.

    q, k [total, H, D], v [total, H, Dv]. Sequence b has tokens cu_seqlens[b] to cu_seqlens[b + 1]. cu_seqlens [B + 1]
    of int32 begin at 0 and are nondecreasing; max_seqlen is the length of the longest sequence, or more. Tokens after
    the last sequence belong to none: their o and their gradients are 0. On a CUDA device the values of cu_seqlens are
    not checked: that would wait for the device. normalize: None or "signed". Each sequence has its own state:
    initial_state [B, H, D, Dv], initial_norm [B, H, D]. log_decay is [total, H]. The other arguments are those of
    `retention`, whose docstring applies here too.

    A max_seqlen of None means the number of all tokens: the same result, maybe later.
    Returns o [total, H, Dv]; with return_state (o, state), and with "signed" (o, state, state_norm). A compiled
    function is compiled once for all lengths and values of max_seqlen.
    """
    arrays = (q, k, v, cu_seqlens, gamma, log_decay, initial_state, initial_norm)
    results = _operator_varlen(*arrays, longest_or_all(max_seqlen, q), scale, normalize, return_state)
    return _wanted(SPEC_VARLEN.name, results, normalize, return_state)


def _wanted(op: str, results: tuple[Tensor, ...], normalize: Any, return_state: Any) -> Any:
    """Return o, or o and the state with its norm if there is one."""
    o, state, state_norm, _ = results
    if not isinstance(return_state, bool):
        raise TypeError(f"{op}: return_state is {shown(return_state)}, expected True or False")
    if not return_state:
        return o
    return (o, state, state_norm) if normalize == "signed" else (o, state)
