"""The three forms of retention and of its gradient: parallel, chunk, recurrent. Sun et al. 2023, arXiv:2307.08621.

Each takes q, k [B, H, S, D] and v [B, H, S, Dv] in the dtype of arithmetic, q times scale, and the state before the
first key [B, H, D, Dv] (or None). It returns u = sum of s * v and the state after the last key:

    u_i = sum_(j <= i) gamma^(i - j) * (q_i . k_j) * v_j + gamma^(i + 1) * q_i @ state
    state' = sum_j gamma^(S - 1 - j) * k_j^T v_j + gamma^S * state

With a column of ones appended to v, u's last column is the sum of s, and the state's last column the sum of keys. A
normalizer needs nothing else (`retention.py`). The gradients take du and dstate', and return those of q, k, v and
state. Powers of gamma are per head (`Decay`) or per step (`StepDecay`). The logarithms of the latter have a gradient
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..spec.retention import CHUNK, LEAST_LOG
from ._attention import masked_product

Pair = tuple[np.ndarray, np.ndarray]
Gradients = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]  # the last of log_decay


class Decay(NamedTuple):
    """Powers of gamma for each head: gamma^n = exp2(n * log2(gamma))."""

    log2_gamma: np.ndarray  # [H]

    def part(self, tokens: slice) -> Decay:
        """Return the decay of some tokens of the sequence."""
        return self

    def power(self, n: np.ndarray) -> np.ndarray:
        """Return gamma^n for whole numbers n [...]. [H, ...]"""
        each = self.log2_gamma.reshape(-1, *(1,) * n.ndim)
        return np.exp2(n.astype(each.dtype) * each)

    def between(self, Sq: int, Sk: int) -> Pair:
        """Return gamma^(p - j) of query and key, 0 for an unseen key; and which keys are seen. [H, Sq, Sk]"""
        distance = np.arange(Sk - Sq, Sk)[:, None] - np.arange(Sk)  # [Sq, Sk]
        seen = distance >= 0
        weights = np.where(seen, self.power(np.maximum(distance, 0)), 0).astype(self.log2_gamma.dtype)
        return weights, np.broadcast_to(seen, weights.shape)

    def from_start(self, S: int) -> np.ndarray:
        """Return the factor of the initial state in each query: gamma^(i + 1). [H, S, 1]"""
        return self.power(np.arange(1, S + 1)[:, None])

    def to_end(self, S: int) -> np.ndarray:
        """Return the factor of each key in the last state: gamma^(S - 1 - j). [H, S, 1]"""
        return self.power(np.arange(S)[::-1, None])

    def over(self, S: int) -> np.ndarray:
        """Return the factor of a state after S keys: gamma^S. [H, 1, 1]"""
        return self.power(np.array([[S]]))


@dataclass(frozen=True)
class StepDecay:
    """Powers for a decay per step: the product of the decays of the steps (j, i] replaces gamma^(i - j).

    Products are exp of a difference of prefix sums, which are float64. Far into a sequence, float32 would hold the sums
    well and their difference to a few digits only. Arithmetic in float64 has the same problem, so the rounding error of
    each addition is kept as well.
    """

    logs: np.ndarray  # [B, H, S]

    @cached_property
    def sums(self) -> np.ndarray:
        """Prefix sums of log_decay before each token and of all, and their rounding errors. float64 [2, B, H, S + 1]"""
        bounded = np.maximum(self.logs.astype(np.float64), LEAST_LOG)
        sums = np.cumsum(np.pad(bounded, ((0, 0), (0, 0), (1, 0))), axis=-1)
        before, after = sums[..., :-1], sums[..., 1:]
        added = after - before
        rests = (before - (after - added)) + (bounded - added)  # the exact rounding error of each addition
        return np.stack([sums, np.cumsum(np.pad(rests, ((0, 0), (0, 0), (1, 0))), axis=-1)])

    def part(self, tokens: slice) -> StepDecay:
        """Return the decay of some tokens of the sequence."""
        return StepDecay(self.logs[..., tokens])

    def between(self, Sq: int, Sk: int) -> Pair:
        """Return the product of decays between query and key, and which keys are seen. [B, H, S, S]"""
        ends = self.sums[..., 1:]
        seen = np.tri(Sq, Sk, dtype=bool)
        weights = self._exp(np.where(seen, ends[..., :, None] - ends[..., None, :], -np.inf))
        return weights, np.broadcast_to(seen, weights.shape)

    def from_start(self, S: int) -> np.ndarray:
        """Return the factor of the initial state in each query. [B, H, S, 1]"""
        return self._exp(self.sums[..., 1:, None])

    def to_end(self, S: int) -> np.ndarray:
        """Return the factor of each key in the last state. [B, H, S, 1]"""
        return self._exp((self.sums[..., -1:] - self.sums[..., 1:])[..., None])

    def over(self, S: int) -> np.ndarray:
        """Return the factor of a state after all keys. [B, H, 1, 1]"""
        return self._exp(self.sums[..., -1:, None])

    def _exp(self, differences: np.ndarray) -> np.ndarray:
        """Return exp of differences of the sums and of their rounding errors, [2, ...]."""
        return np.exp((differences[0] + differences[1]).astype(self.logs.dtype))


AnyDecay = Decay | StepDecay


def scores(q: np.ndarray, k: np.ndarray, weights: np.ndarray, seen: np.ndarray) -> Pair:
    """s = (q @ k.T) * weights, 0 for an unseen key; and which keys are seen. [B, H, Sq, Sk]"""
    products = q @ _T(k)  # [B, H, Sq, Sk]
    seen = np.broadcast_to(seen, products.shape)
    return np.where(seen, products * weights, 0).astype(q.dtype), seen


# --- parallel: all scores at once ----------------------------------------------------------------


def parallel(q: np.ndarray, k: np.ndarray, v: np.ndarray, weights: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """sum_j s_ij v_j, without a state. Sq may differ from Sk. [B, H, Sq, Dv]"""
    s, counts = scores(q, k, weights, seen)  # [B, H, Sq, Sk]
    return masked_product(s, v, counts)


def parallel_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, du: np.ndarray, weights: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv of `parallel`."""
    s, counts = scores(q, k, weights, seen)  # [B, H, Sq, Sk]
    e, _ = scores(du, v, weights, seen)  # ds_ij = du_i . v_j, times weights
    dq = masked_product(e, k, counts)  # dq_i = sum_j e_ij k_j
    dk = masked_product(_T(e), q, _T(counts))  # dk_j = sum_i e_ij q_i
    dv = masked_product(_T(s), du, _T(counts))  # dv_j = sum_i s_ij du_i
    return dq, dk, dv


def parallel_with_state(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: AnyDecay, state: np.ndarray | None) -> Pair:
    """Compute the parallel form between a state and the next one: of a whole sequence, or of a chunk."""
    S = q.shape[2]
    u = parallel(q, k, v, *decay.between(S, S))  # [B, H, S, Dv]
    after = _T(k * decay.to_end(S)) @ v  # [B, H, D, Dv]
    if state is not None:
        u = u + decay.from_start(S) * (q @ state)
        after = after + decay.over(S) * state
    return u, after


def parallel_with_state_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    du: np.ndarray,
    decay: AnyDecay,
    state: np.ndarray | None,
    dafter: np.ndarray | None,
) -> Gradients:
    """Compute dq, dk, dv, dstate and dlog_decay; dafter: the gradient of the next state."""
    S = q.shape[2]
    dq, dk, dv = parallel_backward(q, k, v, du, *decay.between(S, S))
    dlogs = None
    if isinstance(decay, StepDecay):
        dlogs = _step_gradient(q, k, v, du, decay, state, dafter)
    # the term of the state: gamma^(i + 1) * q_i^T du_i
    dstate = _T(q * decay.from_start(S)) @ du  # [B, H, D, Dv]
    if state is not None:
        dq = dq + decay.from_start(S) * (du @ _T(state))
    if dafter is not None:
        dk = dk + decay.to_end(S) * (v @ _T(dafter))
        dv = dv + decay.to_end(S) * (k @ dafter)
        dstate = dstate + decay.over(S) * dafter
    return dq, dk, dv, dstate, dlogs


def _step_gradient(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    du: np.ndarray,
    decay: StepDecay,
    state: np.ndarray | None,
    dafter: np.ndarray | None,
) -> np.ndarray:
    """dlogs_t: the sum of all terms from a key j < t, or the state, to a query i >= t, or the next state. [B, H, S]

    Nothing is subtracted: the sum is as exact as its terms, and a NaN in a term reaches the steps that it spans.
    """
    S = q.shape[2]
    e, seen = scores(du, v, *decay.between(S, S))  # [B, H, S, S]
    pairs = np.where(seen, (q @ _T(k)) * e, 0)  # s_ij * ds_ij
    dlogs = np.tril(_sums_before(pairs)).sum(axis=-2)  # over j < t, then i >= t
    if state is not None:
        taken = (decay.from_start(S) * (q @ state) * du).sum(axis=-1)  # [B, H, S]
        dlogs = dlogs + np.cumsum(taken[..., ::-1], axis=-1)[..., ::-1]
    if dafter is not None:
        given = (decay.to_end(S) * (k @ dafter) * v).sum(axis=-1)  # [B, H, S]
        dlogs = dlogs + _sums_before(given)
    if state is not None and dafter is not None:
        dlogs = dlogs + decay.over(S)[..., 0] * (state * dafter).sum(axis=(-2, -1))[..., None]
    return dlogs


def rounded_step_gradient(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    du: np.ndarray,
    decay: StepDecay,
    states: tuple[np.ndarray | None, np.ndarray | None],
    rounded: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return dlogs [B, H, S] of 16-bit inputs. P, the decayed tokens and the states are rounded before a product.

    dlogs_t = sum_(i >= t) (q_i . dq_i - k_i . dk_i) + state . dstate      over t's chunk; the states are those after it

    states: the first state and the gradient of the last one. The sum subtracts pairs that do not span t. The error of a
    rounded P cancels there, since dq and dk have the same P. Errors of rounded states do not cancel. So each chunk has
    a sum of its own.
    """
    state, dafter = (_state(k, v) if each is None else each for each in states)
    parts, before, dlogs = list(_chunks(q.shape[2])), [state], np.empty_like(decay.logs)
    for part in parts:
        own, S = decay.part(part[-1]), k[part].shape[2]
        before.append(_T(rounded(k[part] * own.to_end(S))) @ v[part] + own.over(S) * before[-1])
    for number, part in reversed(list(enumerate(parts))):
        own, S, state = decay.part(part[-1]), k[part].shape[2], before[number]
        e, seen = scores(du[part], v[part], *own.between(S, S))  # [B, H, n, n]
        e = rounded(e)
        dq = masked_product(e, k[part], seen) + own.from_start(S) * (du[part] @ _T(rounded(state)))
        dk = masked_product(_T(e), q[part], _T(seen)) + own.to_end(S) * (v[part] @ _T(rounded(dafter)))
        steps = (q[part] * dq - k[part] * dk).sum(axis=-1)  # [B, H, n]
        end = (before[number + 1] * dafter).sum(axis=(-2, -1))[..., None]
        dlogs[part] = np.cumsum(steps[..., ::-1], axis=-1)[..., ::-1] + end
        dafter = _T(rounded(q[part] * own.from_start(S))) @ du[part] + own.over(S) * dafter
    return dlogs


# --- chunk: parallel within chunks, a state between them -----------------------------------------


def chunk(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: AnyDecay, state: np.ndarray | None) -> Pair:
    """Compute one chunk of tokens after another, each with the state of those before it."""
    u = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)  # [B, H, S, Dv]
    for part in _chunks(q.shape[2]):
        u[part], state = parallel_with_state(q[part], k[part], v[part], decay.part(part[-1]), state)
    return u, _state(k, v) if state is None else state


def chunk_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    du: np.ndarray,
    decay: AnyDecay,
    state: np.ndarray | None,
    dafter: np.ndarray | None,
) -> Gradients:
    """Go forward to recompute the states, then backward with the gradient of the state after each chunk."""
    parts = list(_chunks(q.shape[2]))
    states = []
    for part in parts:
        states.append(state)
        _, state = parallel_with_state(q[part], k[part], v[part], decay.part(part[-1]), state)
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    dlogs = np.empty_like(decay.logs) if isinstance(decay, StepDecay) else None
    for part, before in zip(reversed(parts), reversed(states)):
        dq[part], dk[part], dv[part], dafter, passed = parallel_with_state_backward(
            q[part], k[part], v[part], du[part], decay.part(part[-1]), before, dafter
        )
        if dlogs is not None:
            dlogs[part] = passed
    return dq, dk, dv, _state(k, v) if dafter is None else dafter, dlogs


# --- recurrent: token after token ----------------------------------------------------------------


def recurrent(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: AnyDecay, state: np.ndarray | None) -> Pair:
    """state_j = gamma * state_(j-1) + k_j^T v_j;  u_j = q_j @ state_j."""
    u = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)  # [B, H, S, Dv]
    state = _state(k, v) if state is None else state
    for j, after in enumerate(_states(k, v, decay, state)):
        u[:, :, j] = (q[:, :, j, None] @ after)[:, :, 0]
        state = after
    return u, state


def recurrent_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    du: np.ndarray,
    decay: AnyDecay,
    state: np.ndarray | None,
    dafter: np.ndarray | None,
) -> Gradients:
    """dstate_j = q_j^T du_j + gamma * dstate_(j+1), the sum of the terms of u_j, u_(j+1) ... and the last state;

    dq_j = state_j @ du_j;  dk_j = dstate_j @ v_j;  dv_j = k_j @ dstate_j;  dlogs_j = gamma_j * state_(j-1) . dstate_j
    """
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    dlogs: np.ndarray | None = None
    before = [state]  # the state before each token; kept only here
    if isinstance(decay, StepDecay):
        dlogs = np.zeros_like(decay.logs)
    for j, after in enumerate(_states(k, v, decay, _state(k, v) if state is None else state)):
        dq[:, :, j] = (after @ du[:, :, j, :, None])[..., 0]
        if dlogs is not None:
            before.append(after)
    dstate = _state(k, v) if dafter is None else dafter  # [B, H, D, Dv]
    for j in reversed(range(q.shape[2])):
        dstate = q[:, :, j, :, None] * du[:, :, j, None] + dstate
        dk[:, :, j] = (dstate @ v[:, :, j, :, None])[..., 0]
        dv[:, :, j] = (k[:, :, j, None] @ dstate)[:, :, 0]
        dstate = decay.part(slice(j, j + 1)).over(1) * dstate
        if dlogs is not None and before[j] is not None:
            dlogs[:, :, j] = (before[j] * dstate).sum(axis=(-2, -1))
    return dq, dk, dv, dstate, dlogs


def _states(k: np.ndarray, v: np.ndarray, decay: AnyDecay, state: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the state after each key. [B, H, D, Dv]"""
    for j in range(k.shape[2]):
        gamma = decay.part(slice(j, j + 1)).over(1)  # [H, 1, 1], or [B, H, 1, 1]
        state = gamma * state + k[:, :, j, :, None] * v[:, :, j, None]
        yield state


# --- shared ----------------------------------------------------------------------------------------


def _state(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the state before any keys, 0."""
    return np.zeros((*k.shape[:2], k.shape[-1], v.shape[-1]), k.dtype)


def _chunks(S: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices of CHUNK tokens each; the last has the rest."""
    for start in range(0, S, CHUNK):
        yield slice(None), slice(None), slice(start, start + CHUNK)


def _sums_before(array: np.ndarray) -> np.ndarray:
    """Return for each place of the last axis the sum of those before it, without its own."""
    return np.cumsum(np.concatenate([np.zeros_like(array[..., :1]), array[..., :-1]], axis=-1), axis=-1)


def _T(array: np.ndarray) -> np.ndarray:
    return array.swapaxes(-1, -2)
