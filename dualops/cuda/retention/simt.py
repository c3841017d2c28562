"""The simt rung: its Configs, best first, and its launches, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import compute_dtype, itemsize
from ..arrays import cdiv
from ..device import Device
from ..plans import Choice
from ..step import Step
from ..views import whole
from .arguments import NO_CHUNK
from .marks import marks_steps, marks_workspace
from .passes import Pass, backward_passes, forward_pass, variant_of
from .simt_launches import (
    states_steps,
    states_workspace,
    step_gradient_bytes,
    step_gradient_steps,
    step_gradient_workspace,
)
from .simt_recurrent import RecurrentConfig, build_recurrent
from .simt_rows import RowsConfig, build_rows
from .simt_states import StatesConfig
from .weights import weights_steps, weights_workspace


class SimtConfig(NamedTuple):
    """Rows of a chunk that see one another, and the tiles of both kernels."""

    chunk: int
    rows: RowsConfig
    states: StatesConfig

    def shared_bytes(self, dtype: str, D: int) -> int:
        """What the greedier of them needs."""
        return max(self.rows.shared_bytes(dtype, D), self.states.shared_bytes(dtype))


LEAST = RowsConfig(2, 2, 1, 16, near=2, lanes=8), StatesConfig(2, 1, near=2, lanes=8, tokens=16)
LEAST_CHUNK = 32
HELD = 160  # of 256 registers, those of the same thread in each block of an SM, what may hold states and norms


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for retention, best first."""
    p = problem
    for config, reason in forward_configs(p):
        steps, workspace = partial(forward_steps, p, results, config), forward_workspace(p, results, config)
        yield Choice("simt", config, reason, steps, workspace, config.shared_bytes(p.dtype, p.D))


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for its gradient, best first."""
    p = problem
    for config, reason in backward_configs(p):
        steps, workspace = partial(backward_steps, p, results, config), backward_workspace(p, results, config)
        shared_bytes = config.shared_bytes(p.dtype, max(p.D, p.Dv))
        if "log_decay" in p.arrays:
            shared_bytes = max(shared_bytes, step_gradient_bytes(p, _tiles(config)))
        yield Choice("simt", config, reason, steps, workspace, shared_bytes)


def forward_configs(problem: Problem) -> Iterator[tuple[SimtConfig | RecurrentConfig, str]]:
    """Tiles for forward, best first."""
    if problem.form == "recurrent":
        yield from _recurrent_configs(problem, problem.D)
    else:
        yield from _tiled_configs(problem)


def backward_configs(problem: Problem) -> Iterator[tuple[SimtConfig | RecurrentConfig, str]]:
    """Tiles for backward, best first. Its passes are of forward's kind, the widths exchanged in two of them."""
    if problem.form == "recurrent":
        yield from _recurrent_configs(problem, max(problem.D, problem.Dv))
    else:
        yield from _tiled_configs(problem)


def _recurrent_configs(problem: Problem, D: int) -> Iterator[tuple[RecurrentConfig, str]]:
    rows = next(rows for rows in (1, 4, 8, 16, 32) if rows * 16 >= D)
    most = 32 if problem.dtype == "float64" else 64  # numbers of a state: more would not stay in registers
    columns = min(4, most // rows)
    told = f"{rows} x {columns} numbers of the state a thread"
    if problem.Sk == 1:  # as many blocks of an SM as can be: their loads are under way at once
        held = rows * columns + max(rows, columns)  # of a state and a norm
        blocks = 1 if problem.dtype == "float64" else max(min(HELD // held, 4), 1)
        yield RecurrentConfig(rows, columns, tokens=1, min_blocks=blocks), f"one token, {told}"
    else:
        yield RecurrentConfig(rows, columns), f"token after token, {told}"


def _tiled_configs(problem: Problem) -> Iterator[tuple[SimtConfig, str]]:
    p = problem
    wide, tokens = max(p.D, p.Dv), min(p.Sq, p.Sk)
    found = variant_of(p)
    plain = found.aligned and not (found.normalized or found.mask)
    blocks = 2 if plain else 1  # of an SM: the others need registers
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
    for (rows, states), reason in ladder:
        chunk = (
            LEAST_CHUNK
            if rows is LEAST[0]
            else 64
            if wide <= 64 or p.dtype == "float64"
            else 128
            if wide <= 128
            else 256
        )
        how = "the whole sequence at once" if p.form == "parallel" else f"chunks of {chunk} tokens"
        what = f"{how}, {rows.block_q} x {rows.block_v} results a block: {reason}"
        yield SimtConfig(chunk, rows, states), what


def forward_workspace(
    problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig | RecurrentConfig
) -> dict[str, ArrayMeta]:
    """The states before the chunks, and the sums of log_decay."""
    if isinstance(config, RecurrentConfig):
        return {}
    each = forward_pass(problem, results, _chunk(problem, config))
    return marks_workspace(problem) | states_workspace(problem, [each])


def forward_steps(
    problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig | RecurrentConfig
) -> Sequence[Step]:
    p, each = problem, forward_pass(problem, results, _chunk(problem, config))
    if isinstance(config, RecurrentConfig):
        return _recurrent_steps(p, results, each, config)
    return [*marks_steps(p, each.logs, each.ends, each.call), *_tiled_steps(p, results, each, config)]


def backward_workspace(
    problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig | RecurrentConfig
) -> dict[str, ArrayMeta]:
    """The states before the chunks, of one pass after another, and a weight and a term for each query; with log_decay
    its sums, and what its gradient is made of."""
    p, extra = problem, weights_workspace(problem)
    made = extra
    if not isinstance(config, RecurrentConfig):
        made = made | states_workspace(p, backward_passes(p, results, extra, _chunk(p, config)))
    if "log_decay" in p.arrays:
        more = step_gradient_workspace(p, _chunked_passes(p, results, config))
        made = {**made, **{name: max(meta, made.get(name, meta), key=lambda m: m.size) for name, meta in more.items()}}
    return made


def backward_steps(
    problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig | RecurrentConfig
) -> Sequence[Step]:
    p, extra = problem, weights_workspace(problem)
    passes = backward_passes(p, results, extra, _chunk(p, config))
    steps = [*marks_steps(p, passes[0].logs, passes[0].ends, passes[0].call), *weights_steps(p)]
    for each in passes:
        if isinstance(config, RecurrentConfig):
            steps += _recurrent_steps(p, results, each, config)
        else:
            steps += _tiled_steps(p, results, each, config)
        if each is passes[0] and "log_decay" in p.arrays:
            kept = p.form == "chunk"  # dq has just had the states that are asked for
            steps += step_gradient_steps(p, results, _chunked_passes(p, results, config), _tiles(config), kept=kept)
    return steps


def _chunk(problem: Problem, config: SimtConfig | RecurrentConfig) -> int:
    """Rows that see one another."""
    return config.chunk if problem.form == "chunk" and isinstance(config, SimtConfig) else NO_CHUNK


def _tiles(config: SimtConfig | RecurrentConfig) -> tuple[RowsConfig, StatesConfig]:
    """Those of log_decay's gradient, which goes by chunks whatever the form is."""
    return (config.rows, config.states) if isinstance(config, SimtConfig) else LEAST


def _chunked_passes(
    problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig | RecurrentConfig
) -> tuple[Pass, Pass]:
    """dq and dk by chunks."""
    chunk = config.chunk if isinstance(config, SimtConfig) else LEAST_CHUNK
    dq, _, dk = backward_passes(problem, results, weights_workspace(problem), chunk)
    return dq, dk


def _tiled_steps(problem: Problem, results: Mapping[str, ArrayMeta], each: Pass, config: SimtConfig) -> Sequence[Step]:
    """The launches of a pass: what each chunk adds, the walk from chunk to chunk, the rows."""
    p, call = problem, each.call
    made = states_workspace(p, [each])
    states, norms = whole(made, "states", 3), whole(made, "norms", 3)
    steps = states_steps(p, each, config.states, (states, norms))
    if results[each.out.data].size:
        rows = config.rows
        blocks = p.B * p.H * cdiv(call.rows, rows.block_q) * cdiv(call.Dv, rows.block_v)
        args = (each.out, each.row_sum, each.q, each.k, each.v, states, norms, each.weights, each.terms, each.mask)
        known = (each.decay, each.ends, call)
        steps.append(
            Step(build_rows(rows, each.variant), (blocks,), (*args, *known), rows.shared_bytes(p.dtype, call.D))
        )
    return steps


def _recurrent_steps(
    problem: Problem, results: Mapping[str, ArrayMeta], each: Pass, config: RecurrentConfig
) -> Sequence[Step]:
    """The launch of a pass. Without columns, or tokens, the states still go from begin to end."""
    p, states = problem, each.states
    there = (states.initial, states.final, states.initial_norm, states.final_norm)
    if not p.B * p.H or not (results[each.out.data].size or states.end):
        return []
    args = (each.out, each.row_sum, each.q, each.k, each.v, *there, each.weights, each.terms)
    flags = (int(bool(state.data)) for state in there)
    variant = replace(each.variant, aligned=_aligned(p, results, each, config))
    kernel = build_recurrent(config, variant)
    blocks = p.B * p.H * cdiv(each.call.Dv, config.block_v)
    return [
        Step(
            kernel,
            (blocks,),
            (*args, each.logs if each.variant.stepwise else each.gamma, each.ends, each.call, *flags),
            config.shared_bytes(p.dtype, each.call.D),
        )
    ]


def _aligned(problem: Problem, results: Mapping[str, ArrayMeta], each: Pass, config: RecurrentConfig) -> bool:
    """Whether rows of the states of a pass, and what a thread has of one, are whole 16-byte vectors."""
    metas, vector = {**problem.arrays, **results}, 16 // itemsize(compute_dtype(problem.dtype))
    there = [state for state in (each.states.initial, each.states.final) if state.data]
    sizes = [config.columns, each.call.Dv, *(stride for state in there for stride in state.strides[:-1])]
    apart = all(size % vector == 0 for size in sizes)
    return apart and all(state.strides[-1] == 1 and metas[state.data].pointer % 16 == 0 for state in there)
