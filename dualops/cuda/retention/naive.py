"""The naive rung: its launches forward and backward, and the arrays between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Argument, Step
from .arguments import NO_CHUNK, OF_COLUMNS, workspace
from .decay_prefix_sums import prefix_sums_steps, prefix_sums_workspace
from .naive_kernels import THREADS, build_product, build_scores, build_state, build_sums
from .normalizer_grad import normalizer_grad_steps, normalizer_grad_workspace
from .passes import Pass, backward_passes, forward_pass

REASON = "the parallel form with all scores in memory, whatever form is requested: to read, not to run"


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Return the only way to run forward."""
    yield Choice("naive", None, REASON, partial(forward_steps, problem, results), forward_workspace(problem))


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Return the only way to run the gradient, except log_decay's."""
    if "log_decay" not in problem.arrays:
        yield Choice("naive", None, REASON, partial(backward_steps, problem, results), backward_workspace(problem))


def forward_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return all scores, the row sums of a normalized call, and the prefix sums of log_decay."""
    sums = {"sums": workspace(problem, (problem.B, problem.H, problem.Sq))} if problem.normalize else {}
    return _scores(problem) | sums | prefix_sums_workspace(problem)


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta]) -> Sequence[Step]:
    """Scores, sums, product, states."""
    each = forward_pass(problem, results, NO_CHUNK)
    return [*prefix_sums_steps(problem, each.logs, each.call), *_steps(problem, each)]


def backward_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return all scores, which the passes share, and a weight and a term for each query."""
    return _scores(problem) | normalizer_grad_workspace(problem)


def backward_steps(problem: Problem, results: Mapping[str, ArrayMeta]) -> Sequence[Step]:
    """The weights of the queries, then dq, dv and dk."""
    passes = backward_passes(problem, results, normalizer_grad_workspace(problem), NO_CHUNK)
    return [*normalizer_grad_steps(problem), *(step for each in passes for step in _steps(problem, each))]


def _scores(problem: Problem) -> dict[str, ArrayMeta]:
    return {"scores": workspace(problem, (problem.B, problem.H, problem.Sq, problem.Sk))}


def _steps(problem: Problem, each: Pass) -> list[Step]:
    p, call, x, states = problem, each.call, each.inputs, each.states
    heads, known, how = p.B * p.H, (each.decay, call), each.variant.options
    mask, sums = each.variant.mask, "sums" if call.normalize else ""

    steps = _step(build_scores(p.dtype, mask, **how), heads * call.rows * call.columns, "scores", x, *known)
    if sums:
        args = (sums, each.row_sum, "scores", x.q, states.norm, *known)
        steps += _step(build_sums(p.dtype, **how), heads * call.rows, *args)
    args = (each.out, "scores", sums, x, states.state, states.norm, *known)
    steps += _step(build_product(p.dtype, mask, **how), heads * call.rows * call.Dv, *args)

    width, v = (call.Dv, x.v) if call.normed == OF_COLUMNS else (call.D, x.k)
    finals = (states.state, x, call.D, call.Dv, 0), (states.norm_as_state, x._replace(v=v), 1, width, 1)
    for state, x, rows, width, alone in finals:
        if state.finishes:
            args = (state, x, *known, rows, width, alone)
            steps += _step(build_state(p.dtype, mask, **how), heads * rows * width, *args)
    return steps


def _step(kernel: Kernel, count: int, *args: Argument) -> list[Step]:
    """Return a launch with `count` threads, or none without elements."""
    return [Step(kernel, (cdiv(count, THREADS),), args)] if count else []
