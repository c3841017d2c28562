"""What retention brings to fuzzer and checker: its domain, its special values, and what its results add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from dualops.reference.retention import decay_of, retain
from dualops.reference.retention_forms import (
    AnyDecay,
    Decay,
    StepDecay,
    chunk,
    chunk_backward,
    parallel,
    parallel_backward,
)
from dualops.reference.retention_varlen import sequences
from dualops.spec import Case, Problem
from tests.sizes import random_size

Shapes = dict[str, tuple[int, ...]]
Arrays = Mapping[str, np.ndarray]

LONGEST = 300  # tokens


# --- domain --------------------------------------------------------------------------------------


def plain_problem(rng: np.random.Generator, max_elements: int) -> tuple[Shapes, dict[str, Any]]:
    """Shapes and parameters of retention: any form with all that goes with it."""
    form = str(rng.choice(["chunk", "chunk", "recurrent", "parallel"]))
    D, Dv = _widths(rng, max_elements)
    Sq = Sk = random_size(rng, min(max_elements // max(D, Dv), LONGEST))
    free = form == "parallel" and rng.random() < 0.5  # of states
    if free:
        Sk = random_size(rng, min(max_elements // max(D, Dv), LONGEST))
    if form == "parallel" and Sq * Sk > max_elements:
        Sq = Sk = int(max_elements**0.5)
    heads = _heads(max_elements, max(D, Dv) * max(Sq, Sk), D * Dv, Sq * Sk if form == "parallel" else 0)
    H = 1 + int(rng.integers(min(heads, 5)))
    B = random_size(rng, min(heads // H, 3))
    shapes: Shapes = {"q": (B, H, Sq, D), "k": (B, H, Sk, D), "v": (B, H, Sk, Dv)}
    params: dict[str, Any] = {"form": form, "normalize": [None, "signed", "abs" if free else "signed"][rng.integers(3)]}
    if free and rng.random() < 0.4:
        shapes["mask"] = (H, Sq, Sk)
    options, more = _options(rng, (B, H, D, Dv), states=not free, normalize=params["normalize"])
    if "mask" in shapes:
        options.pop("gamma", None)
    return shapes | options, params | more


def varlen_problem(rng: np.random.Generator, max_elements: int) -> tuple[Shapes, dict[str, Any]]:
    """The same of retention_varlen; the generator then draws how long each sequence is, some of them empty."""
    B = int(rng.integers(0, 7))
    D, Dv = _widths(rng, max_elements // max(B, 1))
    total = random_size(rng, min(max_elements // max(D, Dv), 2 * LONGEST)) if B else 0
    H = 1 + int(rng.integers(min(_heads(max_elements, max(D, Dv) * total, B * D * Dv), 4)))
    shapes: Shapes = {"q": (total, H, D), "k": (total, H, D), "v": (total, H, Dv), "cu_seqlens": (B + 1,)}
    least = -(-total // max(B, 1))
    longest = (least, int(rng.integers(least, total + 1)), total + 3)[rng.integers(3)]
    params: dict[str, Any] = {"max_seqlen": longest, "normalize": [None, "signed"][rng.integers(2)]}
    options, more = _options(rng, (B, H, D, Dv), states=True, normalize=params["normalize"])
    return shapes | options, params | more


def with_steps(case: Case) -> Case:
    """The same with log_decay in place of gamma; as it is where it can't have that.

    Kernels take no log_decay yet, so that neither cases nor fuzzer have it: what the reference is held to is made here.
    """
    q, k = case.shapes["q"], case.shapes["k"]
    if "mask" in case.shapes or q[-2] != k[-2]:
        return case
    shapes: Shapes = {name: shape for name, shape in case.shapes.items() if name != "gamma"}
    return replace(case, name=f"{case.name}_steps", shapes=shapes | {"log_decay": q[:-1]})


def scores_of(case: Case) -> int:
    """Scores that the parallel form of the case makes."""
    q, k = case.shapes["q"], case.shapes["k"]
    return prod(q[:3]) * k[2] if case.params.get("form") == "parallel" else 0


def _widths(rng: np.random.Generator, max_elements: int) -> tuple[int, int]:
    """D and Dv, wider than 64 in one draw of ten alone, and small enough for a state."""
    most, wide = int(max_elements**0.5), rng.random() < 0.1
    D = max(random_size(rng, min(most, 256 if wide else 64)), 1)
    return D, D if rng.random() < 0.4 else max(random_size(rng, min(max_elements // D, 512 if wide else 64)), 1)


def _heads(max_elements: int, *each: int) -> int:
    """How many heads all batches together may have, of arrays that have so many elements for each."""
    return max(min(max_elements // max(elements, 1) for elements in each), 1)


def _options(
    rng: np.random.Generator, state: tuple[int, ...], *, states: bool, normalize: str | None
) -> tuple[Shapes, dict[str, Any]]:
    """gamma, scale and, where there are any, states of that shape."""
    B, H, D, Dv = state
    shapes: Shapes = {}
    params: dict[str, Any] = {"return_row_sum": bool(rng.integers(2))}
    if rng.random() < 0.5:
        shapes["gamma"] = (H,)
    if rng.random() < 0.4:
        params["scale"] = float(rng.choice([0.0, 1.0, -0.25, rng.normal()]))
    if states:
        params["return_state"] = bool(rng.integers(2))
        if rng.random() < 0.5:
            shapes["initial_state"] = (B, H, D, Dv)
            if normalize == "signed":
                shapes["initial_norm"] = (B, H, D)
    return shapes, params


# --- values --------------------------------------------------------------------------------------


def special_limits(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """The largest special value of an input, and whether it may be infinite: what float32 and float64 have alike.

    Gradients multiply four inputs, which must not overflow in half precision. No infinity: a power of gamma that is
    tiny in float64 and 0 in float32 makes of it an infinity here and a NaN there. No decay out of its domain.
    """
    return None if name in ("gamma", "log_decay", "cu_seqlens") else (4.0, False)


# --- what results add up -------------------------------------------------------------------------

# A result is a sum of products, some of which cancel. Their roundings are independent, so that they add in squares: a
# form is run below on the squares of its inputs, which gives the sum of the squares of all products.


def result_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """Of each result the largest root of the sum of squares of what it adds up; what is no number counts as 0.

    o = u / n where n may be a sum too: it is known to eps of what that adds up, and o to o / n times as much.
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
    """The same of each gradient; do . o is a sum as well."""
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
        each["dlog_decay"] = np.zeros(0) if dlogs is None else dlogs
        largest = {name: max(most, float(np.sqrt(each[name].max(initial=0.0)))) for name, most in largest.items()}
    return largest


def _parts(arrays: Arrays, problem: Problem) -> Iterator[tuple[Problem, dict[str, np.ndarray]]]:
    """Whole sequences in float64, each with the call that it is."""
    wide = {name: x.astype(np.float64) if x.dtype.kind != "i" else x for name, x in arrays.items()}
    if "cu_seqlens" not in arrays:
        yield problem, wide
        return
    for _, _, one, inputs in sequences(problem, wide):
        yield one, inputs


def _stateless(problem: Problem) -> bool:
    return "mask" in problem.arrays or problem.Sq != problem.Sk


def _finite(array: np.ndarray) -> np.ndarray:
    return np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _squares(x: Arrays, name: str) -> np.ndarray:
    return _finite(x[name]) ** 2


def _with_ones(v: np.ndarray) -> np.ndarray:
    return np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)


def _joined(x: Arrays, state: str, norm: str) -> np.ndarray | None:
    """The squares of a state, and of its norm, 0 where one is not there; None if neither is."""
    if state not in x and norm not in x:
        return None
    B, H, D, Dv = (*x["q"].shape[:2], x["q"].shape[-1], x["v"].shape[-1])
    joined = np.zeros((B, H, D, Dv + 1))
    for name, columns in ((state, slice(Dv)), (norm, -1)):
        if name in x:
            joined[..., columns] = _squares(x, name)
    return joined


def _decay(problem: Problem, x: Arrays) -> AnyDecay:
    """That of squares."""
    decay = decay_of(problem, x)
    if isinstance(decay, StepDecay):
        return StepDecay(2 * decay.logs.astype(np.float64))
    return Decay(2 * decay.log2_gamma.astype(np.float64))


def _weights(problem: Problem, x: Arrays) -> tuple[np.ndarray, np.ndarray]:
    if "mask" in x:
        return _squares(x, "mask"), np.ones(x["mask"].shape, bool)
    return _decay(problem, x).between(problem.Sq, problem.Sk)
