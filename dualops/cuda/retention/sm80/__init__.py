"""Retention by mma.sync, and its gradient: which problems the rung takes, its Configs and its launches.

rows.py      the rows of a pass, after the states, with the factors of the scores
states.py    what each chunk adds to a state
floats.py    products with a factor of float32
config.py    tiles

The other kernels, above all the walk from chunk to chunk, are those of simt (`launches`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from ....spec import ArrayMeta, Problem
from ...launch.device import Device
from ...launch.plans import Choice
from ...launch.views import is_stored_whole, vector_of
from ...tile.warp_mma import MMA_TYPES
from ..arguments import NO_CHUNK
from ..launches import How, Tiles, choice_of, step_gradient_bytes
from ..passes import TILED, Pass
from ..simt import tiled_configs
from .config import BOX, Shape, Sm80Config, Sm80Rows, Sm80States, boxes_of, columns_of
from .rows import NARROW, build_rows
from .states import build_states

CHUNK = 256  # tokens: states are then a quarter of the memory traffic
FEW = 32  # tokens for which simt comes first, as for narrow heads: a warp would multiply zeros; not timed


def configs(dtype: str, D: int, Dv: int, rich: bool) -> Iterator[tuple[Sm80Config, str]]:
    """Yield tiles for rows of these widths, best first. rich: with log_decay or a mask, which need registers, as tf32
    does, most of all on Blackwell.

    Forward and gradient of (8, 2048, 16, 128, 128) on an H100 took 0.389 and 1.141 ms; with 128 rows a block 0.410 and
    1.208, with 32 columns of scores 0.398 and 1.181, with chunks of 128 tokens 0.532 and 1.586.
    """
    states, chunks, widest = Sm80States(), f"chunks of {CHUNK} tokens", max(D, Dv)
    if not rich or widest <= (BOX if dtype == "float16" else 2 * BOX):
        rows = Sm80Rows(min_blocks=2 if widest <= 2 * BOX else 1)
        yield Sm80Config(CHUNK, rows, states), f"{chunks}, 64 x {columns_of(Dv)} results a block"
    yield Sm80Config(CHUNK, Sm80Rows(block_kv=32), states), f"{chunks}, 32 columns of scores at a time"


def _choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device, *, few: bool) -> Iterator[Choice]:
    p = problem
    if p.dtype not in MMA_TYPES or not device.has_mma_bf16 or p.form == "recurrent":
        return
    if (min(p.Sq, p.Sk) <= FEW or max(p.D, p.Dv) <= NARROW) != few:
        return
    if _vector(p) == 1 and max(p.D, p.Dv) > BOX:  # such copies go through registers, and wide heads have none left
        return
    D, Dv = (int(max(p.D, p.Dv)),) * 2 if "do" in p.arrays else (int(p.D), int(p.Dv))
    rows_of_steps = (config.rows for config, _ in tiled_configs(p, device))
    fitting = (rows for rows in rows_of_steps if step_gradient_bytes(p, rows) <= device.shared_memory_per_block)
    step_rows = next(fitting, None)
    if step_rows is None:
        return
    rich = "log_decay" in p.arrays or "mask" in p.arrays or (p.dtype == "float16" and device.is_blackwell)
    for config, reason in configs(p.dtype, D, Dv, rich):
        chunk = config.chunk if p.form == "chunk" else NO_CHUNK
        how = How(chunk, partial(_tiles, p, results, config), config.chunk, step_rows)
        shape = Shape(boxes_of(D), columns_of(Dv), 1, False, False)
        shared_bytes = config.rows.min_blocks * config.rows.shared_bytes(shape)
        shared_bytes = max(shared_bytes, config.states.min_blocks * config.states.shared_bytes(shape.columns))
        yield choice_of("sm80", p, results, how, config, reason, shared_bytes)


# tiles for forward and gradient; few: if there is little to multiply, and simt comes first
choices, few_choices = (partial(_choices, few=few) for few in (False, True))


def _vector(problem: Problem) -> int:
    """Return the number of elements of a copy."""
    return min(vector_of(problem.arrays[name]) for name in TILED if name in problem.arrays)


def _tiles(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm80Config, each: Pass) -> tuple[Tiles, Tiles]:
    """Return the kernels of what each chunk of a pass adds to the state, and of its rows. The first is exact if a state
    is a result, or if a result has so few numbers that errors do not average out.
    """
    (_, rows, states), call, variant = config, each.call, replace(each.variant, aligned=False)
    columns, whole = columns_of(int(call.Dv)), is_stored_whole(results[each.out.data])
    shape = Shape(boxes_of(int(call.D)), columns, _vector(problem), bool(call.Dv % 4 == 0), whole)
    exact = replace(states, exact=bool(each.states.final.data) or bool(min(call.D, call.Dv) <= NARROW))
    plain, own = replace(variant, mask="", normalized=False), shape._replace(boxes=0, whole=False)
    # with a mask one kernel serves calls with and without row sums: without them the assembler finds no registers
    variant = replace(variant, normalized=variant.normalized or variant.masked)
    return (
        Tiles(partial(build_states, exact, plain, own), BOX, columns, states.shared_bytes(columns)),
        Tiles(partial(build_rows, rows, variant, shape), rows.block_q, columns, rows.shared_bytes(shape)),
    )
