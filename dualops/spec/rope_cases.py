"""The cases that rope and rope_tables are tested, timed, simulated and compiled on, and their generators."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Case, Spec, Tag, standard_normal
from .meta import FLOATS, numpy_dtype

Shapes = dict[str, tuple[int, ...]]
TOKENS_FIRST = {"q": (0, 2, 1, 3), "k": (0, 2, 1, 3)}  # [B, S, H, D] in memory


def shapes_of(
    q: tuple[int, int, int, int], Hkv: int, columns: int, rows: int | None = None, batches: int = 0, positions: int = 0
) -> Shapes:
    """Return shapes of a call with this q [B, H, S, D] and tables of this many columns.

    rows: of tables by position, by default the number of tokens; batches: 1 or B for tables of three axes instead;
    positions: their axes, 0 for none.
    """
    B, _, S, D = q
    table = (batches, S, columns) if batches else (S if rows is None else rows, columns)
    shapes: Shapes = {"q": q, "k": (B, Hkv, S, D), "cos": table, "sin": table}
    if positions:
        shapes["positions"] = (S,) if positions == 1 else (B, S)
    return shapes


def _cases() -> tuple[Case, ...]:
    cases = []

    def add(
        name: str,
        q: tuple[int, int, int, int],
        Hkv: int,
        half: int,
        dtypes: tuple[str, ...],
        tags: set[Tag],
        *,
        interleaved: bool = False,
        orders: dict[str, tuple[int, ...]] | None = None,
        own: dict[str, str] | None = None,
        wide: bool = False,
        **tables: Any,
    ) -> None:
        """half: of the rotary dimensions. own: unusual dtypes. wide: tables of R columns."""
        params: dict[str, Any] = {"interleaved": True} if interleaved else {}
        params |= {} if 2 * half == q[-1] else {"dim": 2 * half}
        shapes = shapes_of(q, Hkv, 2 * half if wide else half, **tables)
        more: dict[str, Any] = {"orders": orders or {}, "dtypes": own or {}}
        cases.extend(Case(name, dtype, shapes, params, frozenset(tags), **more) for dtype in dtypes)

    bf16, single = ("bfloat16",), ("float32",)
    narrow, int32 = {"cos": "bfloat16", "sin": "bfloat16"}, {"positions": "int32"}
    test, edge, sim, build = {Tag.TEST}, {Tag.TEST, Tag.EDGE}, {Tag.SIM}, {Tag.COMPILE}
    everywhere = {Tag.TEST, Tag.EDGE, Tag.SIM}
    # common problems: projections reshaped to heads are [B, S, H, D] in memory
    add("b4s8192", (4, 32, 8192, 128), 8, 64, bf16, {Tag.BENCH}, orders=TOKENS_FIRST)
    add("b4s8192heads_first", (4, 32, 8192, 128), 8, 64, bf16, {Tag.BENCH})
    add("b4s8192interleaved", (4, 32, 8192, 128), 8, 64, bf16, {Tag.BENCH}, orders=TOKENS_FIRST, interleaved=True)
    add("b2s4096", (2, 32, 4096, 128), 8, 64, single, {Tag.BENCH}, orders=TOKENS_FIRST)
    add("s2048", (2, 32, 2048, 128), 8, 64, ("float32", "bfloat16"), {Tag.DEMO})
    # the widths of known models
    add("llama", (2, 4, 37, 128), 2, 64, FLOATS, test)
    add("d64_longer_tables", (2, 4, 70, 64), 4, 32, FLOATS, test, rows=131)
    add("d256", (1, 2, 33, 256), 1, 128, FLOATS, test)
    add("gptj", (2, 3, 19, 256), 3, 32, FLOATS, edge, interleaved=True)
    add("neox", (2, 3, 19, 96), 3, 12, FLOATS, edge)
    add("phi", (1, 5, 21, 80), 5, 16, FLOATS, edge)
    # tables with both halves, as Hugging Face makes them
    add("wide_tables", (2, 4, 37, 64), 2, 32, FLOATS, edge, wide=True, batches=2)
    add("wide_tables_partial", (2, 3, 19, 80), 3, 16, FLOATS, edge, wide=True, rows=33, positions=2)
    # every form of tables and positions
    add("own_tables", (3, 2, 21, 64), 2, 32, FLOATS, edge, batches=3)
    add("one_table", (3, 2, 21, 64), 2, 32, FLOATS, test, batches=1, interleaved=True)
    add("positions", (2, 3, 33, 64), 1, 32, FLOATS, edge, rows=100, positions=1)
    add("own_positions", (3, 3, 33, 48), 2, 24, FLOATS, edge, rows=17, positions=2, interleaved=True)
    add("decode", (17, 8, 1, 128), 2, 64, FLOATS, edge, rows=300, positions=2, own=int32)
    add("narrow_tables", (2, 4, 33, 64), 2, 32, bf16, edge, own=narrow)
    add("narrow_tables_interleaved", (2, 4, 33, 64), 2, 32, bf16, edge, own=narrow, interleaved=True)
    # unusual and extreme shapes
    add("odd", (2, 3, 17, 7), 2, 3, FLOATS, edge)
    add("odd_interleaved", (2, 3, 17, 7), 2, 3, FLOATS, edge, interleaved=True)
    add("wide", (1, 2, 5, 1300), 1, 600, FLOATS, test)
    add("more_keys", (2, 1, 9, 16), 7, 8, FLOATS, edge)
    add("no_rotation", (2, 3, 5, 8), 2, 0, FLOATS, edge)
    add("no_tokens", (2, 3, 0, 8), 2, 4, FLOATS, everywhere)
    add("no_batch", (0, 3, 5, 8), 2, 4, FLOATS, everywhere)
    add("no_queries", (2, 0, 5, 8), 2, 4, FLOATS, edge)
    add("no_keys", (2, 3, 5, 8), 0, 4, FLOATS, edge)
    # small enough for a simulator
    add("sim", (2, 3, 3, 32), 1, 16, FLOATS, sim)
    add("sim_partial", (1, 2, 3, 48), 2, 16, FLOATS, sim, interleaved=True)
    add("sim_odd", (2, 2, 3, 9), 1, 3, ("float32", "bfloat16"), sim)
    add("sim_odd_interleaved", (1, 3, 3, 9), 2, 3, ("float64", "float16"), sim, interleaved=True)
    add("sim_tables", (2, 2, 3, 16), 1, 8, ("float32", "bfloat16"), sim, batches=2)
    add("sim_positions", (2, 2, 5, 16), 1, 8, ("float32", "bfloat16"), sim, rows=9, positions=1)
    add("sim_own_positions", (2, 2, 5, 16), 1, 8, ("float64", "float16"), sim, rows=9, positions=2, interleaved=True)
    add("sim_wide_tables", (2, 2, 3, 32), 1, 16, ("float32", "bfloat16"), sim, wide=True, batches=2)
    add("sim_wide_tables_partial", (2, 2, 3, 20), 1, 4, ("float64", "float16"), sim, wide=True)
    add("sim_many_heads", (1, 9, 1, 16), 4, 8, ("float32",), sim)
    # one of each kernel variant, for the offline compiler
    whole, part, odd = ((2, 32, 256, 128), 8, 64), ((2, 32, 256, 96), 8, 32), ((2, 32, 256, 30), 8, 13)
    add("whole", *whole, ("float32", "bfloat16"), build)
    add("whole_positions", *whole, ("float64", "bfloat16"), build, positions=2, interleaved=True)
    add("whole_narrow", *whole, bf16, build, own=narrow)
    add("part", *part, ("float64", "bfloat16"), build, own=int32, positions=1)
    add("part_interleaved", *part, ("float32", "float16"), build, interleaved=True)
    add("unaligned", *odd, ("float64", "float16"), build, positions=2)
    add("unaligned_interleaved", *odd, ("float32", "bfloat16"), build, interleaved=True)
    return tuple(cases)


def _table_cases() -> tuple[Case, ...]:
    cases = []

    def add(name: str, positions: tuple[int, ...], dim: int, dtypes: tuple[str, ...], tags: set[Tag], **params: Any):
        for dtype in dtypes:
            asked = {"dim": dim, **params} | ({"dtype": dtype} if dtype != "float32" else {})
            cases.append(Case(name, dtype, {"positions": positions}, asked, frozenset(tags), backward=False))

    llama, yarn = ("llama3", 8.0, 1.0, 4.0, 8192), ("yarn", 40.0, 4096)
    own = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False}
    own |= {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.0, "rope_theta": 150000.0}
    test, edge, sim = {Tag.TEST}, {Tag.TEST, Tag.EDGE}, {Tag.SIM}
    add("s131072", (131072,), 128, ("float32",), {Tag.BENCH}, base=500000.0, scaling=llama)
    add("s65536", (65536,), 128, ("float32", "bfloat16"), {Tag.DEMO})
    add("s300", (300,), 64, FLOATS, test)
    add("batches", (3, 70), 80, FLOATS, edge, base=500000.0)
    add("linear", (90,), 128, FLOATS, edge, scaling=("linear", 4.0))
    add("llama3", (2, 45), 128, FLOATS, edge, base=500000.0, scaling=llama)
    add("yarn", (2, 45), 128, FLOATS, edge, scaling=yarn)
    add("yarn_entries", (45,), 64, FLOATS, test, scaling=own)
    add("dynamic", (90,), 96, FLOATS, edge, scaling=("dynamic", 2.0, 2048, 5000))
    add("partial", (33,), 80, FLOATS, test, scaling={"rope_type": "default", "partial_rotary_factor": 0.4})
    add("narrow", (257,), 2, FLOATS, edge)
    add("no_positions", (0,), 64, FLOATS, {*edge, *sim})
    add("sim", (2, 7), 6, FLOATS, sim)
    add("sim_llama3", (9,), 16, FLOATS, sim, base=500000.0, scaling=("llama3", 8.0, 1.0, 4.0, 64))
    add("sim_yarn", (9,), 16, FLOATS, sim, scaling=("yarn", 8.0, 64))
    add("sim_dynamic", (9,), 6, FLOATS, sim, scaling=("dynamic", 2.0, 64, 100))
    add("any", (4096,), 128, FLOATS, {Tag.COMPILE})
    return tuple(cases)


def generate(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal q and k, tables of angles as in models from some position on, and any of their rows as positions.

    In tables with columns for both halves, the halves differ: the second one must not be read.
    """
    made = standard_normal(spec, case, rng)
    shape = case.shapes["cos"]
    entries = {entry.name: entry for entry in spec.inputs}
    dtype = {name: numpy_dtype(case.dtype_of(entries[name])) for name in case.shapes}
    first = rng.integers(1, 5000, (*shape[:-2], 1))
    frequencies = 10000.0 ** (-np.arange(shape[-1]) / max(shape[-1], 1))
    angles = (first + np.arange(shape[-2]))[..., None] * frequencies  # [..., rows, R/2]
    made |= {"cos": np.cos(angles).astype(dtype["cos"]), "sin": np.sin(angles).astype(dtype["sin"])}
    if "positions" in case.shapes:
        rows = rng.integers(0, max(shape[0], 1), case.shapes["positions"])
        made["positions"] = rows.astype(dtype["positions"])
    return {name: made[name] for name in case.shapes}


def generate_positions(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Positions of all magnitudes up to a million, some of them negative."""
    shape = case.shapes["positions"]
    magnitude = 10.0 ** rng.uniform(0, 6, shape)
    dtype = numpy_dtype(case.dtype_of(spec.inputs[0]))
    return {"positions": (magnitude * rng.choice([1, 1, 1, -1], shape)).astype(dtype)}


CASES = _cases()
CASES_TABLES = _table_cases()
