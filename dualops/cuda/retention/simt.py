"""The simt rung: its Configs, best first, and its launches, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import compute_dtype, itemsize
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..tile.products import LANES
from .arguments import NO_CHUNK
from .launches import How, Tiles, choice_of, step_gradient_bytes
from .passes import Pass, variant_of
from .simt_recurrent import RecurrentConfig, build_recurrent
from .simt_rows import RowsConfig, build_rows
from .simt_states import StatesConfig, build_contributions


class SimtConfig(NamedTuple):
    """Rows of a chunk that read each other directly, and the tiles of both kernels."""

    chunk: int
    rows: RowsConfig
    states: StatesConfig

    def shared_bytes(self, dtype: str, D: int) -> int:
        """Return the shared memory of the kernel that needs more."""
        return max(self.rows.shared_bytes(dtype, D), self.states.shared_bytes(dtype))


LEAST = RowsConfig(2, 2, 1, 16, near=2, lanes=8), StatesConfig(2, 1, near=2, lanes=8, tokens=16)
LEAST_CHUNK = 32
HELD = 160  # registers for states and norms, of the 256 that one thread of each block on an SM shares


def choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for retention, or for its gradient, best first."""
    p, backward = problem, "do" in problem.arrays
    keys = max(p.D, p.Dv) if backward else p.D  # two passes of the gradient exchange D and Dv
    for config, reason in configs(p, device):
        shared_bytes = config.shared_bytes(p.dtype, keys)
        if isinstance(config, RecurrentConfig):
            how = How(NO_CHUNK, others=partial(_recurrent_steps, p, results, config))
        else:  # log_decay's gradient uses chunks in every form
            chunk = NO_CHUNK if p.form == "parallel" else config.chunk
            how = How(chunk, partial(_tiles, config), config.chunk, config.rows)
            if backward and "log_decay" in p.arrays:
                shared_bytes = max(shared_bytes, step_gradient_bytes(p, config.rows))
        yield choice_of("simt", p, results, how, config, reason, shared_bytes)


def configs(problem: Problem, device: Device) -> Iterator[tuple[SimtConfig | RecurrentConfig, str]]:
    """Yield tiles, best first. The recurrent form has a kernel for one token; several tokens are computed by chunks."""
    p = problem
    if p.form == "recurrent" and p.Sk == 1 and "do" not in p.arrays:
        yield _recurrent_config(p)
    else:
        yield from tiled_configs(p, device)


def _recurrent_config(problem: Problem) -> tuple[RecurrentConfig, str]:
    """Return the tile for one token, with as many blocks on an SM as possible: their loads overlap."""
    rows = next(rows for rows in (1, 4, 8, 16) if rows * LANES >= problem.D)
    columns = min(4, 32 // rows) if problem.dtype == "float64" else 4
    held = rows * columns + max(rows, columns)  # for a state and a norm
    blocks = 1 if problem.dtype == "float64" else max(min(HELD // held, 4), 1)
    return RecurrentConfig(rows, columns, blocks), f"one token, {rows} x {columns} numbers of the state a thread"


def tiled_configs(problem: Problem, device: Device) -> Iterator[tuple[SimtConfig, str]]:
    """Yield tiles, best first."""
    p = problem
    wide, tokens = max(p.D, p.Dv), min(p.Sq, p.Sk)
    found = variant_of(p)
    plain = found.aligned and not (found.normalized or found.mask)
    blocks = 2 if plain and not device.takes_more_registers else 1  # on an SM; other kernels need more registers
    large = RowsConfig(4, 4, 2, 128, min_blocks=blocks), StatesConfig(8, 2, min_blocks=2)
    medium = RowsConfig(4, 4, 1, 64, min_blocks=blocks), StatesConfig(4, 1, min_blocks=2)
    small = RowsConfig(2, 2, 1, 64), StatesConfig(4, 1)
    if tokens <= 32 or wide <= 16:
        ladder = [(LEAST, "few tokens, or narrow heads")]
    elif p.dtype == "float64":
        ladder = [(small, "double precision"), (LEAST, "little shared memory")]
    elif wide <= 64:
        ladder = [(medium, "narrow heads"), (small, "little shared memory"), (LEAST, "little shared memory")]
    else:
        ladder = [(large, "wide heads"), *((tiles, "little shared memory") for tiles in (medium, small, LEAST))]
    longest = 64 if wide <= 64 or p.dtype == "float64" else 128 if wide <= 128 else 256
    for (rows, states), reason in ladder:
        chunk = LEAST_CHUNK if rows is LEAST[0] else longest
        how = "the whole sequence at once" if p.form == "parallel" else f"chunks of {chunk} tokens"
        what = f"{how}, {rows.block_q} x {rows.block_v} results a block: {reason}"
        yield SimtConfig(chunk, rows, states), what


def _tiles(config: SimtConfig, each: Pass) -> tuple[Tiles, Tiles]:
    """Return the kernels of what each chunk of a pass adds to the state, and of its rows."""
    variant, (_, rows, states) = each.variant, config
    adds = partial(build_contributions, states, replace(variant, mask="", normalized=False))
    nbytes = states.shared_bytes(variant.dtype), rows.shared_bytes(variant.dtype, each.call.D)
    return (
        Tiles(adds, states.block_d, states.block_v, nbytes[0]),
        Tiles(partial(build_rows, rows, variant), rows.block_q, rows.block_v, nbytes[1]),
    )


def _recurrent_steps(
    problem: Problem, results: Mapping[str, ArrayMeta], config: RecurrentConfig, each: Pass
) -> Sequence[Step]:
    """Return the launch of a pass. Even without columns or tokens the initial states become final states."""
    p, states = problem, each.states
    if not p.B * p.H or not (results[each.out.data].size or states.end):
        return []
    decay = each.logs if each.variant.stepwise else each.gamma
    args = (each.out, each.row_sum, each.inputs, states.state, states.norm, decay, each.call)
    kernel = build_recurrent(config, replace(each.variant, aligned=_aligned(p, results, each, config)))
    blocks = p.B * p.H * cdiv(each.call.Dv, config.block_v)
    return [Step(kernel, (blocks,), args, config.shared_bytes(p.dtype, each.call.D))]


def _aligned(problem: Problem, results: Mapping[str, ArrayMeta], each: Pass, config: RecurrentConfig) -> bool:
    """Whether rows of a pass's states, and a thread's part of a row, are whole 16-byte vectors."""
    metas, vector = {**problem.arrays, **results}, 16 // itemsize(compute_dtype(problem.dtype))
    there = [state for state in (each.states.initial, each.states.final) if state.data]
    sizes = [config.columns, each.call.Dv, *(stride for state in there for stride in state.strides[:-1])]
    apart = all(size % vector == 0 for size in sizes)
    return apart and all(state.strides[-1] == 1 and metas[state.data].pointer % 16 == 0 for state in there)
