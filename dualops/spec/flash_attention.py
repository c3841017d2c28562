"""flash_attention(q, k, v): what it is. Dao et al. 2022 (arXiv:2205.14135), Dao 2023 (arXiv:2307.08691).

Query i of Sq stands at position i + Sk - Sq among the keys (`causal=True`), or at position i (`causal="top_left"`,
torch's way). A row that sees no key gives o = 0 and lse = -inf; a NaN in a key or value that no query sees stays there.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from .base import (
    ArrayMeta,
    Case,
    Cost,
    Input,
    Output,
    Param,
    Problem,
    Spec,
    Tag,
    boolean,
    compute_dtype,
    finite,
    itemsize,
    optional,
    standard_normal,
)

MAX_HEAD_DIM = 512


def measure(arrays: dict[str, ArrayMeta], params: dict[str, Any]) -> dict[str, Any]:
    _, H, _, D = arrays["q"].shape
    Hkv, Dv = arrays["k"].shape[1], arrays["v"].shape[3]
    if Hkv == 0 or H % Hkv:
        raise ValueError(f"flash_attention: q has H={H}, k has Hkv={Hkv}, expected H to be a multiple of Hkv")
    for name, axis, size in (("q", "D", D), ("v", "Dv", Dv)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"flash_attention: {name} has {axis}={size}, expected 1 to {MAX_HEAD_DIM}")
    if params["scale"] is None:
        params["scale"] = 1.0 / sqrt(D)
    return {"group": H // Hkv}


def visible_pairs(problem: Problem) -> int:
    """Pairs (query, key) that the mask lets through, in one head."""
    Sq, Sk = problem.Sq, problem.Sk
    if not problem.causal:
        return Sq * Sk
    offset = 0 if problem.causal == "top_left" else Sk - Sq
    # rows i with 0 < i + offset + 1 < Sk see i + offset + 1 keys, later ones all Sk
    first, full = min(max(-offset, 0), Sq), min(max(Sk - offset - 1, 0), Sq)
    ramp = full - first if full > first else 0
    return ramp * (first + full + 1 + 2 * offset) // 2 + (Sq - full) * Sk


def _read(problem: Problem) -> int:
    p = problem
    return p.itemsize * p.B * (p.H * p.Sq * p.D + p.Hkv * p.Sk * (p.D + p.Dv))


def _written(problem: Problem) -> int:
    p = problem
    return p.B * p.H * p.Sq * (p.itemsize * p.Dv + (itemsize(compute_dtype(p.dtype)) if p.return_lse else 0))


def causal_mode(value: Any) -> bool | str:
    if isinstance(value, str) and value == "top_left":
        return "top_left"
    try:
        return boolean(value)
    except TypeError:
        raise ValueError("expected False, True or 'top_left'") from None


def _cases() -> tuple[Case, ...]:
    cases = []

    def add(
        name: str,
        q: tuple[int, int, int, int],
        kv: tuple[int, int],
        dtypes: tuple[str, ...],
        tags: set[Tag],
        *,
        Dv: int | None = None,
        **params: Any,
    ) -> None:
        B, _, _, D = q
        Hkv, Sk = kv
        shapes = {"q": q, "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv or D)}
        cases.extend(Case(name, dtype, shapes, params, frozenset(tags), backward=False) for dtype in dtypes)

    every = ("float64", "float32", "float16", "bfloat16")
    add("s4096d64", (4, 16, 4096, 64), (16, 4096), ("float32",), {Tag.BENCH})
    add("s2048d128", (2, 16, 2048, 128), (16, 2048), ("float32", "bfloat16"), {Tag.BENCH, Tag.DEMO})
    add("s2048d128causal", (2, 16, 2048, 128), (16, 2048), ("bfloat16",), {Tag.BENCH}, causal=True)
    for D in (16, 64, 128):
        add(f"plain_d{D}", (2, 3, 200, D), (3, 200), every, {Tag.TEST}, return_lse=True)
        add(f"causal_d{D}", (2, 4, 257, D), (2, 257), every, {Tag.TEST}, causal=True, return_lse=True)
    add("gqa_cross", (2, 6, 70, 64), (2, 190), every, {Tag.TEST, Tag.EDGE}, causal=True, return_lse=True)
    add("mqa_top_left", (1, 4, 130, 40), (1, 65), every, {Tag.TEST, Tag.EDGE}, causal="top_left", return_lse=True)
    add("masked_rows", (1, 2, 90, 32), (2, 33), every, {Tag.TEST, Tag.EDGE}, causal=True, return_lse=True)
    add("values_wider", (1, 2, 65, 48), (1, 67), every, {Tag.TEST, Tag.EDGE}, Dv=80, scale=0.3)
    add("wide_heads", (1, 1, 40, 256), (1, 50), every, {Tag.TEST}, Dv=512)
    add("odd", (1, 1, 33, 33), (1, 35), every, {Tag.TEST, Tag.EDGE}, Dv=7, causal=True)
    add("one_query", (2, 4, 1, 64), (1, 300), every, {Tag.TEST, Tag.EDGE}, causal=True)
    add("no_queries", (1, 2, 0, 16), (2, 8), every, {Tag.TEST, Tag.EDGE, Tag.SIM}, return_lse=True)
    add("no_keys", (1, 2, 8, 16), (2, 0), every, {Tag.TEST, Tag.EDGE, Tag.SIM}, return_lse=True)
    add("sim_gqa_causal", (1, 2, 19, 16), (1, 37), every, {Tag.SIM}, causal=True, return_lse=True)
    add("sim_top_left", (1, 1, 35, 12), (1, 20), every, {Tag.SIM}, Dv=20, causal="top_left")
    add("sim_plain", (2, 1, 17, 8), (1, 40), every, {Tag.SIM}, scale=1.0)
    # the pairs of tile, dtype, width and mask for the offline compiler
    add("d64", (1, 2, 256, 64), (1, 256), every, {Tag.COMPILE}, causal=True, return_lse=True)
    add("d64full", (1, 2, 256, 64), (1, 256), ("float32",), {Tag.COMPILE})
    add("d40", (1, 2, 256, 40), (1, 256), ("bfloat16",), {Tag.COMPILE}, Dv=72, causal="top_left")
    add("d128", (1, 2, 256, 128), (1, 256), ("float32", "bfloat16"), {Tag.COMPILE}, causal=True)
    add("d256", (1, 2, 256, 256), (1, 256), ("float16", "float64"), {Tag.COMPILE}, return_lse=True)
    add("d512", (1, 2, 256, 512), (1, 256), ("float32", "float64"), {Tag.COMPILE}, causal=True)
    add("d64short", (1, 2, 16, 64), (1, 256), ("float32", "bfloat16"), {Tag.COMPILE}, causal=True)
    add("d64middle", (1, 2, 32, 64), (1, 256), ("bfloat16",), {Tag.COMPILE}, return_lse=True)
    return tuple(cases)


SPEC = Spec(
    name="flash_attention",
    formula="o = softmax(scale * q @ k.T + mask) @ v;  lse = log(sum(exp(scale * q @ k.T + mask)))",
    paper="Dao 2023, arXiv:2307.08691, Algorithm 1",
    inputs=(
        Input("q", ("B", "H", "Sq", "D"), contiguous_last=True),
        Input("k", ("B", "Hkv", "Sk", "D"), contiguous_last=True),
        Input("v", ("B", "Hkv", "Sk", "Dv"), contiguous_last=True),
    ),
    params=(
        Param("causal", False, causal_mode, "False, True (aligned at the last key) or 'top_left'"),
        Param("scale", None, optional(finite), "factor of q @ k.T; None is 1 / sqrt(D)"),
        Param("return_lse", False, boolean, "also return the log of the sum of exponentials"),
    ),
    outputs=(
        Output("o", lambda p: (p.B, p.H, p.Sq, p.Dv), lambda p: p.dtype, like="q", contiguous_last=True),
        Output(
            "lse", lambda p: (p.B, p.H, p.Sq), lambda p: compute_dtype(p.dtype), like="q", when=lambda p: p.return_lse
        ),
    ),
    gradient_inputs=(),
    gradients=(),
    saved=(),
    measure=measure,
    forward_cost=Cost(
        flops=lambda p: 2 * p.B * p.H * visible_pairs(p) * (p.D + p.Dv),
        bytes_read=_read,
        bytes_written=_written,
    ),
    backward_cost=None,
    rounding="the probabilities before they meet v, and o, to the storage dtype; all else in float32",
    floor=16.0,
    rungs=("simt",),
    cases=_cases(),
    generate=standard_normal,
)
