"""Attention with all of its options in plain Python floats, a score at a time: what the references are compared with.

Written from the operator's description alone. It shares nothing with the records in `dualops/spec/attention`.
"""

from collections.abc import Mapping
from math import exp, inf, log, sqrt, tanh
from typing import Any

import numpy as np

from tests.philox import weight


def row_id(row: Mapping[str, Any]) -> str:
    """Of a row of options, for pytest."""
    return str(tuple(row.values()))


def attention(arrays: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """o and lse of a call of flash_attention in float64."""
    q, v = arrays["q"].tolist(), arrays["v"].tolist()
    (B, H, Sq, _), Dv = arrays["q"].shape, arrays["v"].shape[3]
    group, sinks = H // arrays["k"].shape[1], arrays.get("sinks")
    o, lse = np.zeros((B, H, Sq, Dv)), np.full((B, H, Sq), -inf)
    for b, h, i in np.ndindex(B, H, Sq):
        scores = scores_of(arrays, params, q[b][h][i], b, h, i)
        logits = [*scores.values(), *([] if sinks is None else [float(sinks[h])])]
        if not logits:
            continue
        top = max(logits)
        lse[b, h, i] = top + log(sum(exp(logit - top) for logit in logits))
        for j, score in scores.items():
            prob = exp(score - lse[b, h, i])
            if params.get("dropout_p", 0.0):
                prob *= weight(int(arrays["seed"]), params["dropout_p"], b * H + h, i, j)
            for d in range(Dv):
                o[b, h, i, d] += prob * v[b][h // group][j][d]
    return o, lse


def scores_of(
    arrays: Mapping[str, Any], params: Mapping[str, Any], query: list[float], b: int, h: int, i: int
) -> dict[int, float]:
    """The scores of one query, by the keys that it sees."""
    k = arrays["k"]
    H, Hkv, Sq, Sk, D = arrays["q"].shape[1], k.shape[1], arrays["q"].shape[2], k.shape[2], len(query)
    position = i if params.get("causal") == "top_left" else i + Sk - Sq
    scale, softcap, score_mod = (params.get(name) for name in ("scale", "softcap", "score_mod"))
    scores = {}
    for j in range(Sk):
        if not sees(arrays, params, b, h, i, j, position):
            continue
        key = k[b, h // (H // Hkv), j].tolist()
        score = sum(x * y for x, y in zip(query, key, strict=True)) * (1 / sqrt(D) if scale is None else scale)
        if softcap is not None:
            score = softcap * tanh(score / softcap)
        if score_mod is not None:
            score = float((score_mod[0] if isinstance(score_mod, tuple) else score_mod)(score, b, h, i, j))
        if "bias" in arrays:
            bias = arrays["bias"]
            place = (b, h, i, j)[4 - bias.ndim :]
            score += float(bias[tuple(0 if size == 1 else at for at, size in zip(place, bias.shape, strict=True))])
        if "alibi_slopes" in arrays:
            score -= float(arrays["alibi_slopes"][h]) * abs(position - j)
        scores[j] = score
    return scores


def sees(arrays: Mapping[str, Any], params: Mapping[str, Any], b: int, h: int, i: int, j: int, position: int) -> bool:
    """Whether all masks let query i see key j."""
    left, right = params.get("window") or (None, None)
    mask_mod = params.get("mask_mod")
    return (
        not (params.get("causal", False) and j > position)
        and not (left is not None and j < position - left)
        and not (right is not None and j > position + right)
        and not ("key_padding_mask" in arrays and not arrays["key_padding_mask"][b, j])
        and not (mask_mod is not None and not mask_mod(b, h, i, j))
    )
