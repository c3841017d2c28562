"""The spec of rope(q, k, cos, sin). Su et al. 2021, arXiv:2104.09864, section 3.4.2.

For a token at position p, pair i of the first R dimensions of every head is rotated by the angle p * f_i:

    x1' = x1 * cos - x2 * sin        (x1, x2) = (x[i], x[i + R/2]), the two halves (Llama, NeoX)
    x2' = x2 * cos + x1 * sin                   (x[2i], x[2i + 1]), interleaved (GPT-J, the paper)

and the dimensions from R on are unchanged. R is all of D unless `dim` is less. The gradient is the rotation by the
opposite angle. cos and sin have R/2 columns and one of two forms. [Smax, R/2] has a row for each position, which all
batches share; [B, S, R/2] (or [1, S, R/2]) has a row for each token. Token (b, s) stands at position s, or, with tables
by position, at positions[b, s] (positions[s]).

Tables of R columns are accepted too: Hugging Face's, with two equal halves, of which the first is read. The kind of a
table follows from its width and R alone, so that no value has to be read. So a rotation of a part of D needs `dim`.
Without `dim`, a table with both halves of D/2 dimensions has the width of a table for all of D. That mistake is
detected for values on the host, but not on a GPU. With interleaved pairs, tables of R columns are refused: they might
as well repeat each column.

rope_tables makes tables of R/2 columns: f_i = base ** (-2i / R), changed by a scaling (`rope_scaling`), in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np

from .base import Cost, Input, Output, Param, Problem, Role, Spec
from .domains import boolean, integer, one_of, optional
from .meta import FLOATS, ArrayMeta, itemsize
from .rope_cases import CASES, CASES_TABLES, generate, generate_positions
from .rope_draws import draw, draw_tables, special
from .rope_scaling import base_and_width, positive, scaling

POSITIONS = ("int64", "int32")
MOST_DIMENSIONS = 2**24  # far more than a head has, and few enough for a table


def measure(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Measure half, R/2, and the rows of the tables."""
    B, S, D = sizes["B"], sizes["S"], sizes["D"]
    R = D if params["dim"] is None else params["dim"]
    cos, sin, positions = arrays["cos"], arrays["sin"], arrays.get("positions")
    first = next(iter(arrays))
    if len(cos.shape) not in (2, 3):
        raise ValueError(
            f"{op}: cos has {len(cos.shape)} axes {cos.shape}, expected [Smax, R/2], or [B, S, R/2] for each batch"
        )
    if R > D:
        raise ValueError(f"{op}: dim is {R}, {first} has D={D}, expected D or less")
    if R % 2:
        raise ValueError(f"{op}: {first} has D={D}, expected an even number, or dim, the dimensions to rotate")
    for name, meta in (("cos", cos), ("sin", sin)):
        if meta.shape != cos.shape:
            raise ValueError(f"{op}: {name} has shape {meta.shape}, cos has shape {cos.shape}, expected the same")
        if meta.dtype != cos.dtype:
            raise TypeError(f"{op}: {name} has dtype {meta.dtype}, cos has dtype {cos.dtype}, expected the same")
    half, rows = R // 2, cos.shape[-2]
    if cos.shape[-1] not in (half, R):
        width = f"{first} has D={D}" if params["dim"] is None else f"dim is R={R}"
        raise ValueError(
            f"{op}: cos has {cos.shape[-1]} columns, {width}, expected R/2={half} or R={R}; for a part of D give dim"
        )
    if cos.shape[-1] != half and params["interleaved"]:
        raise ValueError(f"{op}: cos has R={R} columns, expected R/2={half} for interleaved pairs")
    if len(cos.shape) == 3:
        if cos.shape[0] not in (1, B):
            raise ValueError(f"{op}: cos has B={cos.shape[0]}, {first} has B={B}, expected the same or 1")
        if positions is not None:
            raise ValueError(f"{op}: positions are given and cos has 3 axes {cos.shape}, expected 2: [Smax, R/2]")
        if rows != S:
            raise ValueError(f"{op}: cos has S={rows}, {first} has S={S}, expected the same")
    elif positions is None:
        if rows < S:
            raise ValueError(f"{op}: cos has Smax={rows}, {first} has S={S}, expected Smax to be S or more")
    elif positions.shape not in ((S,), (B, S)):
        raise ValueError(f"{op}: positions have shape {positions.shape}, expected ({S},) or ({B}, {S})")
    return {"half": half, "rows": rows}


def check_values(op: str, arrays: Mapping[str, np.ndarray], problem: Problem) -> None:
    """Check that every position has a row, and that tables of R/2 columns are not both halves of R/2 dimensions."""
    half, cos, sin = problem.half, arrays["cos"], arrays["sin"]
    if cos.shape[-1] == half and half and half % 2 == 0 and sin.any() and all(map(_equal_halves, (cos, sin))):
        raise ValueError(
            f"{op}: cos has {half} columns, whose halves are alike, as of a table for R={half}; "
            f"R is {2 * half}, expected R/2 of its own, or dim={half}"
        )
    positions = arrays.get("positions")
    if positions is None or not positions.size:
        return
    wrong = (positions < 0) | (positions >= problem.rows)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"{op}: positions has {positions[place]} at {place}, cos has Smax={problem.rows}, "
            f"expected 0 to {problem.rows - 1}"
        )


def _equal_halves(table: np.ndarray) -> bool:
    middle = table.shape[-1] // 2
    return np.array_equal(table[..., :middle], table[..., middle:])


def measure_tables(
    op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Any]:
    shape = arrays["positions"].shape
    if len(shape) not in (1, 2):
        raise ValueError(f"{op}: positions has {len(shape)} axes {shape}, expected 1 or 2: [S] or [B, S]")
    theta, R = base_and_width(op, params["dim"], params["base"], params["scaling"])
    return {"tokens": prod(shape), "half": R // 2, "theta": theta}


def dimension(value: Any, least: int = 2) -> int:
    """Domain of the number of rotary dimensions."""
    if not least <= (number := integer(value)) <= MOST_DIMENSIONS or number % 2:
        raise ValueError(f"expected an even number, {least} to {MOST_DIMENSIONS}")
    return number


def _rotated_bytes(problem: Problem) -> int:
    """Count the bytes of q and k, or of their gradients, in one direction; in place, only of the rotated dimensions."""
    p = problem
    return p.B * p.S * (p.H + p.Hkv) * (2 * p.half if p.inplace else p.D) * p.itemsize


def _tables_bytes(problem: Problem) -> int:
    """Count the bytes of the rows of cos and sin that tokens may need, and of the positions."""
    cos, positions = problem.arrays["cos"], problem.arrays.get("positions")
    needed = problem.S if positions is None else positions.size
    rows = min(needed, problem.rows) * (cos.shape[0] if len(cos.shape) == 3 else 1)
    positions_bytes = 0 if positions is None else positions.size * itemsize(positions.dtype)
    return 2 * rows * problem.half * itemsize(cos.dtype) + positions_bytes


COST = Cost(
    flops=lambda p: 6 * p.B * p.S * (p.H + p.Hkv) * p.half,
    bytes_read=lambda p: _rotated_bytes(p) + _tables_bytes(p),
    bytes_written=_rotated_bytes,
)


def _heads(name: str, heads: str) -> Input:
    return Input(name, ("B", heads, "S", "D"), contiguous_last=True)


def _like(name: str, like: str) -> Output:
    return Output(name, lambda p: p.arrays[like].shape, lambda p: p.dtype, like=like, contiguous_last=True)


TABLES = (
    Input("cos", None, role=Role.WEIGHT, contiguous_last=True),
    Input("sin", None, role=Role.WEIGHT, contiguous_last=True),
    Input("positions", None, POSITIONS, optional=True, role=Role.OTHER),
)

SPEC = Spec(
    name="rope",
    formula="x1' = x1 * cos - x2 * sin;  x2' = x2 * cos + x1 * sin, of each pair of q and of k",
    paper="Su et al. 2021, arXiv:2104.09864, equation 34",
    inputs=(_heads("q", "H"), _heads("k", "Hkv"), *TABLES),
    params=(
        Param("dim", None, optional(partial(dimension, least=0)), "rotary dimensions R; None is D"),
        Param("interleaved", False, boolean, "pairs are neighbours, not the two halves of the rotary dimensions"),
        Param("inplace", False, boolean, "write over the inputs"),
    ),
    outputs=(_like("q_rotated", "q"), _like("k_rotated", "k")),
    gradient_inputs=(_heads("dq_rotated", "H"), _heads("dk_rotated", "Hkv"), *TABLES),
    gradients=(_like("dq", "dq_rotated"), _like("dk", "dk_rotated")),
    saved=("cos", "sin", "positions"),
    measure=measure,
    forward_cost=COST,
    backward_cost=COST,
    rounding="the results once, to the storage dtype; all else in float32 (float64 for float64)",
    floor=8.0,
    rungs=("naive", "simt"),
    cases=CASES,
    generate=generate,
    values=check_values,
    draw=draw,
    special=special,
    special_gradients=(np.nan, np.inf, 0.0),  # with infinity: cos and sin are inputs, and none is 0 only in float32
    # no terms and no gradient_terms: a pair keeps its length, so one of the two is as large as what cancels
)


def _table(name: str) -> Output:
    return Output(name, lambda p: (*p.arrays["positions"].shape, p.half), lambda p: p.dtype, like="positions")


SPEC_TABLES = Spec(
    name="rope_tables",
    formula="cos, sin of positions * base ** (-2i / R), i from 0 to R / 2 - 1, each multiplied by yarn's factor",
    paper="Su et al. 2021, arXiv:2104.09864, equation 15; scalings: see dualops/spec/rope_scaling.py",
    inputs=(Input("positions", None, POSITIONS, role=Role.OTHER),),
    params=(
        Param("dim", None, dimension, "rotary dimensions R, or with a partial_rotary_factor D"),
        Param("base", None, optional(positive), "base of the frequencies; None: scaling's rope_theta, or 10000"),
        Param("scaling", None, scaling, "change of the frequencies: None, linear, llama3, yarn, dynamic"),
        Param("dtype", "float32", one_of(*FLOATS), "of the tables"),
    ),
    outputs=(_table("cos"), _table("sin")),
    gradient_inputs=(),
    gradients=(),
    saved=(),
    measure=measure_tables,
    forward_cost=Cost(
        flops=lambda p: 40 * p.tokens * p.half,
        bytes_read=lambda p: p.tokens * itemsize(p.arrays["positions"].dtype),
        bytes_written=lambda p: 2 * p.tokens * p.half * p.itemsize,
    ),
    backward_cost=None,
    rounding="cos and sin once, to their dtype; frequencies, angles and all else in float64",
    floor=1.0,
    rungs=("simt",),
    cases=CASES_TABLES,
    generate=generate_positions,
    parent="rope",
    draw=draw_tables,
)
