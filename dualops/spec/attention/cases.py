"""The problems that attention is tested, timed, simulated and compiled on, and what fills them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base import Case, Role, Spec, Tag, standard_normal
from ..lengths import random_ends
from ..meta import FLOATS, itemsize
from . import OPTIONS, OPTIONS_VARLEN

Shapes = dict[str, tuple[int, ...]]
Row = dict[str, Any]


def bent(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A score_mod that depends on all that it is given, and not linearly on the score."""
    return score - 0.05 * score * score + 0.01 * (i - j) * (1 + h) - 0.1 * b


def woven(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A mask_mod that follows no other mask's edges."""
    return (i + 2 * j + 3 * h + b) % 4 != 0


def _column(rows: str, *values: Any) -> tuple[Any, ...]:
    """What an option is in each row: the number of one of its values, which are 0 and 1 unless they are said."""
    return tuple((values or (0, 1))[int(row)] for row in rows)


# Every two values of any two options meet in some row.
COLUMNS: dict[str, tuple[Any, ...]] = {
    "causal": _column("210101220120012", False, True, "top_left"),
    "window": _column("012210010122012", None, (9, None), (6, 4)),
    "softcap": _column("010101101001101", None, 1.5),
    "bias": _column("210344031212304", None, "full", "heads", "keys", "queries"),
    "alibi_slopes": _column("011010100100100"),
    "sinks": _column("011001101101100"),
    "key_padding_mask": _column("010110110011010"),
    "score_mod": _column("011001110101101"),
    "mask_mod": _column("010110101001111"),
    "dropout_p": _column("100110100011111"),
}
PAIRS: tuple[Row, ...] = tuple(dict(zip(COLUMNS, row)) for row in zip(*COLUMNS.values(), strict=True))
EVERYTHING: Row = {name: next(filter(None, column)) for name, column in COLUMNS.items()}
EVERYTHING |= {"causal": True, "window": (99, None)}
# what a 1 stands for, where it is no array
GIVEN = {"score_mod": bent, "mask_mod": woven, "dropout_p": 0.3}
AXES = {entry.name: entry.axes for option in OPTIONS for entry in option.inputs if entry.axes is not None}


def paired(row: Row, q: tuple[int, ...], kv: tuple[int, int], Dv: int) -> tuple[Shapes, dict[str, Any]]:
    """Shapes and parameters of a row of PAIRS. q: its shape; kv: Hkv and Sk."""
    (B, H, Sq, D), (Hkv, Sk) = q, kv
    sizes = {"B": B, "H": H, "Sk": Sk}
    shapes: Shapes = {"q": q, "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv)}
    over = {"full": (B, H, Sq, Sk), "heads": (1, H, Sq, Sk), "keys": (B, 1, 1, Sk), "queries": (Sq, 1)}
    params: dict[str, Any] = {"return_lse": True}
    for name, value in row.items():
        if not value:
            continue
        if name == "bias":
            shapes[name] = over[value]
        elif name in AXES:
            shapes[name] = tuple(sizes[axis] for axis in AXES[name])
        else:
            params[name] = GIVEN.get(name, value)
        if name == "dropout_p":
            shapes["seed"] = ()
    return shapes, params


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
        backward: bool = True,
        **params: Any,
    ) -> None:
        B, _, _, D = q
        Hkv, Sk = kv
        shapes = {"q": q, "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv or D)}
        cases.extend(Case(name, dtype, shapes, params, frozenset(tags), backward) for dtype in dtypes)

    test, edge, sim = {Tag.TEST}, {Tag.TEST, Tag.EDGE}, {Tag.SIM}
    add("s4096d64", (4, 16, 4096, 64), (16, 4096), ("float32",), {Tag.BENCH}, return_lse=True)
    add("s2048d128", (2, 16, 2048, 128), (16, 2048), ("float32", "bfloat16"), {Tag.BENCH, Tag.DEMO}, return_lse=True)
    add("s2048d128causal", (2, 16, 2048, 128), (16, 2048), ("bfloat16",), {Tag.BENCH}, causal=True, return_lse=True)
    for D in (16, 64, 128):
        add(f"plain_d{D}", (2, 3, 200, D), (3, 200), FLOATS, test, return_lse=True)
        add(f"causal_d{D}", (2, 4, 257, D), (2, 257), FLOATS, test, causal=True, return_lse=True)
    add("window_d64", (1, 2, 300, 64), (1, 333), FLOATS, test, causal=True, window=(70, 0), return_lse=True)
    add("gqa_cross", (2, 6, 70, 64), (2, 190), FLOATS, edge, causal=True, return_lse=True)
    add("mqa_top_left", (1, 4, 130, 40), (1, 65), FLOATS, edge, causal="top_left", return_lse=True)
    add("masked_rows", (1, 2, 90, 32), (2, 33), FLOATS, edge, causal=True, return_lse=True)
    add("values_wider", (1, 2, 65, 48), (1, 67), FLOATS, edge, Dv=80, scale=0.3)
    add("wide_heads", (1, 1, 40, 256), (1, 50), FLOATS, test, Dv=512)
    add("widest", (1, 2, 35, 512), (1, 33), FLOATS, test, causal=True)
    add("odd", (1, 1, 33, 33), (1, 35), FLOATS, edge, Dv=7, causal=True)
    add("one_query", (2, 4, 1, 64), (1, 300), FLOATS, edge, causal=True)
    add("no_queries", (1, 2, 0, 16), (2, 8), FLOATS, {Tag.TEST, Tag.EDGE, Tag.SIM}, return_lse=True)
    add("no_keys", (1, 2, 8, 16), (2, 0), FLOATS, {Tag.TEST, Tag.EDGE, Tag.SIM}, return_lse=True)
    add("sim_gqa_causal", (1, 2, 17, 8), (1, 21), FLOATS, sim, causal=True, return_lse=True)
    add("sim_top_left", (1, 1, 18, 12), (1, 17), ("float32", "bfloat16"), sim, Dv=20, causal="top_left")
    add("sim_plain", (2, 1, 5, 8), (1, 20), ("float64", "float16"), sim, scale=1.0)
    for number, row in enumerate(PAIRS):
        shapes, params = paired(row, (2, 4, 45, 24), (2, 53), 40)
        others = ("bfloat16", "float16", "float64")
        dtypes = ("float32", others[number % 3])  # each pair of options is a kernel to build, in each dtype
        cases += [Case(f"options_{number}", dtype, shapes, params, frozenset(edge)) for dtype in dtypes]
        B = 2 if number % 5 == 1 else 1
        shapes, params = paired(row, (B, 2, 5, 8), (1, 13 + 6 * (number % 3 == 0)), 4)
        cases.append(Case(f"sim_options_{number}", "float32", shapes, params, frozenset(sim)))
    # the pairs of tile, dtype, width and options for the offline compiler
    build = {Tag.COMPILE}
    add("d64", (1, 2, 256, 64), (1, 256), ("float32", "bfloat16"), build, causal=True, return_lse=True)
    add("d128", (1, 2, 256, 128), (1, 256), ("float32",), build, causal=True, return_lse=True)
    add("d512", (1, 2, 256, 512), (1, 256), ("float64",), build, causal=True)
    add("d64short", (1, 2, 16, 64), (1, 256), ("float16",), build, causal=True)
    shapes, params = paired(EVERYTHING, (1, 2, 256, 64), (1, 256), 64)
    cases.append(Case("everything", "float32", shapes, params, frozenset(build)))
    shapes, params = paired(EVERYTHING, (1, 8, 1024, 64), (2, 1024), 64)
    cases.append(Case("everything_s1024d64", "float32", shapes, params, frozenset({Tag.DEMO})))
    return tuple(cases)


def _varlen_cases() -> tuple[Case, ...]:
    cases = []

    def add(name: str, B: int, q: tuple[int, int], k: tuple[int, int], D: int, tags: set[Tag], **params: Any) -> None:
        """q, k: tokens and heads."""
        shapes: Shapes = {"q": (*q, D), "k": (*k, D), "v": (*k, D), "cu_seqlens_q": (B + 1,), "cu_seqlens_k": (B + 1,)}
        longest = {f"max_seqlen_{side}": -(-2 * tokens // max(B, 1)) for side, (tokens, _) in (("q", q), ("k", k))}
        params = {**longest, "return_lse": True, **params}
        for option in OPTIONS_VARLEN:
            for entry in option.inputs:
                if entry.axes is not None and params.pop(entry.name, False):
                    shapes[entry.name] = tuple({"H": q[1]}[axis] for axis in entry.axes)
        dtypes = {Tag.COMPILE: ("float32",), Tag.BENCH: ("bfloat16",), Tag.SIM: ("float32", "bfloat16")}
        chosen = next((dtypes[tag] for tag in dtypes if tag in tags and Tag.TEST not in tags), FLOATS)
        cases.extend(Case(name, dtype, shapes, params, frozenset(tags)) for dtype in chosen)

    test, edge = {Tag.TEST}, {Tag.TEST, Tag.EDGE}
    add("varlen_s2048d128", 4, (8192, 16), (8192, 16), 128, {Tag.BENCH, Tag.DEMO}, causal=True)
    add("varlen_plain", 3, (200, 4), (210, 2), 64, test)
    add("varlen_causal", 4, (300, 2), (300, 1), 128, test, causal=True)
    add(
        "varlen_options",
        5,
        (90, 4),
        (120, 2),
        24,
        edge,
        causal=True,
        window=(9, 0),
        softcap=1.5,
        sinks=True,
        seed=True,
        dropout_p=0.3,
    )
    add(
        "varlen_mods",
        5,
        (90, 4),
        (70, 2),
        24,
        edge,
        causal="top_left",
        alibi_slopes=True,
        score_mod=bent,
        mask_mod=woven,
    )
    add("varlen_no_tokens", 2, (0, 2), (9, 1), 16, {Tag.TEST, Tag.EDGE, Tag.SIM})
    add("varlen_no_sequences", 0, (0, 2), (0, 2), 16, {Tag.TEST, Tag.EDGE, Tag.SIM}, max_seqlen_q=4, max_seqlen_k=4)
    add(
        "sim_varlen",
        3,
        (12, 2),
        (21, 1),
        8,
        {Tag.SIM},
        causal=True,
        window=(9, 0),
        sinks=True,
        alibi_slopes=True,
        seed=True,
        dropout_p=0.3,
    )
    add("varlen_d64", 4, (512, 2), (512, 1), 64, {Tag.COMPILE}, causal=True)
    return tuple(cases)


def generate(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal values; ALiBi's own slopes, two keys of three kept, sequences of all lengths, 0 among them."""
    inputs = {entry.name: entry for entry in spec.inputs}
    drawn = [name for name in case.shapes if inputs[name].role is not Role.OTHER and name != "alibi_slopes"]
    made = standard_normal(spec, Case(case.name, case.dtype, {name: case.shapes[name] for name in drawn}), rng)
    for name, shape in case.shapes.items():
        if name == "alibi_slopes":
            (H,) = shape
            wide = np.float64 if itemsize(case.dtype) == 8 else np.float32
            made[name] = (2.0 ** (-8.0 * np.arange(1, H + 1) / H)).astype(wide)
        elif name == "key_padding_mask":
            made[name] = rng.random(shape) < 2 / 3
        elif name == "seed":
            made[name] = np.array(rng.integers(-(2**63), 2**63), np.int64)
        elif name.startswith("cu_seqlens"):
            side = name[-1]
            made[name] = random_ends(case.shapes[side][0], shape[0] - 1, case.params[f"max_seqlen_{side}"], rng)
    return {name: made[name] for name in case.shapes}


CASES = _cases()
CASES_VARLEN = _varlen_cases()
