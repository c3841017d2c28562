"""The launches that the passes of the simt rung have in common: states between chunks, and log_decay's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ..arrays import cdiv
from ..backend import Kernel
from ..step import Argument, Step
from ..tile.products import THREADS
from ..views import by_token, whole
from .arguments import OF_COLUMNS, is_varlen, slots_of, workspace
from .decays import logs_of
from .marks import marks_workspace
from .passes import Pass, States, as_state
from .simt_rows import RowsConfig
from .simt_states import NORM_THREADS, StatesConfig, build_contributions, build_norms, build_walk
from .simt_steps import build_met, build_step_gradient, met_layout, steps_layout

BACK = "d"  # before the names of what is kept of a pass back


def states_workspace(problem: Problem, passes: Sequence[Pass], kind: str = "") -> dict[str, ArrayMeta]:
    """Room for the states of the greediest pass; they have it one after another."""
    p, made = problem, {}
    for each in passes:
        _, slots = slots_of(p, each.call.state_chunk)
        if each.has_states:
            made[f"{kind}states"] = workspace(p, (slots, p.H, p.D * p.Dv))
        if each.has_norms:
            made[f"{kind}norms"] = workspace(p, (slots, p.H, p.D))
    return made


def states_steps(
    problem: Problem, each: Pass, tile: StatesConfig, places: tuple[Strided, Strided], *, mirrored: bool = False
) -> list[Step]:
    """What each chunk adds, and the walk from chunk to chunk, of states and norms: where these lie.

    mirrored: a pass back has the chunks of the pass forth.
    """
    p, call, (states, norms) = problem, each.call, places
    heads, known = p.B * p.H, (each.decay, each.ends, call)
    how = {**each.variant.options, **({"mirrored": True} if mirrored else {})}
    steps = []

    def contribute(kernel: Kernel, chunks: int, tiles: int, *args: Argument, shared_bytes: int = 0) -> None:
        if heads * chunks:
            steps.append(Step(kernel, (heads * chunks * tiles,), (*args, *known, chunks), shared_bytes))

    def walk(place: Strided, size: int, width: int, initial: Strided, final: Strided) -> None:
        begins, finishes = int(bool(initial.data)), int(bool(final.data))
        args = (place, initial, final, *known, size, width, begins, finishes, 0)
        steps.append(Step(build_walk(p.dtype, **how), (heads * cdiv(size, THREADS),), args))

    if each.has_states and heads:
        variant = replace(each.variant, mask="", normalized=False)
        contribute(
            build_contributions(tile, variant, mirrored=True) if mirrored else build_contributions(tile, variant),
            each.chunks(each.states.final),
            cdiv(call.D, tile.block_d) * cdiv(call.Dv, tile.block_v),
            *(states, each.k, each.v, each.weights),
            shared_bytes=tile.shared_bytes(p.dtype),
        )
        walk(states, call.D * call.Dv, call.Dv, each.states.initial, each.states.final)
    if each.has_norms and heads:
        width, x = (call.Dv, each.v) if call.normed == OF_COLUMNS else (call.D, each.k)
        kernel, chunks = build_norms(p.dtype, **how), each.chunks(each.states.final_norm)
        contribute(kernel, chunks, cdiv(width, NORM_THREADS), norms, x, each.weights, each.terms)
        walk(norms, width, width, as_state(each.states.initial_norm), as_state(each.states.final_norm))
    return steps


# --- the gradient of log_decay -----------------------------------------------------------------------


def step_gradient_workspace(problem: Problem, passes: tuple[Pass, Pass]) -> dict[str, ArrayMeta]:
    """The sums of log_decay, the states of dq and of dk by chunks, and what each token has of them."""
    p, (dq, dk) = problem, passes
    shape = (p.H, p.total) if is_varlen(p) else (p.B, p.H, p.Sk)
    made = marks_workspace(p) | states_workspace(p, [dq]) | states_workspace(p, [dk], BACK)
    return made | {"taken": workspace(p, shape), "given": workspace(p, shape)}


def step_gradient_bytes(problem: Problem, tiles: tuple[RowsConfig, StatesConfig]) -> int:
    """Shared memory of the greediest of its kernels."""
    rows, states = tiles
    layouts = met_layout(rows, problem.dtype), steps_layout(rows, problem.dtype)
    return max(*(layout.nbytes for layout in layouts), states.shared_bytes(problem.dtype))


def step_gradient_steps(
    problem: Problem,
    results: Mapping[str, ArrayMeta],
    passes: tuple[Pass, Pass],
    tiles: tuple[RowsConfig, StatesConfig],
    *,
    kept: bool,
) -> list[Step]:
    """Its launches; dq and dk by chunks. kept: the states of dq are there."""
    p, (dq, dk), (config, tile) = problem, passes, tiles
    if not results["dlog_decay"].size:
        return []
    dk = replace(dk, states=States(dk.states.initial, initial_norm=dk.states.initial_norm))
    made = step_gradient_workspace(p, passes)
    forth = whole(made, "states", 3), whole(made, "norms", 3)
    back = whole(made, f"{BACK}states", 3), whole(made, f"{BACK}norms", 3)
    taken, given = (by_token(made, name, is_varlen(p)) for name in ("taken", "given"))
    q, k = (by_token(p.arrays, name, is_varlen(p)) for name in ("q", "k"))

    steps = [] if kept else states_steps(p, dq, tile, forth)
    steps += states_steps(p, dk, tile, back, mirrored=True)
    chunks = p.B * p.H * dq.call.slots
    blocks = chunks * cdiv(dq.call.state_chunk, config.block_q)
    for each, y, met, places, how in ((dq, q, taken, forth, {}), (dk, k, given, back, {"mirrored": True})):
        args = (met, each.q, y, *places, each.weights, each.terms, each.decay, each.ends, each.call)
        layout = met_layout(config, p.dtype)
        steps.append(Step(build_met(config, each.variant, **how), (blocks,), args, layout.nbytes))
    args = (logs_of(results, "dlog_decay", is_varlen(p)), q, k, dq.q, dq.k, taken, given, *forth, *back)
    known = (dq.weights, dq.terms, dq.decay, dq.ends, dq.call, dk.call.first_chunk)
    layout = steps_layout(config, p.dtype)
    steps.append(Step(build_step_gradient(config, dq.variant), (chunks,), (*args, *known), layout.nbytes))
    return steps
