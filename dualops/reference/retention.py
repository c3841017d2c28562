"""Retention in NumPy: normalizers and states for the three forms of `retention_forms.py`, and the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

import numpy as np

from ..spec import Problem, retention as SPEC
from ..spec.meta import compute_dtype, numpy_dtype
from ..spec.named import names_options
from ..spec.retention import Keywords, default_gamma
from ._rounding import arithmetic, bound, to_digits
from .retention_forms import (
    AnyDecay,
    Decay,
    StepDecay,
    chunk,
    chunk_backward,
    parallel,
    parallel_backward,
    parallel_with_state,
    parallel_with_state_backward,
    recurrent,
    recurrent_backward,
    rounded_step_gradient,
    scores,
)

FORMS = {"parallel": parallel_with_state, "chunk": chunk, "recurrent": recurrent}
FORMS_BACKWARD = {"parallel": parallel_with_state_backward, "chunk": chunk_backward, "recurrent": recurrent_backward}


def retention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    gamma: np.ndarray | None = None,
    log_decay: np.ndarray | None = None,
    scale: float | None = None,
    form: str = "chunk",
    normalize: str | None = None,
    mask: np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    initial_norm: np.ndarray | None = None,
    return_state: bool = False,
    return_row_sum: bool = False,
) -> Any:
    """o_i = sum_j s_ij v_j / n_i with s_ij = scale * (q_i . k_j) * gamma^(p - j) for j <= p = i + Sk - Sq, else 0.

    q [B, H, Sq, D], k [B, H, Sk, D], v [B, H, Sk, Dv] of one dtype (float64, float32, float16, bfloat16), D at most
    256, Dv at most 512.

    gamma [H]: the decay of each head, above 0 and at most 1; float32 (float64 for float64); 1 - 2^(-5 - h) if None
    log_decay [B, H, S]: in place of gamma, the natural logarithm of the decay of each head and step, finite and at most
        0; gamma's dtype. gamma^(p - j) is then the product of the decays of the steps after j, up to p; Sq is Sk
    scale: of q @ k.T, 1 / sqrt(D) if None
    form: "parallel" computes all s; "recurrent" goes from token to token, with a state; "chunk" is parallel within
        chunks and recurrent between them. Their results are the same. Sq must be Sk except in the parallel form
    normalize: None: n = 1; "signed": n_i = max(1, |sum_j s_ij|); "abs", only in the parallel form:
        n_i = max(1, sum_j |s_ij|), which has no gradient
    mask [H, Sq, Sk]: in place of the decay, for all j; only in the parallel form; q's dtype or gamma's
    initial_state [B, H, D, Dv]: the sum of gamma^age * k^T v of earlier keys; gamma's dtype. With "signed" also
        initial_norm [B, H, D], the same sum of k

    Returns o [B, H, Sq, Dv] of q's dtype, rounded once. With return_state also the state after the last key, which is
    the next call's initial_state, and with "signed" its norm. With return_row_sum, if it normalizes, also the sum in
    n_i, [B, H, Sq], which backward needs. States and sums are float32 (float64 for float64).
    Raises TypeError and ValueError for a wrong call.

    With its decays, this operator also computes the following. x, q, k, v are as above; a head's B, C [B, S, D] are
    shared by all heads:

        lightning attention-2    retention(q, k, v, gamma=np.exp(-slopes), scale=1.0)                  slopes [H]
        simple GLA               retention(q, k, v, log_decay=log_gates)                               [B, H, S]
        SSD of Mamba-2           retention(C, B, dtx, log_decay=dt * A, scale=1.0)                     dt [B, H, S]

    where C and B are np.broadcast_to(C[:, None], (B, H, S, D)), which needs no memory, and dtx is (dt[..., None] *
    x).astype(x.dtype); dt is positive and A [H, 1] negative. If q has 16 bits, slopes, log_gates, dt and A are float32.
    """
    problem, arrays = bound(SPEC, locals())
    results = retain(problem, arrays)
    found = tuple(results[output.name] for output in SPEC.outputs if output.when(problem))
    return found[0] if len(found) == 1 else found


@names_options(SPEC, backward=True)
def retention_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    *,
    o: np.ndarray | None = None,
    row_sum: np.ndarray | None = None,
    dstate: np.ndarray | None = None,
    dstate_norm: np.ndarray | None = None,
    **options: Unpack[Keywords[np.ndarray]],
) -> tuple[np.ndarray, ...]:
    """The gradient of `retention`, from its inputs and do [B, H, Sq, Dv].

    row_sum: as forward returned it, if it normalized; o too, with "signed". dstate [B, H, D, Dv] and dstate_norm [B, H,
    D]: the gradients of the last state and its norm, if they were used. options: those of `retention`; return_state and
    return_row_sum have no effect here.
    Returns dq, dk, dv, then dinitial_state, dinitial_norm and dlog_decay for the inputs that are given; each of its
    input's dtype.
    """
    problem, arrays = bound(SPEC, locals(), backward=True)
    gradients = retain_backward(problem, arrays)
    return tuple(gradients[output.name] for output in SPEC.gradients if output.when(problem))


@np.errstate(all="ignore")  # as on a GPU
def retain(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute all results of whole sequences [B, H, S, ...], by name; only those that the call can have."""
    q, k, v = (arithmetic(arrays[name]) for name in ("q", "k", "v"))
    q = q * q.dtype.type(problem.scale)  # [B, H, Sq, D]
    signed = problem.normalize == "signed"
    if signed:
        v = np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)  # [B, H, Sk, Dv + 1]
    if "mask" in arrays or problem.Sq != problem.Sk:
        u, state = parallel(q, k, v, *_weights(problem, arrays)), None
    else:
        u, state = FORMS[problem.form](q, k, v, decay_of(problem, arrays), _initial(arrays))
    results = {}
    if state is not None:
        results["state"] = state[..., : problem.Dv].copy()  # [B, H, D, Dv]
    if signed:
        u, results["row_sum"] = u[..., :-1], u[..., -1].copy()  # [B, H, Sq, Dv], [B, H, Sq]
        if state is not None:
            results["state_norm"] = state[..., -1].copy()  # [B, H, D]
    elif problem.normalize == "abs":
        results["row_sum"] = np.abs(scores(q, k, *_weights(problem, arrays))[0]).sum(axis=-1)  # [B, H, Sq]
    if problem.normalize is not None:
        u = u / _normalizer(results["row_sum"])
    return results | {"o": u.astype(arrays["q"].dtype)}


@np.errstate(all="ignore")
def retain_backward(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute all gradients of whole sequences, by name."""
    q, k, v, du = (arithmetic(arrays[name]) for name in ("q", "k", "v", "do"))
    scale = q.dtype.type(problem.scale)
    q = q * scale  # [B, H, Sq, D]
    if problem.normalize is not None:
        # o = u / n:  du_i = do_i / n_i
        du = du / _normalizer(arrays["row_sum"])  # [B, H, Sq, Dv]
    if problem.normalize == "signed":
        # n = |r|:  dr_i = -sign(r_i) * (do_i . o_i) / n_i;  r is u's column for the value 1
        r = arrays["row_sum"]  # [B, H, Sq]
        dr = np.where(np.abs(r) <= 1, 0, -np.sign(r) * (du * arithmetic(arrays["o"])).sum(axis=-1)).astype(r.dtype)
        du = np.concatenate([du, dr[..., None]], axis=-1)  # [B, H, Sq, Dv + 1]
        v = np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)  # [B, H, Sk, Dv + 1]
    dstate = dlogs = None
    if "mask" in arrays or problem.Sq != problem.Sk:
        dq, dk, dv = parallel_backward(q, k, v, du, *_weights(problem, arrays))
    else:
        backward, states = FORMS_BACKWARD[problem.form], (_initial(arrays), _incoming(arrays, v))
        decay, rounded = decay_of(problem, arrays), partial(to_digits, dtype=arrays["q"].dtype)
        dq, dk, dv, dstate, dlogs = backward(q, k, v, du, decay, *states)
        if isinstance(decay, StepDecay) and arrays["q"].itemsize == 2:
            dlogs = rounded_step_gradient(q, k, v, du, decay, states, rounded)
    gradients = {"dq": scale * dq, "dk": dk, "dv": dv[..., : problem.Dv]}
    gradients = {name: gradient.astype(arrays["q"].dtype) for name, gradient in gradients.items()}
    if dstate is not None:
        gradients |= {"dinitial_state": dstate[..., : problem.Dv].copy(), "dinitial_norm": dstate[..., -1].copy()}
    if dlogs is not None:
        gradients["dlog_decay"] = dlogs
    return gradients


def decay_of(problem: Problem, arrays: Mapping[str, np.ndarray]) -> AnyDecay:
    """Return log2(gamma), computed in float64 since it is multiplied by up to Sk; or the decay of each step."""
    if "log_decay" in arrays:
        return StepDecay(arrays["log_decay"])
    gamma = arrays["gamma"].astype(np.float64) if "gamma" in arrays else default_gamma(problem.H)
    return Decay(np.log2(gamma).astype(numpy_dtype(compute_dtype(problem.dtype))))


def _weights(problem: Problem, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors of q @ k.T, and which of them count. [H, Sq, Sk]"""
    if "mask" in arrays:
        mask = arithmetic(arrays["mask"])
        return mask, np.ones(mask.shape, bool)
    return decay_of(problem, arrays).between(problem.Sq, problem.Sk)


def _normalizer(row_sum: np.ndarray) -> np.ndarray:
    """Return n = max(1, |sum|), NaN where the sum is NaN. [B, H, Sq, 1]"""
    return np.maximum(1, np.abs(row_sum))[..., None]


def _initial(arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the initial state, with its norm as a last column if there is one. [B, H, D, Dv or Dv + 1]"""
    if "initial_norm" in arrays:
        return np.concatenate([arrays["initial_state"], arrays["initial_norm"][..., None]], axis=-1)
    return arrays.get("initial_state")


def _incoming(arrays: Mapping[str, np.ndarray], v: np.ndarray) -> np.ndarray | None:
    """Return the last state's gradient, with its norm's as a last column if v has a column of ones; 0 if unused."""
    if "dstate" not in arrays and "dstate_norm" not in arrays:
        return None
    B, H, _, Dv = v.shape
    dstate = np.zeros((B, H, arrays["q"].shape[-1], Dv), v.dtype)
    for name, columns in (("dstate", slice(arrays["v"].shape[-1])), ("dstate_norm", -1)):
        if name in arrays:
            dstate[..., columns] = arrays[name]
    return dstate
