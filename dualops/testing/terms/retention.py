"""Terms of retention's results and gradients, for cancellation.

A result is a sum of products, some of which cancel. Their roundings are independent, so they add in squares. A form
applied to the squares of its inputs gives the sum of the squares of all products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from ml_dtypes import finfo

from ...reference.retention import decay_of, retain
from ...reference.retention_forms import AnyDecay, Decay, StepDecay, chunk, chunk_backward, parallel, parallel_backward
from ...reference.retention_varlen import sequences
from ...spec import Problem
from ...spec.accuracy import slack
from ...spec.meta import numpy_dtype

Arrays = Mapping[str, np.ndarray]


def result_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """Return for each result the largest root of the sum of its squared terms; NaN and infinity count as 0.

    o = u / n where n may be a sum too: n is accurate to eps of its terms, which adds to o's error o / n times as much.
    """
    largest = {output.name: 0.0 for output in problem.spec.outputs}
    for one, x in _parts(arrays, problem):
        q, k, v = _squares(x, "q"), _squares(x, "k"), _with_ones(_squares(x, "v"))
        q = q * one.scale**2
        if _stateless(one):
            u, state = parallel(q, k, v, *_weights(one, x)), np.zeros((0, v.shape[-1]))
        else:
            u, state = chunk(q, k, v, _decay(one, x), _joined(x, "initial_state", "initial_norm"))
        found, terms = retain(one, x), np.sqrt(u)
        n = np.maximum(1, np.abs(_finite(found.get("row_sum", np.ones(u.shape[:-1])))))[..., None]
        normalized = terms[..., -1:] / n if one.normalize else 0
        each = {
            "o": terms[..., :-1] / n + np.abs(_finite(found["o"])) * normalized,
            "row_sum": terms[..., -1],
            "state": np.sqrt(state[..., :-1]),
            "state_norm": np.sqrt(state[..., -1]),
        }
        largest = {name: max(most, float(each[name].max(initial=0.0))) for name, most in largest.items()}
    return largest


def gradient_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """Return for each gradient the largest root of the sum of its squared terms; do . o is a sum too."""
    largest = {output.name: 0.0 for output in problem.spec.gradients}
    for one, x in _parts(arrays, problem):
        q, k, v = _squares(x, "q"), _squares(x, "k"), _with_ones(_squares(x, "v"))
        q = q * one.scale**2
        du = _squares(x, "do")
        row_sum = np.abs(_finite(x["row_sum"])) if one.normalize else np.zeros(du.shape[:-1])
        du = du / np.maximum(1, row_sum)[..., None] ** 2
        dr = (
            np.where(row_sum > 1, (du * _squares(x, "o")).sum(axis=-1), 0) if one.normalize == "signed" else 0 * row_sum
        )
        du = np.concatenate([du, dr[..., None]], axis=-1)
        dstate, dlogs = np.zeros((0, v.shape[-1])), None
        if _stateless(one):
            dq, dk, dv = parallel_backward(q, k, v, du, *_weights(one, x))
        else:
            states = (_joined(x, "initial_state", "initial_norm"), _joined(x, "dstate", "dstate_norm"))
            dq, dk, dv, dstate, dlogs = chunk_backward(q, k, v, du, _decay(one, x), *states)
        each = {"dq": dq * one.scale**2, "dk": dk, "dv": dv[..., :-1]}
        each |= {"dinitial_state": dstate[..., :-1], "dinitial_norm": dstate[..., -1]}
        each["dlog_decay"] = np.zeros(0) if dlogs is None else dlogs * _of_steps(one) ** 2
        largest = {name: max(most, float(np.sqrt(each[name].max(initial=0.0)))) for name, most in largest.items()}
    return largest


def _parts(arrays: Arrays, problem: Problem) -> Iterator[tuple[Problem, dict[str, np.ndarray]]]:
    """Yield whole sequences in float64, each with its call."""
    wide = {name: x.astype(np.float64) if x.dtype.kind != "i" else x for name, x in arrays.items()}
    if "cu_seqlens" not in arrays:
        yield problem, wide
        return
    for _, _, one, inputs in sequences(problem, wide):
        yield one, inputs


def _of_steps(problem: Problem) -> float:
    """Return how much larger the terms of log_decay's gradient count. With 16-bit inputs their factors are rounded to
    16 bits, which is an error of half of that eps: the rule's c * eps, in units of the terms, has to be as large.
    """
    if problem.itemsize > 2:
        return 1.0
    return float(finfo(numpy_dtype(problem.dtype)).eps) / 2 / slack(problem.dtype, problem.spec.floor)


def _stateless(problem: Problem) -> bool:
    return "mask" in problem.arrays or problem.Sq != problem.Sk


def _finite(array: np.ndarray) -> np.ndarray:
    return np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _squares(x: Arrays, name: str) -> np.ndarray:
    return _finite(x[name]) ** 2


def _with_ones(v: np.ndarray) -> np.ndarray:
    return np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)


def _joined(x: Arrays, state: str, norm: str) -> np.ndarray | None:
    """Return the squares of a state and of its norm, 0 for a missing one; None if both are missing."""
    if state not in x and norm not in x:
        return None
    B, H, D, Dv = (*x["q"].shape[:2], x["q"].shape[-1], x["v"].shape[-1])
    joined = np.zeros((B, H, D, Dv + 1))
    for name, columns in ((state, slice(Dv)), (norm, -1)):
        if name in x:
            joined[..., columns] = _squares(x, name)
    return joined


def _decay(problem: Problem, x: Arrays) -> AnyDecay:
    """Return the decay of squares."""
    decay = decay_of(problem, x)
    if isinstance(decay, StepDecay):
        return StepDecay(2 * decay.logs.astype(np.float64))
    return Decay(2 * decay.log2_gamma.astype(np.float64))


def _weights(problem: Problem, x: Arrays) -> tuple[np.ndarray, np.ndarray]:
    if "mask" in x:
        return _squares(x, "mask"), np.ones(x["mask"].shape, bool)
    return _decay(problem, x).between(problem.Sq, problem.Sk)
