"""Random problems of rope and rope_tables, and the special values that tests put into them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Case
from .draws import Drawn, random_size
from .meta import HUGE
from .rope_cases import shapes_of

SCALINGS = (
    None,
    ("linear", 4.0),
    ("linear", 0.5),
    ("llama3", 8.0, 1.0, 4.0, 8192.0),
    ("llama3", 32.0, 0.5, 3.0, 64.0),
    ("yarn", 40.0, 4096),
    ("yarn", 4.0, 64, 8.0, 0.5, 1.3, False),
    ("dynamic", 2.0, 2048, 8000),
)


def draw(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw a problem of rope: any width and share of it, every form of tables and positions; up to four spare rows."""
    D = random_size(rng, min(max_elements, 300))
    half = D // 2 if rng.random() < 0.5 else int(rng.integers(D // 2 + 1))
    interleaved = bool(rng.integers(2))
    columns = half if interleaved or rng.random() < 0.6 else 2 * half
    rows = max(max_elements // max(D, 1), 1)  # of D elements, over heads and tokens together
    S = random_size(rng, rows)
    H = random_size(rng, min(rows // max(S, 1), 20))
    Hkv = random_size(rng, min(rows // max(S, 1), 20))
    B = random_size(rng, min(rows // max(S * max(H, Hkv), 1), 3))
    form = rng.choice(["rows", "more rows", "batches", "one batch", "positions", "own positions"])
    options: dict[str, Any] = {}
    if form == "more rows":
        options["rows"] = S + int(rng.integers(5))
    elif form in ("batches", "one batch"):
        options["batches"] = 1 if form == "one batch" else B
    elif form != "rows":
        options |= {"rows": int(rng.integers(1, rows + 1)), "positions": 1 if form == "positions" else 2}
    # without batches, tables are by position
    options = {name: size for name, size in options.items() if size or name != "batches"}
    params = {"interleaved": interleaved} | ({} if 2 * half == D and rng.random() < 0.5 else {"dim": 2 * half})
    return shapes_of((B, H, S, D), Hkv, columns, **options), params


def draw_tables(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw a problem of rope_tables. Its dtype is the problem's, and the caller knows it."""
    half = max(random_size(rng, min(max_elements, 64)), 1)
    S = random_size(rng, max_elements // half)
    own = rng.random() < 0.5
    B = random_size(rng, min(max_elements // max(S * half, 1), 3))
    params = {"dim": 2 * half, "base": float(rng.choice([1.5, 100.0, 10000.0, 500000.0, 1e6]))}
    scaling = SCALINGS[rng.integers(len(SCALINGS))]
    if scaling and scaling[0] == "dynamic" and half == 1:
        scaling = None  # the exponent of its base is R / (R - 2)
    return {"positions": (B, S) if own else (S,)}, params | {"scaling": scaling}


def special(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """Special values: q and k may be as large as a sum of two allows; cos and sin are at most 1, or not finite."""
    return (1.0 if name in ("cos", "sin") else HUGE[case.dtype]), True
