"""Random problems of retention, and the special values that tests put into them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Case
from .draws import Drawn, Shapes, random_size
from .meta import itemsize

LONGEST = 300  # tokens


def draw(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw a problem of retention: any form with all its options."""
    form = str(rng.choice(["chunk", "chunk", "recurrent", "parallel"]))
    D, Dv = _widths(rng, max_elements)
    Sq = Sk = random_size(rng, min(max_elements // max(D, Dv), LONGEST))
    free = form == "parallel" and rng.random() < 0.5  # without states
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
    steps = (B, H, Sk) if Sq == Sk else None
    options, more = _options(rng, (B, H, D, Dv), steps, states=not free, normalize=params["normalize"])
    if "mask" in shapes:
        options = {name: shape for name, shape in options.items() if name not in ("gamma", "log_decay")}
    return shapes | options, params | more


def draw_varlen(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw a problem of retention_varlen. Its generator draws the lengths of the sequences (some empty) and how many
    tokens belong to none.
    """
    B = int(rng.integers(0, 7))
    D, Dv = _widths(rng, max_elements // max(B, 1))
    total = random_size(rng, min(max_elements // max(D, Dv), 2 * LONGEST)) if B else 0
    H = 1 + int(rng.integers(min(_heads(max_elements, max(D, Dv) * total, B * D * Dv), 4)))
    shapes: Shapes = {"q": (total, H, D), "k": (total, H, D), "v": (total, H, Dv), "cu_seqlens": (B + 1,)}
    least = -(-total // max(B, 1))
    # with the first one, sequences end before the last token
    longest = (least // 2, least, int(rng.integers(least, total + 1)), total + 3)[rng.integers(4)]
    params: dict[str, Any] = {"max_seqlen": longest, "normalize": [None, "signed"][rng.integers(2)]}
    options, more = _options(rng, (B, H, D, Dv), (total, H), states=True, normalize=params["normalize"])
    return shapes | options, params | more


def _widths(rng: np.random.Generator, max_elements: int) -> tuple[int, int]:
    """Draw D and Dv, small enough for a state; wider than 64 only in one draw of ten."""
    most, wide = int(max_elements**0.5), rng.random() < 0.1
    D = max(random_size(rng, min(most, 256 if wide else 64)), 1)
    return D, D if rng.random() < 0.4 else max(random_size(rng, min(max_elements // D, 512 if wide else 64)), 1)


def _heads(max_elements: int, *each: int) -> int:
    """Return the most heads that all batches may have together, for arrays of this many elements per head."""
    return max(min(max_elements // max(elements, 1) for elements in each), 1)


def _options(
    rng: np.random.Generator,
    state: tuple[int, ...],
    steps: tuple[int, ...] | None,
    *,
    states: bool,
    normalize: str | None,
) -> Drawn:
    """Draw gamma or, if allowed, log_decay of the shape `steps`; scale; and, if there are any, states of that shape."""
    B, H, D, Dv = state
    shapes: Shapes = {}
    params: dict[str, Any] = {"return_row_sum": bool(rng.integers(2))}
    decay = rng.random()
    if decay < 0.4:
        shapes["gamma"] = (H,)
    elif decay < 0.7 and steps is not None:
        shapes["log_decay"] = steps
    if rng.random() < 0.4:
        params["scale"] = float(rng.choice([0.0, 1.0, -0.25, rng.normal()]))
    if states:
        params["return_state"] = bool(rng.integers(2))
        if rng.random() < 0.5:
            shapes["initial_state"] = (B, H, D, Dv)
            if normalize == "signed":
                shapes["initial_norm"] = (B, H, D)
    return shapes, params


def special(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """Return the special values with the same effect in float32 and float64.

    Gradients multiply four inputs, which must not overflow in half precision. No infinity: times a power of gamma that
    is tiny in float64 and 0 in float32, it would give inf in one and NaN in the other. No decay outside its domain.
    Nothing where log_decay's gradient has 16-bit factors: a NaN may then reach any step of its sequence.
    """
    if backward and "log_decay" in case.shapes and itemsize(case.dtype) == 2:
        return None
    return None if name in ("gamma", "log_decay") else (4.0, False)
