"""The cases that retention is tested, timed, simulated and compiled on, and their generator."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Case, Spec, Tag, standard_normal
from .lengths import random_ends
from .meta import FLOATS, compute_dtype, numpy_dtype

Shapes = dict[str, tuple[int, ...]]
TOKENS_FIRST = dict.fromkeys("qkv", (0, 2, 1, 3))  # [B, S, H, D] in memory, as projections reshaped to heads

# Every two values of any two options occur together in some row: form, normalize, the decay (1: gamma, 2: log_decay),
# states in, states out, D and Dv
PAIRS = (
    ("chunk", None, 0, 0, 0, (24, 40)),
    ("chunk", "signed", 1, 1, 1, (33, 7)),
    ("chunk", None, 1, 1, 0, (16, 16)),
    ("chunk", "signed", 0, 0, 1, (16, 16)),
    ("recurrent", None, 0, 1, 1, (33, 7)),
    ("recurrent", "signed", 1, 0, 0, (24, 40)),
    ("recurrent", "signed", 0, 1, 0, (16, 16)),
    ("parallel", "signed", 0, 1, 1, (24, 40)),
    ("parallel", None, 1, 0, 1, (16, 16)),
    ("parallel", "signed", 0, 1, 0, (33, 7)),
    ("parallel", "abs", 1, 0, 0, (33, 7)),
    ("parallel", "abs", 0, 0, 0, (16, 16)),
    ("parallel", "abs", 0, 0, 0, (24, 40)),
    ("parallel", None, 1, 0, 0, (24, 40)),
    ("chunk", "signed", 2, 1, 1, (24, 40)),
    ("recurrent", None, 2, 0, 0, (33, 7)),
    ("parallel", "abs", 2, 0, 0, (16, 16)),
)


def options_of(
    q: tuple[int, int, int, int],
    Dv: int,
    *,
    Sk: int | None = None,
    gamma: Any = 0,
    steps: Any = 0,
    states: Any = 0,
    **params: Any,
) -> tuple[Shapes, dict[str, Any]]:
    """Return shapes and parameters of a call with this q [B, H, Sq, D]. gamma, steps (log_decay) and states: whether
    they are given.
    """
    B, H, Sq, D = q
    Sk = Sq if Sk is None else Sk
    shapes: Shapes = {"q": q, "k": (B, H, Sk, D), "v": (B, H, Sk, Dv)}
    if gamma:
        shapes["gamma"] = (H,)
    if steps:
        shapes["log_decay"] = (B, H, Sk)
    if params.pop("mask", False):
        shapes["mask"] = (H, Sq, Sk)
    if states:
        shapes["initial_state"] = (B, H, D, Dv)
        if params.get("normalize") == "signed":
            shapes["initial_norm"] = (B, H, D)
    return shapes, {"form": "chunk"} | {name: value for name, value in params.items() if value not in (None, 0)}


def _paired(row: tuple[Any, ...], B: int, H: int, S: int) -> tuple[Shapes, dict[str, Any]]:
    form, normalize, decay, states, return_state, (D, Dv) = row
    params = {"form": form, "normalize": normalize, "return_state": bool(return_state)}
    return options_of((B, H, S, D), Dv, gamma=decay == 1, steps=decay == 2, states=states, **params)


def _simulated(tags: set[Tag], dtype: str) -> frozenset[Tag]:
    """Return cases for the simulator, in float32: other tests cover them in all dtypes."""
    return frozenset(tags - {Tag.SIM} if Tag.TEST in tags and dtype != "float32" else tags)


def _cases() -> tuple[Case, ...]:
    cases = []

    def add(
        name: str,
        q: tuple[int, int, int, int],
        Dv: int,
        dtypes: tuple[str, ...],
        tags: set[Tag],
        *,
        backward: bool = True,
        **options: Any,
    ) -> None:
        shapes, params = options_of(q, Dv, **options)
        orders = TOKENS_FIRST if {Tag.BENCH, Tag.COMPARE} & tags else {}
        known: dict[str, Any] = {"backward": backward, "orders": orders}
        cases.extend(Case(name, dtype, shapes, params, _simulated(tags, dtype), **known) for dtype in dtypes)

    half, single = ("bfloat16",), ("float32",)
    test, edge, sim, build = {Tag.TEST}, {Tag.TEST, Tag.EDGE}, {Tag.SIM}, {Tag.COMPILE}
    everywhere = {Tag.TEST, Tag.EDGE, Tag.SIM}
    states: dict[str, Any] = {"gamma": 1, "states": 1, "return_state": True}
    steps: dict[str, Any] = {"steps": 1, "states": 1, "return_state": True}
    decoding: dict[str, Any] = {"states": 1, "return_state": True}
    # common problems
    add("b8s2048d128", (8, 16, 2048, 128), 128, half, {Tag.BENCH})
    add("b8s2048d128", (8, 16, 2048, 128), 128, ("float16",), {Tag.COMPARE, Tag.COMPILE})
    add("b2s8192d128", (2, 16, 8192, 128), 128, half, {Tag.BENCH})
    add("b2s8192d256v512", (2, 8, 8192, 256), 512, half, {Tag.BENCH})
    add("b2s4096d128", (2, 8, 4096, 128), 128, single, {Tag.BENCH})
    add("b2s8192d128", (2, 8, 8192, 128), 128, single, {Tag.BENCH})
    add("b8s2048d128_steps", (8, 16, 2048, 128), 128, half, {Tag.COMPARE}, steps=1)
    add("b1s131072d128", (1, 8, 131072, 128), 128, half, {Tag.COMPARE})
    add("token_b64h32d128", (64, 32, 1, 128), 128, half, {Tag.COMPARE}, backward=False, form="recurrent", **decoding)
    add("s1024d128", (2, 16, 1024, 128), 128, ("float32", "bfloat16"), {Tag.DEMO})
    # widths that kernels are built for
    for D, Dv in ((64, 64), (128, 128), (64, 128)):
        add(f"chunk_d{D}v{Dv}", (2, 3, 200, D), Dv, FLOATS, test)
    add("widest", (1, 2, 130, 256), 512, FLOATS, test, normalize="signed", **states)
    add("wide_recurrent", (1, 1, 20, 256), 512, FLOATS, test, form="recurrent")
    add("wide_parallel", (1, 1, 70, 256), 512, FLOATS, test, form="parallel", normalize="abs")
    add("narrow", (1, 2, 65, 1), 1, FLOATS, edge, normalize="signed")
    # lengths around a chunk's
    for S in (1, 63, 64, 65):
        add(f"chunk_s{S}", (2, 2, S, 32), 48, FLOATS, edge, normalize="signed", **states)
    add("one_token", (3, 2, 1, 64), 64, FLOATS, edge, form="recurrent", normalize="signed", **states)
    add("one_token_plain", (2, 3, 1, 128), 128, FLOATS, test, form="recurrent", **decoding)
    add("one_token_steps", (2, 3, 1, 100), 72, FLOATS, edge, form="recurrent", **steps)
    add("long", (1, 2, 1500, 32), 32, FLOATS, test)
    add("segments", (3, 7, 1600, 72), 40, half, test, **states)
    add("states_long", (1, 16, 2000, 128), 128, half, test, **states)
    add("states_long_wide", (1, 24, 2000, 136), 264, half, test, **states)
    add("long_widest", (1, 4, 2100, 256), 512, half, test)
    # log_decay: a decay per step
    for S in (1, 64, 65, 300):
        add(f"steps_s{S}", (2, 2, S, 32), 48, FLOATS, edge, normalize="signed", **steps)
    add("steps_wide", (1, 2, 200, 128), 128, FLOATS, test, steps=1)
    add("steps_widest", (1, 2, 280, 256), 512, ("float32", "bfloat16"), test, **steps)
    add("steps_states", (2, 2, 300, 72), 40, ("bfloat16",), edge, **steps)
    add("steps_segments", (3, 7, 1600, 72), 40, ("bfloat16",), test, **steps)
    add("steps_long", (1, 2, 1500, 32), 32, FLOATS, test, steps=1)
    add("steps_parallel", (2, 2, 150, 40), 24, FLOATS, edge, form="parallel", normalize="signed", **steps)
    add("steps_recurrent", (2, 2, 70, 40), 24, FLOATS, edge, form="recurrent", normalize="signed", **steps)
    # only the parallel form
    add("cross", (2, 3, 70, 40), 24, FLOATS, edge, form="parallel", normalize="signed", Sk=190)
    add("unseeing_rows", (1, 2, 90, 32), 32, FLOATS, edge, form="parallel", normalize="abs", Sk=33, gamma=1)
    add("mask", (2, 3, 65, 40), 24, FLOATS, edge, form="parallel", mask=1, scale=0.3)
    add("mask_signed", (1, 2, 35, 33), 7, FLOATS, edge, form="parallel", mask=1, normalize="signed", Sk=67)
    add("mask_abs", (1, 2, 67, 16), 16, FLOATS, edge, form="parallel", mask=1, normalize="abs", Sk=35)
    # empty or nearly empty problems
    for form in ("parallel", "chunk", "recurrent"):
        add(f"no_tokens_{form}", (2, 2, 0, 16), 24, FLOATS, everywhere, form=form, normalize="signed", **states)
    add("no_tokens_stateless", (1, 2, 0, 16), 24, FLOATS, everywhere, return_state=True)
    add("no_batch", (0, 2, 65, 16), 16, FLOATS, everywhere, normalize="signed", **states)
    add("no_keys", (1, 2, 8, 16), 16, FLOATS, everywhere, form="parallel", normalize="signed", Sk=0)
    add("no_queries", (1, 2, 0, 16), 16, FLOATS, everywhere, form="parallel", Sk=8)
    for number, row in enumerate(PAIRS):
        shapes, params = _paired(row, 2, 3, 77)
        dtypes = ("float32", ("bfloat16", "float16", "float64")[number % 3])  # each row is a kernel to build
        cases += [Case(f"options_{number}", dtype, shapes, params, frozenset(edge)) for dtype in dtypes]
    # small enough for a simulator
    add("sim_chunk", (1, 2, 17, 8), 12, ("float32", "bfloat16"), sim)
    add("sim_chunks", (1, 1, 35, 8), 8, single, sim, normalize="signed", **states)
    add("sim_states", (1, 1, 19, 12), 8, ("float64", "float16"), sim, normalize="signed", **states)
    add("sim_recurrent", (2, 2, 5, 8), 12, ("float32", "bfloat16"), sim, form="recurrent", normalize="signed", **states)
    add("sim_token", (1, 2, 1, 9), 20, ("float32", "bfloat16"), sim, form="recurrent", **decoding)
    add("sim_recurrent_plain", (1, 1, 9, 12), 8, single, sim, form="recurrent", return_state=True)
    add("sim_parallel", (1, 2, 9, 8), 12, ("float32", "bfloat16"), sim, form="parallel", normalize="signed", Sk=14)
    add("sim_abs", (1, 1, 18, 12), 8, single, sim, form="parallel", normalize="abs", gamma=1)
    add("sim_mask", (1, 2, 9, 8), 8, single, sim, form="parallel", normalize="signed", mask=1, Sk=13)
    add("sim_parallel_states", (1, 1, 17, 8), 8, single, sim, form="parallel", **states)
    add("sim_steps", (1, 1, 35, 8), 12, ("float32", "bfloat16"), sim, steps=1)
    add("sim_steps_states", (1, 1, 35, 8), 8, ("float32", "float64"), sim, normalize="signed", **steps)
    add("sim_steps_recurrent", (1, 2, 9, 12), 8, single, sim, form="recurrent", normalize="signed", **steps)
    add("sim_steps_parallel", (1, 1, 18, 12), 8, single, sim, form="parallel", normalize="abs", steps=1)
    add("sim_boxes", (1, 1, 140, 72), 8, half, sim, gamma=1, states=1)
    # one of each kernel variant, for the offline compiler
    add("d128", (1, 2, 256, 128), 128, ("float32", "bfloat16"), build)
    add("d128states", (1, 2, 256, 128), 128, half, build, **states)
    add("d128segments", (3, 7, 1600, 128), 128, half, build, **states)
    add("d64signed", (1, 2, 256, 64), 64, ("float16",), build, normalize="signed", **states)
    add("d256v512", (1, 2, 256, 256), 512, half, build, return_state=True)
    add("d32", (1, 2, 256, 32), 48, ("float64",), build, gamma=1)
    add("recurrent", (1, 2, 16, 128), 128, half, build, form="recurrent", normalize="signed", **states)
    add("parallel_mask", (1, 2, 256, 128), 128, half, build, form="parallel", mask=1, normalize="signed")
    add("d128steps", (1, 2, 256, 128), 128, half, build, steps=1)
    add("token_steps", (1, 2, 1, 128), 128, half, build, backward=False, form="recurrent", steps=1)
    return tuple(cases)


def _varlen_cases() -> tuple[Case, ...]:
    cases = []

    def add(
        name: str,
        B: int,
        qkv: tuple[int, int, int, int],
        dtypes: tuple[str, ...],
        tags: set[Tag],
        *,
        gamma: int = 0,
        steps: int = 0,
        states: int = 0,
        **params: Any,
    ) -> None:
        """qkv: tokens, heads, D and Dv."""
        total, H, D, Dv = qkv
        shapes: Shapes = {"q": (total, H, D), "k": (total, H, D), "v": (total, H, Dv), "cu_seqlens": (B + 1,)}
        if gamma:
            shapes["gamma"] = (H,)
        if steps:
            shapes["log_decay"] = (total, H)
        if states:
            shapes["initial_state"] = (B, H, D, Dv)
            if "normalize" in params:
                shapes["initial_norm"] = (B, H, D)
        params = {"max_seqlen": -(-2 * total // max(B, 1)), **params}
        cases.extend(Case(name, dtype, shapes, params, _simulated(tags, dtype)) for dtype in dtypes)

    everywhere = {Tag.TEST, Tag.EDGE, Tag.SIM}
    states: dict[str, Any] = {"gamma": 1, "states": 1, "return_state": True}
    add("varlen_s2048d128", 4, (8192, 16, 128, 128), ("bfloat16",), {Tag.BENCH})
    add("varlen_s512d128", 4, (1024, 16, 128, 128), ("bfloat16",), {Tag.DEMO})
    add("varlen_plain", 3, (300, 3, 64, 64), FLOATS, {Tag.TEST})
    add("varlen_states", 5, (260, 2, 24, 40), FLOATS, {Tag.TEST, Tag.EDGE}, normalize="signed", **states)
    add("varlen_out", 3, (150, 2, 33, 7), FLOATS, {Tag.TEST, Tag.EDGE}, gamma=1, return_state=True, scale=0.3)
    add("varlen_steps", 5, (260, 2, 24, 40), FLOATS, {Tag.TEST, Tag.EDGE}, normalize="signed", steps=1, states=1)
    add("varlen_no_tokens", 2, (0, 2, 16, 8), FLOATS, everywhere, normalize="signed", **states)
    add("varlen_no_sequences", 0, (0, 2, 16, 16), FLOATS, everywhere, max_seqlen=4, return_state=True)
    add("sim_varlen", 3, (19, 1, 8, 12), ("float32", "bfloat16"), {Tag.SIM}, normalize="signed", **states)
    add("sim_varlen_plain", 2, (19, 1, 8, 8), ("float64", "float16"), {Tag.SIM})
    add(
        "sim_varlen_steps", 3, (19, 1, 8, 12), ("float32", "bfloat16"), {Tag.SIM}, normalize="signed", steps=1, states=1
    )
    # tokens after the last sequence belong to none: the sequences are shorter than all tokens
    early: dict[str, Any] = {"normalize": "signed", "return_row_sum": True, "return_state": True}
    add(
        "varlen_ends_early", 4, (150, 2, 33, 7), FLOATS, {Tag.TEST, Tag.EDGE}, max_seqlen=20, steps=1, states=1, **early
    )
    add("varlen_ends_early_d64", 3, (300, 2, 64, 64), FLOATS, {Tag.TEST}, max_seqlen=70, gamma=1, **early)
    add("varlen_all_tokens_left", 0, (9, 2, 16, 16), FLOATS, everywhere, max_seqlen=4, gamma=1, **early)
    add("sim_varlen_early", 3, (31, 1, 8, 12), ("float32", "bfloat16"), {Tag.SIM}, max_seqlen=6, steps=1, **early)
    add("varlen_d64", 4, (512, 2, 64, 64), ("float32",), {Tag.COMPILE}, normalize="signed", **states)
    return tuple(cases)


def generate(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal values; decays of all speeds, including 1 and 0.01; masks with zeros; sequences of all lengths, including
    0.
    """
    others = ("gamma", "log_decay", "mask", "cu_seqlens")
    drawn = {name: shape for name, shape in case.shapes.items() if name not in others}
    made = standard_normal(spec, Case(case.name, case.dtype, drawn), rng)
    wide = numpy_dtype(compute_dtype(case.dtype))
    if "gamma" in case.shapes:
        made["gamma"] = _decays(case.shapes["gamma"][0], rng).astype(wide)
    if "log_decay" in case.shapes:
        made["log_decay"] = _logs(case.shapes["log_decay"], rng).astype(wide)
    if "mask" in case.shapes:
        shape = case.shapes["mask"]
        made["mask"] = np.where(rng.random(shape) < 2 / 3, rng.uniform(-1, 1, shape), 0).astype(wide)
    if "cu_seqlens" in case.shapes:
        made["cu_seqlens"] = random_ends(
            case.shapes["q"][0], case.shapes["cu_seqlens"][0] - 1, case.params["max_seqlen"], rng
        )
    return {name: made[name] for name in case.shapes}


def _decays(H: int, rng: np.random.Generator) -> np.ndarray:
    """Draw [H] decays: 1, 0.01, and others between, most of them near 1."""
    gamma = 1 - 2.0 ** -rng.uniform(0.5, 9, H)
    gamma[rng.permutation(H)[:2]] = rng.permutation([1.0, 0.01])[:H]
    return gamma


def _logs(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw log decays per step: slow and fast ones, one in eight that keeps all, one in thirty that forgets all."""
    logs = -(2.0 ** rng.uniform(-12, 1, shape))
    kind = rng.random(shape)
    return np.where(kind < 1 / 8, 0, np.where(kind > 1 - 1 / 30, -1e30, logs))


CASES = _cases()
CASES_VARLEN = _varlen_cases()
