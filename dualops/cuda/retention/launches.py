"""The launches of forward and gradient for kernels of tiles: the states between chunks, the rows, log_decay's gradient,
the weights and terms of a normalized call's gradient.

A rung describes how it runs a pass (`How`). All other launches are the same for all rungs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided, compute_dtype
from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel
from ..launch.arrays import cdiv
from ..launch.plans import Choice
from ..launch.step import Argument, Step
from ..launch.views import by_token, number_type, start, strided, whole
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from .arguments import NO_CHUNK, OF_COLUMNS, ChunkStates, State, is_varlen, slots_of, workspace
from .decays import logs_of, prefix_sums_steps, prefix_sums_workspace
from .passes import Pass, States, normalizer_workspace, passes_of
from .simt_rows import RowsConfig
from .simt_states import NORM_THREADS, build_norms, build_walk
from .simt_steps import StateTerms, build_state_terms, build_step_gradient, steps_layout, terms_layout

BACK = "d"  # before the names of the states of a pass back


class Tiles(NamedTuple):
    """A kernel that computes states, or rows of a result, by tiles, and the tile that a block has."""

    build: Callable[..., Kernel]  # of states: (mirrored), whether a pass back has the chunks of the pass forth
    rows: int
    columns: int
    shared_bytes: int

    def blocks(self, rows: int, columns: int) -> int:
        """Return the number of blocks for an array of this size."""
        return cdiv(rows, self.rows) * cdiv(columns, self.columns)


class How(NamedTuple):
    """How a rung runs passes: by tiles, with states in the workspace, or by other kernels. log_decay's gradient always
    uses tiles and chunks, maybe of another length than the passes.
    """

    chunk: int  # rows that read each other directly
    tiles: Any = None  # (Pass) -> Tiles of what each chunk adds to the state, and of the rows of a result
    step_chunk: int = NO_CHUNK
    step_rows: Any = None  # RowsConfig
    others: Callable[[Pass], Sequence[Step]] | None = None  # the launches of a pass by other kernels
    workspace: Mapping[str, ArrayMeta] = {}  # which they need


def choice_of(
    rung: str, problem: Problem, results: Mapping[str, ArrayMeta], how: How, config: Any, reason: str, shared_bytes: int
) -> Choice:
    """Return the choice that runs forward, or the gradient."""
    steps = partial(steps_of, problem, results, how)
    return Choice(rung, config, reason, steps, workspace_of(problem, results, how), shared_bytes)


def states_workspace(problem: Problem, passes: Sequence[Pass], kind: str = "") -> dict[str, ArrayMeta]:
    """Return room for the states of the pass that needs most. The passes use it one after another."""
    p, made = problem, {}
    for each in passes:
        _, slots = slots_of(p, each.call.state_chunk)
        if each.has_states:
            made[f"{kind}states"] = workspace(p, (slots, p.H, p.D * p.Dv))
        if each.has_norms:
            made[f"{kind}norms"] = workspace(p, (slots, p.H, p.D))
    return made


def states_steps(
    problem: Problem, each: Pass, adds: Tiles, places: ChunkStates, *, mirrored: bool = False
) -> list[Step]:
    """Return two launches for the states, and two for the norms: what each chunk adds, then the walk from chunk to
    chunk.

    places: the arrays of both. mirrored: a pass back has the chunks of the pass forth.
    """
    p, call, x, (states, norms) = problem, each.call, each.inputs, places
    heads, known, stepwise = p.B * p.H, (each.decay, call), each.variant.stepwise
    steps = []

    def contribute(kernel: Kernel, chunks: int, tiles: int, *args: Argument, shared_bytes: int = 0) -> None:
        if heads * chunks:
            steps.append(Step(kernel, (heads * chunks * tiles,), (*args, *known, chunks), shared_bytes))

    def walk(place: Strided, ends: State, size: int, width: int) -> None:
        args = (place, ends, *known, size, width, 0)
        kernel = build_walk(compute_dtype(p.dtype), stepwise, mirrored)
        steps.append(Step(kernel, (heads * cdiv(size, THREADS),), args))

    if each.has_states and heads:
        contribute(
            adds.build(mirrored),
            each.chunks(each.states.final),
            adds.blocks(call.D, call.Dv),
            *(states, x.k, x.v, x.weights),
            shared_bytes=adds.shared_bytes,
        )
        walk(states, each.states.state, call.D * call.Dv, call.Dv)
    if each.has_norms and heads:
        width, columns = (call.Dv, x.v) if call.normed == OF_COLUMNS else (call.D, x.k)
        kernel, chunks = build_norms(p.dtype, stepwise, mirrored), each.chunks(each.states.final_norm)
        contribute(kernel, chunks, cdiv(width, NORM_THREADS), norms, columns, x.weights, x.terms)
        walk(norms, each.states.norm_as_state, width, width)
    return steps


def chunk_states(made: Mapping[str, ArrayMeta], kind: str = "") -> ChunkStates:
    """Return the states before the chunks among the arrays of a workspace."""
    return ChunkStates(*(whole(made, f"{kind}{name}", 3) for name in ChunkStates._fields))


def pass_steps(problem: Problem, results: Mapping[str, ArrayMeta], how: How, each: Pass) -> Sequence[Step]:
    """Return the launches of a pass: what each chunk adds, the walk from chunk to chunk, the rows."""
    if how.others:
        return how.others(each)
    p, call, before = problem, each.call, chunk_states(states_workspace(problem, [each]))
    adds, tiles = how.tiles(each)
    steps = states_steps(p, each, adds, before)
    if results[each.out.data].size:
        args = (each.out, each.row_sum, each.inputs, before, each.decay, call)
        steps.append(Step(tiles.build(), (p.B * p.H * tiles.blocks(call.rows, call.Dv),), args, tiles.shared_bytes))
    return steps


def workspace_of(problem: Problem, results: Mapping[str, ArrayMeta], how: How) -> dict[str, ArrayMeta]:
    """Return the states before the chunks, which the passes share, and the prefix sums of log_decay. A gradient also
    has the weight and term of each query, and with log_decay the arrays of its gradient.
    """
    p, made = problem, {**normalizer_workspace(problem), **how.workspace}
    if not how.others:
        made |= prefix_sums_workspace(p) | states_workspace(p, passes_of(p, results, how.chunk))
    if "do" in p.arrays and "log_decay" in p.arrays:
        more = step_gradient_workspace(p, passes_of(p, results, how.step_chunk)[::2])
        made = {**made, **{name: max(meta, made.get(name, meta), key=lambda m: m.size) for name, meta in more.items()}}
    return made


def steps_of(problem: Problem, results: Mapping[str, ArrayMeta], how: How) -> Sequence[Step]:
    """Return all launches of forward, or of the gradient."""
    p, passes = problem, passes_of(problem, results, how.chunk)
    steps = normalizer_steps(p)
    if "log_decay" in p.arrays and "prefix_sums" in workspace_of(p, results, how):
        steps = [*prefix_sums_steps(p, passes[0].logs, passes[0].call), *steps]
    for each in passes:
        steps += pass_steps(p, results, how, each)
        if each is passes[0] and "do" in p.arrays and "log_decay" in p.arrays:
            steps += step_gradient_steps(p, results, how)
    return steps


# --- the gradient of log_decay -----------------------------------------------------------------------


def step_gradient_workspace(problem: Problem, passes: Sequence[Pass]) -> dict[str, ArrayMeta]:
    """Return the prefix sums of log_decay, the states of dq and dk by chunks, and what each token has of them."""
    p, (dq, dk) = problem, passes
    shape = (p.H, p.total) if is_varlen(p) else (p.B, p.H, p.Sk)
    made = prefix_sums_workspace(p) | states_workspace(p, [dq]) | states_workspace(p, [dk], BACK)
    return made | {"taken": workspace(p, shape), "given": workspace(p, shape)}


def step_gradient_bytes(problem: Problem, config: RowsConfig) -> int:
    """Return the shared memory of the kernel that needs most."""
    return max(layout.nbytes for layout in (terms_layout(config, problem.dtype), steps_layout(config, problem.dtype)))


def step_gradient_steps(problem: Problem, results: Mapping[str, ArrayMeta], how: How) -> list[Step]:
    """Return the launches of log_decay's gradient, after those of dq."""
    p, config, (dq, _, dk) = problem, how.step_rows, passes_of(problem, results, how.step_chunk)
    if not results["dlog_decay"].size:
        return []
    made = step_gradient_workspace(p, (dq, dk))
    dk = replace(dk, states=States(dk.states.initial, initial_norm=dk.states.initial_norm))
    taken, given, q = (by_token({**p.arrays, **made}, name, is_varlen(p)) for name in ("taken", "given", "q"))
    forth = StateTerms(taken, chunk_states(made), dq.call.first_chunk)
    back = StateTerms(given, chunk_states(made, BACK), dk.call.first_chunk)

    # by chunks the launches of dq have just computed its states
    steps = states_steps(p, dq, how.tiles(dq)[0], forth.before) if p.form == "parallel" else []
    steps += states_steps(p, dk, how.tiles(dk)[0], back.before, mirrored=True)
    chunks = p.B * p.H * dq.call.slots
    blocks, nbytes = chunks * cdiv(dq.call.state_chunk, config.block_q), terms_layout(config, p.dtype).nbytes
    for each, y, of_state, mirrored in ((dq, q, forth, False), (dk, dq.inputs.v, back, True)):
        args = (of_state, each.inputs, y, each.decay, each.call)
        steps.append(Step(build_state_terms(config, each.variant, mirrored), (blocks,), args, nbytes))
    dlogs, nbytes = logs_of(results, "dlog_decay", is_varlen(p)), steps_layout(config, p.dtype).nbytes
    args = (dlogs, q, dq.inputs, forth, back, dq.decay, dq.call)
    return [*steps, Step(build_step_gradient(config, dq.variant), (chunks,), args, nbytes)]


# --- the normalizer ----------------------------------------------------------------------------------

ROWS = THREADS // LANES  # queries of a block


@builds
def build_normalizer_grad(dtype: str, signed: bool) -> Kernel:
    """retention_weights(weights, terms, row_sum, o, do, H, S, Dv): what the gradient needs of each query.

        weight = 1 / n,  n = max(1, |row_sum|)
        term = -sign(row_sum) * (do . o)  if "signed" and |row_sum| > 1, else 0           16 lanes a query

    A NaN in row_sum makes both NaN. It reaches the gradients of all tokens before the query.
    """
    mem = storage(dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, LANES)

    @kernel(*[number_type(dtype, 3)] * 3, *[strided(dtype, 3)] * 2, *[i32] * 3, threads=THREADS)
    def retention_weights(weights, terms, row_sum, o, do, H, S, Dv):
        lane, line = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        blocks = (S + ROWS - 1) // ROWS
        head, row = i64(cuda.blockIdx.x) // blocks, i64(cuda.blockIdx.x) % blocks * ROWS + line
        b, h = head // H, head % H
        product = num.zero
        if signed:
            if row < S:
                o_row, do_row = start(o, b, h, row), start(do, b, h, row)
                for e in range(lane, Dv, LANES):
                    product += mem.load(o.data, o_row + e) * mem.load(do.data, do_row + e)
            product = lanes.sum(product)
        if (row < S) & (lane == 0):
            total = row_sum.data[start(row_sum, b, h, row)]
            weight, term = num.one, num.zero
            if not abs(total) <= num.one:  # a NaN too
                weight = num.one / abs(total)
                term = -product if total > num.zero else product
            weights.data[start(weights, b, h, row)] = weight
            terms.data[start(terms, b, h, row)] = term

    return retention_weights


def normalizer_steps(problem: Problem) -> list[Step]:
    """Return the launch, if this is the gradient of a normalized call."""
    p, extra = problem, normalizer_workspace(problem)
    if not extra or not extra["weights"].size:
        return []
    batches, tokens = (1, p.total) if is_varlen(p) else (p.B, p.Sq)
    metas, names = {**p.arrays, **extra}, ("weights", "terms", "row_sum", "o", "do")
    args = (*(by_token(metas, name, is_varlen(p)) for name in names), p.H, tokens, p.Dv)
    kernel = build_normalizer_grad(p.dtype, p.normalize == "signed")
    return [Step(kernel, (batches * p.H * cdiv(tokens, ROWS),), args)]
