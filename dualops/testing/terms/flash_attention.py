"""Terms of attention's results and gradients, for cancellation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...reference._attention import Options, finite, group_sum, options_of, over_group
from ...reference.flash_attention import sum_to
from ...reference.flash_attention_varlen import sequences
from ...spec import Problem

Arrays = Mapping[str, np.ndarray]
EPS = float(np.finfo(np.float32).eps)


def gradient_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """Return for each gradient the largest sum of magnitudes of its terms; NaN and infinity count as 0.

    dS = P * (dP - delta) is the difference of two sums, which are equal for a query with a single key. All gradients
    except dv are sums of dS. So dS counts as P * (|dP| + |delta|), with dP and delta as sums of |do| * |v| and |do| *
    |o|. P = exp(S - lse) is accurate to eps times the terms of S, slope * scale * q * k, whose roundings add in
    squares. If that is more than a few, P may still be exact: it is 1 or 0 in a row whose greatest score exceeds the
    others by more than the roundings.
    """
    largest = {output.name: 0.0 for output in problem.spec.gradients}
    d_sinks: Any = 0.0
    # sums over the sequences that share keys
    by_key = {f"d{name}": np.zeros(arrays[name].shape) for name in ("k", "v")}
    for part, keys, options in _sequences(arrays, problem):
        found, lost = _terms(part, options)
        for name, terms in found.items():
            if keys is not None and name in by_key:
                by_key[name][keys] += terms[0].swapaxes(0, 1)
                terms = by_key[name][keys]
            largest[name] = max(largest[name], float(terms.max(initial=0.0)))
        d_sinks = d_sinks + lost
    return largest | {"dsinks": float(np.max(d_sinks, initial=0.0))}


def result_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """Return the terms of o and lse in float64, whose truth is no more exact than the kernel: P is accurate to eps
    times its score.
    """
    largest = {"o": 0.0, "lse": 0.0}
    if problem.dtype != "float64":
        return largest  # the baseline's error covers it
    for x, _, options in _sequences(arrays, problem):
        at, group = options.everywhere(), options.problem.group
        with np.errstate(all="ignore"):
            products = x["q"] @ over_group(x["k"], group).swapaxes(-1, -2) * problem.scale  # [B, H, Sq, Sk]
            scores = options.scores(products, at)
            row_max = finite(scores.max(axis=-1, keepdims=True, initial=-np.inf))
            probs = np.nan_to_num(np.exp(scores - row_max), posinf=0.0)
            probs = probs / np.maximum(probs.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
            sizes = np.nan_to_num(np.maximum(np.abs(products), np.abs(scores)), posinf=0.0, neginf=0.0)
            size = 1 + np.where(scores == -np.inf, 0, sizes).max(axis=-1, initial=0.0)  # [B, H, Sq]
            values = np.nan_to_num(np.abs(x["v"]), posinf=0.0)
            terms = size[..., None] * ((options.weight(at) * probs) @ over_group(values, group))
        largest["o"] = max(largest["o"], float(terms.max(initial=0.0)))
        largest["lse"] = max(largest["lse"], float(size.max(initial=0.0)))
    return largest


def _sequences(arrays: Arrays, problem: Problem) -> Iterator[tuple[dict[str, np.ndarray], slice | None, Options]]:
    """Yield whole sequences in float64, as [B, H, S, width] and [B, H, S], the place of varlen's keys among all, and
    options.
    """
    wide = {name: array.astype(np.float64) for name, array in arrays.items() if array.dtype.kind not in "bi"}
    if "cu_seqlens_q" not in arrays:
        yield wide, None, options_of(problem, arrays, gradient=True)
        return
    for queries, keys, options in sequences(problem, arrays, gradient=True):
        rows = {"q": queries, "o": queries, "do": queries, "k": keys, "v": keys}
        part = {name: wide[name][taken].swapaxes(0, 1)[None] for name, taken in rows.items() if name in wide}
        part |= {name: wide[name][None, :, queries] for name in ("lse", "dlse") if name in wide}
        yield part, keys, options


def _terms(x: Mapping[str, np.ndarray], options: Options) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the terms of dq, dk, dv and dbias, and of dsinks [H], of whole sequences."""
    problem, at = options.problem, options.everywhere()
    size = {name: np.nan_to_num(np.abs(array), posinf=0.0) for name, array in x.items()}
    with np.errstate(all="ignore"):
        products = x["q"] @ over_group(x["k"], problem.group).swapaxes(-1, -2) * problem.scale  # [B, H, Sq, Sk]
        scores = options.scores(products, at)
        sinks = options.sinks()
        probs = np.nan_to_num(_softmax(scores, sinks))
        slope = abs(problem.scale) * np.nan_to_num(np.abs(options.slope(products, at)), posinf=0.0)
        squares = size["q"] ** 2 @ over_group(size["k"] ** 2, problem.group).swapaxes(-1, -2)  # [B, H, Sq, Sk]
        probs = probs * (1 + _open(scores, sinks, slope * np.sqrt(squares)))
        weight = options.weight(at)
        d_probs = weight * (size["do"] @ over_group(size["v"], problem.group).swapaxes(-1, -2))  # [B, H, Sq, Sk]
        delta = (size["do"] * size["o"]).sum(axis=-1) + size.get("dlse", 0.0)  # [B, H, Sq]
        d_scores = probs * (d_probs + delta[..., None])  # [B, H, Sq, Sk]
        bent_scores = slope * d_scores
        terms = {
            "dq": bent_scores @ over_group(size["k"], problem.group),
            "dk": group_sum(bent_scores.swapaxes(-1, -2) @ size["q"], problem.group),
            "dv": group_sum((weight * probs).swapaxes(-1, -2) @ size["do"], problem.group),
        }
        if "bias" in x:
            terms["dbias"] = sum_to(d_scores, x["bias"].shape)
        lost = 0.0
        if sinks is not None:
            lost = np.nan_to_num(np.exp(sinks - finite(x["lse"])) * delta, posinf=0.0).sum(axis=(0, 2))
    return terms, np.asarray(lost)


def _softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Softmax of the scores alone: a saved lse is a float32, which may be far from the float64 value."""
    row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)  # [B, H, Sq, 1]
    if sinks is not None:
        row_max = np.maximum(row_max, sinks[..., None])
    probs = np.exp(scores - finite(row_max))
    row_sum = probs.sum(axis=-1, keepdims=True)
    if sinks is not None:
        row_sum = row_sum + np.exp(sinks[..., None] - finite(row_max))
    return probs / np.where(row_sum == 0, 1, row_sum)


def _open(scores: np.ndarray, sinks: np.ndarray | None, sizes: np.ndarray) -> np.ndarray:
    """Return `sizes`, the scores' terms; 0 in rows with large terms whose greatest score is far from the others."""
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[..., None], (*scores.shape[:-1], 1))], axis=-1)
    if scores.shape[-1] < 2:
        return sizes
    second, first = np.moveaxis(np.partition(scores, -2, axis=-1)[..., -2:], -1, 0)
    reach = np.nan_to_num(EPS * np.maximum(sizes.max(axis=-1, initial=0.0), np.abs(finite(first))))
    return np.where(((reach > 1 / 16) & (first - second > 16 * (1 + reach)))[..., None], 0, sizes)
