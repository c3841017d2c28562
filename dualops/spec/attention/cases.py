"""The cases that attention is tested, timed, simulated and compiled on, and their generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..base import Case, Role, Spec, Tag, standard_normal
from ..lengths import random_ends, random_ranges
from ..meta import FLOATS, itemsize
from . import OPTIONS, OPTIONS_VARLEN
from .blocks import TILE, made_of, tiles_of

Shapes = dict[str, tuple[int, ...]]
Row = dict[str, Any]


def bent(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A score_mod that depends on all its arguments, and not linearly on the score."""
    return score - 0.05 * score * score + 0.01 * (i - j) * (1 + h) - 0.1 * b


def woven(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A mask_mod whose edges match no other mask's."""
    return (i + 2 * j + 3 * h + b) % 4 != 0


def tanh_softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """softcap=30, written as a score_mod."""
    return 30.0 * math.tanh(score / 30.0)


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A mask_mod: consecutive documents of 1000 tokens, which do not see one another."""
    return i // 1000 == j // 1000


def sliding(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A mask_mod: a causal window of 200 keys, with other lengths in other heads and batches."""
    return (j <= i) & (i - j < 200 + 64 * h - 32 * b)


def in_patches(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A mask_mod of whole tiles of a block mask: visible, hidden and cut. One row of tiles is all hidden, one all
    visible. All batches are alike.
    """
    m, n = i // TILE, j // TILE
    patches = ((5 * m + 3 * n + h) % 3 != 0) & (((m + n) % 4 != 1) | ((i + j) % 3 != 0))
    return (m != 1) & ((m == 2) | patches)


def _column(rows: str, *values: Any) -> tuple[Any, ...]:
    """Return an option's value in each row, from the numbers of its values: 0 and 1 by default."""
    return tuple((values or (0, 1))[int(row)] for row in rows)


# Every two values of any two options occur together in some row.
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
# the value of a 1 if it is not an array
GIVEN = {"score_mod": bent, "mask_mod": woven, "dropout_p": 0.3}
AXES = {entry.name: entry.axes for option in OPTIONS for entry in option.inputs if entry.axes is not None}


def paired(row: Row, q: tuple[int, ...], kv: tuple[int, int], Dv: int) -> tuple[Shapes, dict[str, Any]]:
    """Return shapes and parameters of a row of PAIRS. q: its shape; kv: Hkv and Sk."""
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


def _add_compared(add: Callable[..., None]) -> None:
    """Add the cases that compare attention with peers: short and long sequences, narrow and wide heads, grouped ones,
    options.
    """
    both: Row = {"dtypes": ("bfloat16",), "tags": {Tag.COMPARE}}
    bf16: Row = {**both, "backward": False}
    for suffix, causal in (("", False), ("causal", True)):
        for S, B in ((512, 32), (2048, 8), (8192, 2), (16384, 1)):
            add(f"s{S}b{B}d128{suffix}", (B, 16, S, 128), (16, S), causal=causal, **(both if S > 512 else bf16))
        for S, B in ((2048, 8), (8192, 2)):
            add(f"s{S}b{B}d64{suffix}", (B, 32, S, 64), (32, S), causal=causal, **both)
        for S, B in ((4096, 2), (16384, 1)):
            add(f"s{S}b{B}d256{suffix}", (B, 8, S, 256), (8, S), causal=causal, **both)
        add(f"s8192d192{suffix}", (2, 16, 8192, 192), (16, 8192), Dv=128, causal=causal, **both)
        add(f"s8192fp16{suffix}", (2, 16, 8192, 128), (16, 8192), causal=causal, **bf16 | {"dtypes": ("float16",)})
    for S in (4096, 8192):
        add(f"s{S}gqa8causal", (2, 64, S, 128), (8, S), causal=True, **both)
    add("s16384window", (1, 16, 16384, 128), (16, 16384), causal=True, window=(1023, 0), **both)
    add("s4096b32h8causal", (32, 8, 4096, 128), (8, 4096), causal=True, **both)  # to compare with `varlen_b32`
    add("sq1sk16384gqa8", (8, 64, 1, 128), (8, 16384), **bf16)
    plain: Row = {"q": (4, 16, 4096, 128), "kv": (16, 4096), **both}
    add("s4096", **plain)
    add("s4096causal", **plain, causal=True)
    add("s4096softcap", **plain, softcap=30.0)
    add("s4096alibi", **plain, arrays={"alibi_slopes": (16,)})
    add("s4096sinks", **plain, causal=True, window=(1023, 0), arrays={"sinks": (16,)})
    add("s4096dropout", **plain, dropout_p=0.1, arrays={"seed": ()})
    add("s4096bias", **plain, arrays={"bias": (4, 1, 4096, 4096)})
    add("s4096score_mod", **plain, score_mod=tanh_softcap)
    add("s4096documents", **plain, mask_mod=documents)
    add("s4096blocks", **plain, mask_mod=documents, arrays={"block_mask": lists_shape(1, 1, 4096, 4096)})


def lists_shape(B: int, H: int, Sq: int, Sk: int) -> tuple[int, ...]:
    """Return the shape of a block mask for this many queries and keys."""
    return B, H, tiles_of(Sq), 1 + tiles_of(Sk)


def _add_block_masks(add: Callable[..., None]) -> None:
    """Add block masks: hidden, visible and cut tiles, ragged ends, one mask for all heads or one each, few queries."""
    edge: Row = {"dtypes": ("bfloat16", "float32"), "tags": {Tag.TEST, Tag.EDGE}, "return_lse": True}
    for name, q, kv, own, params in (
        ("blocks_documents", (2, 4, 2100, 64), (2, 2100), (1, 1), {"mask_mod": documents, "causal": True}),
        ("blocks_sliding", (2, 4, 400, 128), (2, 700), (2, 4), {"mask_mod": sliding}),
        ("blocks_patches", (2, 4, 650, 40), (1, 900), (1, 4), {"mask_mod": in_patches, "window": (300, None)}),
        ("blocks_patches_d192", (1, 2, 300, 192), (1, 520), (1, 2), {"mask_mod": in_patches}),
        ("blocks_few_queries", (2, 4, 40, 64), (2, 900), (2, 1), {"mask_mod": woven}),
    ):
        arrays = {"block_mask": lists_shape(*own, q[2], kv[1])}
        add(name, q, kv, Dv=min(q[3], 128), arrays=arrays, **params, **edge)
    arrays = {"block_mask": lists_shape(1, 2, 5, 13)}
    add("sim_blocks", (1, 2, 5, 8), (1, 13), ("float32", "bfloat16"), {Tag.SIM}, arrays=arrays, mask_mod=woven)


def _add_wide(add: Callable[..., None]) -> None:
    """Add wide heads of 16 bits, many queries and few, with the most demanding options."""
    both: Row = {"dtypes": ("bfloat16", "float16"), "tags": {Tag.TEST}}
    add("plain_d256", (1, 2, 150, 256), (1, 200), **both, return_lse=True)
    add("causal_d256", (2, 2, 257, 256), (1, 270), **both, causal=True, return_lse=True)
    add("d64v256", (1, 2, 140, 64), (2, 190), **both, Dv=256, causal=True, window=(90, 0), return_lse=True)
    add("d192v184", (1, 2, 140, 192), (1, 190), **both, Dv=184, softcap=1.5, return_lse=True)
    for Dv, Sq, Sk in ((256, 140, 150), (512, 140, 150), (256, 3, 700), (512, 3, 1100)):
        backward = Dv == 256 and Sq > 3
        wide: Row = {"q": (2, 2, Sq, 256), "kv": (1, Sk), "Dv": Dv, "return_lse": True, "backward": backward, **both}
        name = f"d256v{Dv}q{Sq}"
        add(name, **wide, causal=True, arrays={"sinks": (2,)})
        add(f"{name}alibi", **wide, arrays={"alibi_slopes": (2,)})
        add(f"{name}bias", **wide, arrays={"bias": (2, Sq, Sk)})
        add(f"{name}dropout", **wide, dropout_p=0.3, arrays={"seed": ()})


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
        arrays: Shapes | None = None,
        **params: Any,
    ) -> None:
        B, _, _, D = q
        Hkv, Sk = kv
        shapes = {"q": q, "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv or D), **(arrays or {})}
        cases.extend(Case(name, dtype, shapes, params, frozenset(tags), backward) for dtype in dtypes)

    test, edge, sim = {Tag.TEST}, {Tag.TEST, Tag.EDGE}, {Tag.SIM}
    add("s4096d64", (4, 16, 4096, 64), (16, 4096), ("float32",), {Tag.BENCH}, return_lse=True)
    add("s2048d128", (2, 16, 2048, 128), (16, 2048), ("float32", "bfloat16"), {Tag.BENCH, Tag.DEMO}, return_lse=True)
    add("s2048d128causal", (2, 16, 2048, 128), (16, 2048), ("bfloat16",), {Tag.BENCH}, causal=True, return_lse=True)
    _add_compared(add)
    for D in (16, 64, 128):
        add(f"plain_d{D}", (2, 3, 200, D), (3, 200), FLOATS, test, return_lse=True)
        add(f"causal_d{D}", (2, 4, 257, D), (2, 257), FLOATS, test, causal=True, return_lse=True)
    add("window_d64", (1, 2, 300, 64), (1, 333), FLOATS, test, causal=True, window=(70, 0), return_lse=True)
    add("gqa_cross", (2, 6, 70, 64), (2, 190), FLOATS, edge, causal=True, return_lse=True)
    add("mqa_top_left", (1, 4, 130, 40), (1, 65), FLOATS, edge, causal="top_left", return_lse=True)
    add("masked_rows", (1, 2, 90, 32), (2, 33), FLOATS, edge, causal=True, return_lse=True)
    add("values_wider", (1, 2, 65, 48), (1, 67), FLOATS, edge, Dv=80, scale=0.3)
    add("wide_heads", (1, 1, 40, 256), (1, 50), FLOATS, test, Dv=512)
    _add_wide(add)
    add("widest", (1, 2, 35, 512), (1, 33), FLOATS, test, causal=True)
    add("odd", (1, 1, 33, 33), (1, 35), FLOATS, edge, Dv=7, causal=True)
    add("one_query", (2, 4, 1, 64), (1, 300), FLOATS, edge, causal=True)
    add("few_queries", (2, 6, 3, 64), (2, 1100), FLOATS, edge, causal=True, return_lse=True)
    add("one_query_gqa8", (2, 16, 1, 128), (2, 1100), ("bfloat16",), test, backward=False)
    add("no_queries", (1, 2, 0, 16), (2, 8), FLOATS, {Tag.TEST, Tag.EDGE, Tag.SIM}, return_lse=True)
    add("no_keys", (1, 2, 8, 16), (2, 0), FLOATS, {Tag.TEST, Tag.EDGE, Tag.SIM}, return_lse=True)
    add("sim_gqa_causal", (1, 2, 17, 8), (1, 21), FLOATS, sim, causal=True, return_lse=True)
    add("sim_top_left", (1, 1, 18, 12), (1, 17), ("float32", "bfloat16"), sim, Dv=20, causal="top_left")
    add("sim_plain", (2, 1, 5, 8), (1, 20), ("float64", "float16"), sim, scale=1.0)
    add("sim_bias", (1, 2, 5, 8), (1, 20), ("bfloat16",), sim, causal=True, return_lse=True, arrays={"bias": (5, 20)})
    _add_block_masks(add)
    for number, row in enumerate(PAIRS):
        shapes, params = paired(row, (2, 4, 45, 24), (2, 53), 40)
        others = ("bfloat16", "float16", "float64")
        dtypes = ("float32", others[number % 3])  # each pair of options is a kernel to build, in each dtype
        cases += [Case(f"options_{number}", dtype, shapes, params, frozenset(edge)) for dtype in dtypes]
        B = 2 if number % 5 == 1 else 1
        shapes, params = paired(row, (B, 2, 5, 8), (1, 13 + 6 * (number % 3 == 0)), 4)
        cases.append(Case(f"sim_options_{number}", "float32", shapes, params, frozenset(sim)))
    # pairs of tile, dtype, width and options for the offline compiler
    build = {Tag.COMPILE}
    add("d64v128", (1, 2, 256, 64), (1, 256), ("float32",), build, Dv=128, causal=True, return_lse=True)
    add("d256", (1, 2, 256, 256), (1, 256), ("bfloat16",), build, causal=True, return_lse=True)
    add("d128", (1, 2, 256, 128), (1, 256), ("bfloat16",), build, causal=True, return_lse=True)
    # the gradient in one kernel
    add("d128groups", (2, 4, 300, 128), (2, 330), ("bfloat16",), {Tag.TEST, Tag.EDGE}, causal=True, return_lse=True)
    band: Row = {"causal": True, "window": (150, None), "return_lse": True}
    add("d128window", (2, 4, 300, 128), (2, 330), ("bfloat16",), edge, **band)
    add("d64long", (1, 2, 450, 64), (2, 470), ("bfloat16",), {Tag.TEST, Tag.EDGE}, causal=True, return_lse=True)
    add("d64groups", (2, 4, 390, 64), (2, 300), ("float16",), {Tag.TEST}, causal=True, return_lse=True)
    one: Row = {"q": (2, 4, 300, 128), "dtypes": ("bfloat16",), "tags": test, "return_lse": True}
    add("one_kernel_softcap", kv=(2, 330), **one, softcap=1.5)
    add("one_kernel_alibi", kv=(2, 330), **one, arrays={"alibi_slopes": (4,)})
    biased: Row = {**one, "tags": test | build, "arrays": {"bias": (2, 1, 300, 336)}}
    add("one_kernel_bias", kv=(2, 336), **biased)
    add("one_kernel_dropout", kv=(2, 330), **one, dropout_p=0.3, arrays={"seed": ()})
    add("one_kernel_documents", kv=(2, 330), **one, mask_mod=documents)
    add("d96v72", (1, 2, 260, 96), (2, 200), ("float16",), {Tag.TEST, Tag.EDGE}, Dv=72, return_lse=True)
    add("own_score", (1, 2, 260, 128), (1, 300), ("bfloat16",), {Tag.TEST}, score_mod=tanh_softcap, return_lse=True)
    add(
        "own_score_d64",
        (1, 2, 400, 64),
        (2, 390),
        ("float16",),
        {Tag.TEST},
        score_mod=bent,
        causal=True,
        return_lse=True,
    )
    add("own_mask", (1, 2, 260, 128), (1, 300), ("float16",), {Tag.TEST}, mask_mod=woven, return_lse=True)
    add("d512", (1, 2, 256, 512), (1, 256), ("float64",), build, causal=True)
    add("d64short", (1, 16, 16, 64), (2, 1024), ("float16",), build, causal=True, backward=False)
    shapes, params = paired(EVERYTHING, (1, 2, 256, 64), (1, 256), 64)
    cases.append(Case("everything", "float32", shapes, params, frozenset(build)))
    shapes, params = paired(EVERYTHING, (1, 8, 1024, 64), (2, 1024), 64)
    cases.append(Case("everything_s1024d64", "float32", shapes, params, frozenset({Tag.DEMO})))
    return tuple(cases)


def _varlen_cases() -> tuple[Case, ...]:
    cases = []

    def add(
        name: str,
        B: int,
        q: tuple[int, int],
        k: tuple[int, int],
        D: int,
        tags: set[Tag],
        *,
        ranges: bool = False,
        **params: Any,
    ) -> None:
        """q, k: tokens and heads. ranges: keys are ranges, which overlap."""
        shapes: Shapes = {"q": (*q, D), "k": (*k, D), "v": (*k, D), "cu_seqlens_q": (B + 1,)}
        shapes |= {"k_starts": (B,), "k_lengths": (B,)} if ranges else {"cu_seqlens_k": (B + 1,)}
        longest = {f"max_seqlen_{side}": -(-2 * tokens // max(B, 1)) for side, (tokens, _) in (("q", q), ("k", k))}
        params = {**longest, "return_lse": True, **params}
        for option in OPTIONS_VARLEN:
            for entry in option.inputs:
                if entry.axes is not None and params.pop(entry.name, False):
                    shapes[entry.name] = tuple({"H": q[1]}[axis] for axis in entry.axes)
        half = ("bfloat16",)
        both = ("float32", "bfloat16")
        dtypes = {Tag.COMPILE: both, Tag.BENCH: half, Tag.COMPARE: half, Tag.SIM: both}
        chosen = next((dtypes[tag] for tag in dtypes if tag in tags and Tag.TEST not in tags), FLOATS)
        cases.extend(Case(name, dtype, shapes, params, frozenset(tags)) for dtype in chosen)

    test, edge = {Tag.TEST}, {Tag.TEST, Tag.EDGE}
    add("varlen_s2048d128", 4, (8192, 16), (8192, 16), 128, {Tag.BENCH, Tag.DEMO}, causal=True)
    add("varlen_b32", 32, (131072, 8), (131072, 8), 128, {Tag.COMPARE}, causal=True)
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
    # longer than the cases whose gradient takes two kernels, heads of 128 and 64
    add("varlen_longer", 5, (700, 4), (800, 2), 128, test, causal=True, sinks=True)
    add("varlen_longer_d64", 3, (700, 2), (650, 2), 64, test)
    add("varlen_longer_d64_causal", 3, (650, 2), (700, 1), 64, test, causal=True)
    add("varlen_d256", 4, (300, 2), (310, 1), 256, test, causal=True, sinks=True)
    add("varlen_few_queries", 4, (11, 8), (3000, 2), 128, test, causal=True, window=(900, 0), sinks=True)
    # sequences with few queries and with more; keys of one split and of several
    add("varlen_few_and_many", 6, (330, 8), (3300, 2), 128, edge, causal=True, sinks=True)
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
    # tokens after the last sequence belong to none: the sequences are shorter than all tokens
    add("varlen_ends_early", 5, (90, 4), (120, 2), 24, edge, causal=True, sinks=True, max_seqlen_q=9, max_seqlen_k=13)
    add("varlen_ends_early_d128", 3, (300, 4), (330, 2), 128, test, causal=True, max_seqlen_q=70, max_seqlen_k=80)
    add("varlen_all_tokens_left", 0, (7, 2), (9, 2), 16, edge, max_seqlen_q=4, max_seqlen_k=4)
    add("sim_varlen_left", 0, (7, 2), (9, 2), 16, {Tag.SIM}, max_seqlen_q=4, max_seqlen_k=4)
    add("sim_varlen_early", 3, (22, 2), (41, 1), 8, {Tag.SIM}, causal=True, sinks=True, max_seqlen_q=5, max_seqlen_k=7)
    # keys as ranges whose lengths add up to more than the number of keys
    add("ranges", 4, (200, 4), (210, 2), 64, test, ranges=True)
    add("ranges_causal", 5, (300, 4), (330, 2), 128, edge, ranges=True, causal=True, window=(90, 0), sinks=True)
    add(
        "ranges_options",
        6,
        (90, 4),
        (120, 2),
        24,
        edge,
        ranges=True,
        max_seqlen_k=70,
        total_k_lengths=300,
        causal="top_left",
        softcap=1.5,
        alibi_slopes=True,
        score_mod=bent,
        mask_mod=woven,
        seed=True,
        dropout_p=0.3,
    )
    # ranges that few and many queries share, in kernels of the whole gradient and of its parts
    add("ranges_longer", 5, (700, 4), (800, 2), 128, test, ranges=True, causal=True, max_seqlen_k=600)
    add("ranges_longer_d64", 4, (700, 2), (650, 1), 64, test, ranges=True, softcap=1.5, max_seqlen_k=500)
    add("ranges_few_queries", 4, (11, 8), (3000, 2), 128, test, ranges=True, causal=True, max_seqlen_k=2600)
    add("ranges_no_sequences", 0, (3, 2), (9, 2), 16, {Tag.TEST, Tag.EDGE, Tag.SIM}, ranges=True)
    add("sim_ranges", 4, (14, 2), (21, 1), 8, {Tag.SIM}, ranges=True, causal=True, window=(9, 0), sinks=True)
    add("varlen_d64", 4, (512, 2), (512, 1), 64, {Tag.COMPILE}, causal=True)
    add("varlen_d64_longer", 2, (512, 2), (512, 1), 64, {Tag.COMPILE}, causal=True)
    add("ranges_d64", 4, (512, 2), (512, 1), 64, {Tag.COMPILE}, ranges=True, causal=True)
    return tuple(cases)


def generate(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal values; ALiBi's own slopes, two keys of three kept, sequences of all lengths, including 0."""
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
        elif name == "block_mask":
            Sq, Sk = case.shapes["q"][2], case.shapes["k"][2]
            made[name] = made_of(case.params["mask_mod"], shape[0], shape[1], Sq, Sk)
        elif name == "k_starts":
            most = case.params.get("total_k_lengths")
            sizes = case.shapes["k"][0], shape[0], case.params["max_seqlen_k"]
            made |= random_ranges(*sizes, shape[0] * case.shapes["k"][0] if most is None else most, rng)
        elif name.startswith("cu_seqlens"):
            side = name[-1]
            made[name] = random_ends(case.shapes[side][0], shape[0] - 1, case.params[f"max_seqlen_{side}"], rng)
    return {name: made[name] for name in case.shapes}


CASES = _cases()
CASES_VARLEN = _varlen_cases()
