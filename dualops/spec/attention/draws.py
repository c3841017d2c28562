"""Random problems of attention, and the special values that tests put into them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..base import Case
from ..draws import Drawn, Shapes, random_size
from ..meta import HUGE
from . import OPTIONS_VARLEN
from .cases import COLUMNS, bent, lists_shape, woven

LONGEST = 300  # queries, and keys


def leaning(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A score_mod whose derivative is 1."""
    return score + 0.02 * (i - j) * (1 + h) - 0.1 * b


def cubed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 0.01 * score * score * score + 0.5 * score


def cubed_slope(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 0.03 * score * score + 0.5


def striped(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Hides whole tiles, and leaves others."""
    return (i // 16 + j // 16 + b) % 2 == 0


def nothing(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j < 0


SCORE_MODS = (bent, leaning, (cubed, cubed_slope))
MASK_MODS = (woven, striped, nothing)
PER_HEAD = [entry.name for option in OPTIONS_VARLEN for entry in option.inputs if entry.axes == ("H",)]
# parameters that take their values from the cases
DRAWN = ("causal", "window", "softcap", "score_mod", "mask_mod", "dropout_p")
OTHERS = [param.name for option in OPTIONS_VARLEN for param in option.params if param.name not in DRAWN]


def draw(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw a problem of flash_attention: any options together; none in a quarter of the draws."""
    D, Dv, rows = _widths(rng, max_elements)
    Sq, Sk = (random_size(rng, min(rows, LONGEST)) for _ in range(2))
    if Sq * Sk > max_elements:
        Sq = max_elements // Sk
    H, Hkv, heads = _heads(rng, min(rows // max(Sq, Sk, 1), max_elements // max(Sq * Sk, 1)))
    B = random_size(rng, min(heads // H, 3))
    shapes: Shapes = {"q": (B, H, Sq, D), "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv)}
    share = _share(rng)
    if rng.random() < share:
        shapes["bias"] = _broadcasting((B, H, Sq, Sk), rng)
    if rng.random() < share:
        shapes["key_padding_mask"] = (B, Sk)
    options, params = _options(rng, share, H)
    if "mask_mod" in params and rng.random() < 0.7:
        own_B, own_H = (size if rng.random() < 0.5 else 1 for size in (B, H))
        options["block_mask"] = lists_shape(own_B, own_H, Sq, Sk)
    return shapes | options, params


def draw_varlen(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw a problem of flash_attention_varlen. Its generator draws the lengths of the sequences (some empty), how many
    tokens belong to none, and the ranges of keys.
    """
    D, Dv, rows = _widths(rng, max_elements)
    B = int(rng.integers(0, 7))
    total_q, total_k = (random_size(rng, min(rows, 2 * LONGEST)) if B else 0 for _ in range(2))
    if total_q * total_k > max_elements:
        total_q = max_elements // total_k
    H, Hkv, _ = _heads(rng, min(rows // max(total_q, total_k, 1), max_elements // max(total_q * total_k, 1)))
    shapes: Shapes = {"q": (total_q, H, D), "k": (total_k, Hkv, D), "v": (total_k, Hkv, Dv)}
    shapes["cu_seqlens_q"] = (B + 1,)
    ranges = rng.random() < 0.5
    shapes |= {"k_starts": (B,), "k_lengths": (B,)} if ranges else {"cu_seqlens_k": (B + 1,)}
    options, params = _options(rng, _share(rng), H)
    for side, total in (("q", total_q), ("k", total_k)):
        least = -(-total // max(B, 1))
        # with the first one, sequences end before the last token
        lengths = (least // 2, least, int(rng.integers(least, total + 1)), total + 3)
        params[f"max_seqlen_{side}"] = lengths[rng.integers(4)]
    if ranges and rng.random() < 0.5:
        params["total_k_lengths"] = int(rng.integers(0, 2 * total_k + 1))
    return shapes | options, params


def _widths(rng: np.random.Generator, max_elements: int) -> tuple[int, int, int]:
    """Draw D, Dv and the number of rows that remain; both are wider than 128 only in one draw of ten."""
    limit = min(512 if rng.random() < 0.1 else 128, max_elements)
    D = max(random_size(rng, limit), 1)
    Dv = D if rng.random() < 0.4 else max(random_size(rng, limit), 1)
    return D, Dv, max(max_elements // max(D, Dv), 1)


def _heads(rng: np.random.Generator, most: int) -> tuple[int, int, int]:
    """Draw H and Hkv; also return the most heads that all batches may have together."""
    heads = max(most, 1)
    Hkv = 1 + int(rng.integers(min(heads, 4)))
    group = 1 + int(rng.integers(min(heads // Hkv, 4)))
    return Hkv * group, Hkv, heads


def _share(rng: np.random.Generator) -> float:
    """Draw the probability of each option."""
    return float(rng.choice([0.0, 0.2, 0.2, 0.6]))


def _broadcasting(full: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
    """Draw a shape that broadcasts to `full`: axes of size 1, and some leading axes missing."""
    first = int(rng.integers(len(full) + 1)) if rng.random() < 0.3 else 0
    shape = tuple(size if axis >= first and rng.random() < 0.6 else 1 for axis, size in enumerate(full))
    leading = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    return shape[int(rng.integers(leading + 1)) :]


def _options(rng: np.random.Generator, share: float, H: int) -> Drawn:
    """Draw the options of both forms."""
    shapes: Shapes = {}
    params: dict[str, Any] = {"causal": [False, True, "top_left"][rng.integers(3)], "return_lse": bool(rng.integers(2))}
    if rng.random() < 0.4:
        params["scale"] = float(rng.choice([0.0, 1.0, -0.25, rng.normal()]))
    if rng.random() < share:
        params["window"] = tuple(_side(rng) for _ in range(2))
    if rng.random() < share:
        params["softcap"] = float(np.exp(rng.uniform(-1, 3)))
    if rng.random() < share:
        params["score_mod"] = SCORE_MODS[rng.integers(len(SCORE_MODS))]
    if rng.random() < share:
        params["mask_mod"] = MASK_MODS[rng.choice(len(MASK_MODS), p=[0.45, 0.45, 0.1])]
    for name in PER_HEAD:
        if rng.random() < share:
            shapes[name] = (H,)
    if rng.random() < share:
        shapes["seed"] = ()
        params["dropout_p"] = float(rng.choice([0.0, 0.1, 0.5, 0.9, 0.999]))
    for name in OTHERS:
        if rng.random() < share:
            params[name] = COLUMNS[name][rng.integers(len(COLUMNS[name]))]
    return shapes, params


def _side(rng: np.random.Generator) -> int | None:
    """Draw one side of a window: unbounded, none, few keys, many, more than all."""
    return [None, 0, int(rng.integers(1, 9)), int(rng.integers(9, LONGEST)), 10**6][rng.integers(5)]


def special(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """Return the special values with the same effect in float32 and float64.

    q, k, bias, sinks, slopes: no score so large that its own rounding decides the row. v: no sum over the keys that
    overflows, also under dropout; in a gradient no sum that overflows in half precision; and no infinity: times a
    probability that is tiny in float64 and 0 in float32, it would give inf in one and NaN in the other. In half
    precision no value of v decides a sum: the error would be the rounding of one probability.
    """
    if name == "v" and not backward and case.dtype in ("float32", "float64"):
        keys = prod(case.shapes["k"][:-1])
        return HUGE[case.dtype] * (1 - case.params.get("dropout_p", 0.0)) / (keys + 1), False
    return {"q": (4.0, True), "k": (4.0, True), "v": (4.0, False), "bias": (4.0, True), "sinks": (4.0, True)}.get(
        name, (1.0, True) if name == "alibi_slopes" else None
    )
