"""The simt rung: its Configs, best first, and its launches, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ..arrays import cdiv
from ..backend import Kernel
from ..device import Device
from ..plans import Choice
from ..step import Argument, Step
from ..tile.products import THREADS
from ..views import whole
from .arguments import NO_CHUNK, OF_COLUMNS, slots_of, workspace
from .passes import Pass, as_state, backward_passes, forward_pass, variant_of
from .simt_recurrent import RecurrentConfig, build_recurrent
from .simt_rows import RowsConfig, build_rows
from .simt_states import NORM_THREADS, StatesConfig, build_contributions, build_norms, build_walk
from .weights import weights_steps, weights_workspace


class SimtConfig(NamedTuple):
    """Rows of a chunk that see one another, and the tiles of both kernels."""

    chunk: int
    rows: RowsConfig
    states: StatesConfig

    def shared_bytes(self, dtype: str, D: int) -> int:
        """What the greedier of them needs."""
        return max(self.rows.shared_bytes(dtype, D), self.states.shared_bytes(dtype))


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
        yield Choice("simt", config, reason, steps, workspace, config.shared_bytes(p.dtype, max(p.D, p.Dv)))


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
    yield RecurrentConfig(rows, columns), f"token after token, {rows} x {columns} numbers of the state a thread"


def _tiled_configs(problem: Problem) -> Iterator[tuple[SimtConfig, str]]:
    p = problem
    wide, tokens = max(p.D, p.Dv), min(p.Sq, p.Sk)
    found = variant_of(p)
    plain = found.aligned and not (found.normalized or found.mask)
    blocks = 2 if plain else 1  # of an SM: the others need registers
    large = RowsConfig(4, 4, 2, 128, min_blocks=blocks), StatesConfig(8, 2, min_blocks=2)
    medium = RowsConfig(4, 4, 1, 64, min_blocks=blocks), StatesConfig(4, 1, min_blocks=2)
    small = RowsConfig(2, 2, 1, 64), StatesConfig(4, 1)
    least = RowsConfig(2, 2, 1, 16, near=2, lanes=8), StatesConfig(2, 1, near=2, lanes=8, tokens=16)
    if tokens <= 32 or wide <= 16:
        ladder = [(least, "few tokens, or narrow heads")]
    elif p.dtype == "float64":
        ladder = [(small, "double precision"), (least, "little shared memory")]
    elif wide <= 64:
        ladder = [(medium, "narrow heads"), (small, "little shared memory"), (least, "little shared memory")]
    else:
        ladder = [(large, "wide heads"), *((tiles, "little shared memory") for tiles in (medium, small, least))]
    for (rows, states), reason in ladder:
        chunk = 32 if rows is least[0] else 64 if wide <= 64 or p.dtype == "float64" else 128 if wide <= 128 else 256
        how = "the whole sequence at once" if p.form == "parallel" else f"chunks of {chunk} tokens"
        what = f"{how}, {rows.block_q} x {rows.block_v} results a block: {reason}"
        yield SimtConfig(chunk, rows, states), what


def forward_workspace(
    problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig | RecurrentConfig
) -> dict[str, ArrayMeta]:
    """The states before the chunks."""
    if isinstance(config, RecurrentConfig):
        return {}
    return _states(problem, [forward_pass(problem, results, _chunk(problem, config))])


def forward_steps(
    problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig | RecurrentConfig
) -> Sequence[Step]:
    each = forward_pass(problem, results, _chunk(problem, config))
    if isinstance(config, RecurrentConfig):
        return _recurrent_steps(problem, results, each, config)
    return _tiled_steps(problem, results, each, config)


def backward_workspace(
    problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig | RecurrentConfig
) -> dict[str, ArrayMeta]:
    """The states before the chunks, of one pass after another, and a weight and a term for each query."""
    extra = weights_workspace(problem)
    if isinstance(config, RecurrentConfig):
        return extra
    return extra | _states(problem, backward_passes(problem, results, extra, _chunk(problem, config)))


def backward_steps(
    problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig | RecurrentConfig
) -> Sequence[Step]:
    p, extra = problem, weights_workspace(problem)
    steps = weights_steps(p)
    for each in backward_passes(p, results, extra, _chunk(p, config)):
        if isinstance(config, RecurrentConfig):
            steps += _recurrent_steps(p, results, each, config)
        else:
            steps += _tiled_steps(p, results, each, config)
    return steps


def _chunk(problem: Problem, config: SimtConfig | RecurrentConfig) -> int:
    """Rows that see one another."""
    return config.chunk if problem.form == "chunk" and isinstance(config, SimtConfig) else NO_CHUNK


def _states(problem: Problem, passes: Sequence[Pass]) -> dict[str, ArrayMeta]:
    """Room for the states of the greediest pass; they have it one after another."""
    p, made = problem, {}
    for each in passes:
        _, slots = slots_of(p, each.call.state_chunk)
        if each.has_states:
            made["states"] = workspace(p, (slots, p.H, p.D * p.Dv))
        if each.has_norms:
            made["norms"] = workspace(p, (slots, p.H, p.D))
    return made


def _tiled_steps(problem: Problem, results: Mapping[str, ArrayMeta], each: Pass, config: SimtConfig) -> Sequence[Step]:
    """The launches of a pass: what each chunk adds, the walk from chunk to chunk, the rows."""
    p, call, made = problem, each.call, _states(problem, [each])
    states, norms = whole(made, "states", 3), whole(made, "norms", 3)
    heads, known = p.B * p.H, (each.gamma, each.ends, call)
    steps = []

    def contribute(kernel: Kernel, chunks: int, tiles: int, *args: Argument, shared_bytes: int = 0) -> None:
        if heads * chunks:
            steps.append(Step(kernel, (heads * chunks * tiles,), (*args, *known, chunks), shared_bytes))

    def walk(place: Strided, size: int, width: int, initial: Strided, final: Strided) -> None:
        begins, finishes = int(bool(initial.data)), int(bool(final.data))
        args = (place, initial, final, *known, size, width, begins, finishes, 0)
        steps.append(Step(build_walk(p.dtype), (heads * cdiv(size, THREADS),), args))

    if each.has_states and heads:
        tile = config.states
        contribute(
            build_contributions(tile, replace(each.variant, mask="", normalized=False)),
            each.chunks(each.states.final),
            cdiv(call.D, tile.block_d) * cdiv(call.Dv, tile.block_v),
            *(states, each.k, each.v, each.weights),
            shared_bytes=tile.shared_bytes(p.dtype),
        )
        walk(states, call.D * call.Dv, call.Dv, each.states.initial, each.states.final)
    if each.has_norms and heads:
        width, x = (call.Dv, each.v) if call.normed == OF_COLUMNS else (call.D, each.k)
        kernel, chunks = build_norms(p.dtype), each.chunks(each.states.final_norm)
        contribute(kernel, chunks, cdiv(width, NORM_THREADS), norms, x, each.weights, each.terms)
        walk(norms, width, width, as_state(each.states.initial_norm), as_state(each.states.final_norm))
    if results[each.out.data].size:
        rows = config.rows
        blocks = heads * cdiv(call.rows, rows.block_q) * cdiv(call.Dv, rows.block_v)
        args = (each.out, each.row_sum, each.q, each.k, each.v, states, norms, each.weights, each.terms, each.mask)
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
    kernel = build_recurrent(config, p.dtype)
    blocks = p.B * p.H * cdiv(each.call.Dv, config.block_v)
    return [
        Step(
            kernel,
            (blocks,),
            (*args, each.gamma, each.ends, each.call, *flags),
            config.shared_bytes(p.dtype, each.call.D),
        )
    ]
