"""Retention, the first idea: all scores are in memory, and each element has a thread. Readers start here.

    1  scores [B, H, rows, columns] = scale * (q_r . k_c) * gamma^(r + offset - c), or times the mask;  -0: not seen
    2  sums [B, H, rows] = sums of the scores or of their magnitudes; rows are divided by max(1, |sum|)
    3  out = scores @ v + state_scale * gamma^(r + later) * q_r @ state,  divided
    4  state = gamma^T * state + kept_scale * sum_t gamma^(T - t - later) * k_t^T v_t

`state` is the one with which a sequence of T tokens begins. The norm is the state for k = 1, or for v = 1. This is the
parallel form. All forms agree, so it serves every forward. The gradient is three such passes (`passes`), in which
columns may have weights and scores may have terms. simt_steps.py computes log_decay's gradient.

Workspace: itemsize * B * H * rows * columns bytes, with an itemsize of 4 (8 for float64). The products skip a pair that
is not seen, so a NaN after a row does not reach it. All sums are compensated, because a thread adds as many numbers as
there are tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, builds, cuda, i64, kernel, pointer, verb
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Argument, Step
from ..launch.views import number_type, start, strided
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import ABS, NO_CHUNK, OF_COLUMNS, call_type, inputs_type, origin, span, state_type, workspace
from .decays import decays_of, prefix_sums_workspace
from .launches import How, choice_of
from .passes import Pass

THREADS = 256  # of a block


@verb
def my_index():
    """Return the element of this thread. Neighbouring threads have neighbouring elements."""
    return i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x


@builds
def build_scores(dtype: str, mask_dtype: str, stepwise: bool) -> Kernel:
    """retention_naive_scores(scores, x, decay, call). A score a thread."""
    mem, num, decays = storage(dtype), numbers(storage(dtype).number), decays_of(dtype, stepwise)
    mask_mem, masked = storage(mask_dtype or dtype), bool(mask_dtype)

    @kernel(pointer(mem.number), inputs_type(dtype, mask_dtype), decays.argument, call_type(dtype), threads=THREADS)
    def retention_naive_scores(scores, x, decay, call):
        index = my_index()
        head, r, c = index // call.columns // call.rows, index // call.columns % call.rows, index % call.columns
        b, h = head // call.H, head % call.H
        if b < call.B:
            first, rows, columns = span(call, b)
            seen = (r < rows) & (c < columns)
            if not masked:
                seen &= c <= r + call.offset
            score = num.minus_zero
            if seen:
                row = origin(call, first, rows) + call.direction * r
                column = origin(call, first, columns) + call.direction * c
                q_row, k_row = start(x.q, b, h, row), start(x.k, b, h, column)
                score, lost = num.zero, num.zero
                for d in range(call.D):
                    product = mem.load(x.q.data, q_row + d) * mem.load(x.k.data, k_row + d)
                    score, lost = num.add_compensated(score, lost, product)
                if call.row_term != 0:
                    score += x.terms.data[start(x.terms, b, h, row)]
                if call.column_term != 0:
                    score += x.terms.data[start(x.terms, b, h, column)]
                if call.column_weighted != 0:
                    score *= x.weights.data[start(x.weights, b, h, column)]
                if masked:
                    score *= mem.number(mask_mem.load(x.mask.data, start(x.mask, h, row, column)))
                else:
                    mine = decays.of(decay, call, b, h, first, rows)
                    score *= decays.between(mine, c + call.later, r + call.offset + call.later)
                score = score * call.scale + num.zero  # not -0: the pair is seen
            scores[index] = score

    return retention_naive_scores


@builds
def build_sums(dtype: str, stepwise: bool) -> Kernel:
    """retention_naive_sums(sums, row_sum, scores, q, norm, decay, call). A row a thread. norm: a `State`."""
    mem, num, decays = storage(dtype), numbers(storage(dtype).number), decays_of(dtype, stepwise)

    @kernel(
        pointer(mem.number),
        number_type(dtype, 3),
        pointer(mem.number),
        strided(dtype, 3),
        state_type(dtype, 3),
        decays.argument,
        call_type(dtype),
        threads=THREADS,
    )
    def retention_naive_sums(sums, row_sum, scores, q, norm, decay, call):
        index = my_index()
        head, r = index // call.rows, index % call.rows
        b, h = head // call.H, head % call.H
        if b < call.B:
            first, rows, columns = span(call, b)
            if r < rows:
                total, lost = num.zero, num.zero
                for c in range(columns):
                    score = scores[index * call.columns + c]
                    total, lost = num.add_compensated(total, lost, abs(score) if call.normalize == ABS else score)
                row = origin(call, first, rows) + call.direction * r
                if norm.begins != 0:
                    mine = decays.of(decay, call, b, h, first, rows)
                    factor = decays.between(mine, 0, r + call.later) * call.state_scale
                    q_row, initial = start(q, b, h, row), norm.initial
                    n_row = start(initial, b, h, 0)
                    for d in range(call.D):
                        more = factor * mem.load(q.data, q_row + d) * initial.data[n_row + d * initial.strides[2]]
                        total, lost = num.add_compensated(total, lost, more)
                sums[index] = total
                if call.sums != 0:
                    row_sum.data[start(row_sum, b, h, row)] = total

    return retention_naive_sums


@builds
def build_product(dtype: str, mask_dtype: str, stepwise: bool) -> Kernel:
    """retention_naive_product(out, scores, sums, x, state, norm, decay, call). An element of the result a thread."""
    mem, num, decays = storage(dtype), numbers(storage(dtype).number), decays_of(dtype, stepwise)

    @kernel(
        strided(dtype, 3),
        *[pointer(mem.number)] * 2,
        inputs_type(dtype, mask_dtype),
        *[state_type(dtype, rank) for rank in (4, 3)],
        decays.argument,
        call_type(dtype),
        threads=THREADS,
    )
    def retention_naive_product(out, scores, sums, x, state, norm, decay, call):
        index = my_index()
        place, e = index // call.Dv, index % call.Dv
        head, r = place // call.rows, place % call.rows
        b, h = head // call.H, head % call.H
        if b < call.B:
            first, rows, columns = span(call, b)
            if r < rows:
                total, lost = num.zero, num.zero
                token0 = origin(call, first, columns)
                for c in range(columns):
                    score = scores[place * call.columns + c]
                    if not num.is_minus_zero(score):
                        value = mem.load(x.v.data, start(x.v, b, h, token0 + call.direction * c) + e)
                        total, lost = num.add_compensated(total, lost, score * value)
                row = origin(call, first, rows) + call.direction * r
                factor = num.zero
                if (state.begins != 0) | (norm.begins != 0):
                    mine = decays.of(decay, call, b, h, first, rows)
                    factor = decays.between(mine, 0, r + call.later) * call.state_scale
                if state.begins != 0:
                    q_row, initial = start(x.q, b, h, row), state.initial
                    at = start(initial, b, h, 0) + e * initial.strides[3]
                    for d in range(call.D):
                        more = factor * mem.load(x.q.data, q_row + d) * initial.data[at + d * initial.strides[2]]
                        total, lost = num.add_compensated(total, lost, more)
                if (norm.begins != 0) & (call.normed == OF_COLUMNS):
                    if call.row_term != 0:
                        factor *= x.terms.data[start(x.terms, b, h, row)]
                    more = factor * norm.initial.data[start(norm.initial, b, h, e)]
                    total, lost = num.add_compensated(total, lost, more)
                if call.row_weighted != 0:
                    total *= x.weights.data[start(x.weights, b, h, row)]
                if call.normalize != 0:
                    size = abs(sums[place])
                    if not size <= num.one:  # a NaN too
                        total /= size
                mem.store(out.data, start(out, b, h, row) + e, total)

    return retention_naive_product


@builds
def build_state(dtype: str, mask_dtype: str, stepwise: bool) -> Kernel:
    """retention_naive_state(state, x, decay, call, D, Dv, alone).

    An element of the final state a thread; D, Dv: its size. alone: k is 1, or the column's term.
    """
    mem, num, decays = storage(dtype), numbers(storage(dtype).number), decays_of(dtype, stepwise)

    @kernel(
        state_type(dtype),
        inputs_type(dtype, mask_dtype),
        decays.argument,
        call_type(dtype),
        *[i64] * 3,
        threads=THREADS,
    )
    def retention_naive_state(state, x, decay, call, D, Dv, alone):
        index = my_index()
        head, d, e = index // Dv // D, index // Dv % D, index % Dv
        b, h = head // call.H, head % call.H
        if b < call.B:
            first, _, count = span(call, b)
            mine = decays.of(decay, call, b, h, first, count)
            total, lost = num.zero, num.zero
            if state.begins != 0:
                at = start(state.initial, b, h, d) + e * state.initial.strides[3]
                total = state.initial.data[at] * decays.between(mine, 0, count)
            for t in range(count):
                token = origin(call, first, count) + call.direction * t
                factor = decays.between(mine, t + call.later, count) * call.kept_scale
                if alone == 0:
                    factor *= mem.load(x.k.data, start(x.k, b, h, token) + d)
                weight = num.one
                if call.column_weighted != 0:
                    weight = x.weights.data[start(x.weights, b, h, token)]
                if (alone != 0) & (call.column_term != 0):
                    term = x.terms.data[start(x.terms, b, h, token)]
                    weight = weight * term if term != num.zero else num.zero
                factor *= weight
                value = mem.load(x.v.data, start(x.v, b, h, token) + e)
                total, lost = num.add_compensated(total, lost, factor * value)
            state.final.data[start(state.final, b, h, d) + e * state.final.strides[3]] = total

    return retention_naive_state


REASON = "the parallel form with all scores in memory, whatever form is requested: to read, not to run"


def choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Return the only way to run forward, or the gradient, except log_decay's."""
    p, backward = problem, "do" in problem.arrays
    if backward and "log_decay" in p.arrays:
        return
    made = {"scores": workspace(p, (p.B, p.H, p.Sq, p.Sk))}  # which the passes share
    if not backward:
        sums = {"sums": workspace(p, (p.B, p.H, p.Sq))} if p.normalize else {}
        made |= sums | prefix_sums_workspace(p)
    yield choice_of("naive", p, results, How(NO_CHUNK, others=partial(_steps, p), workspace=made), None, REASON, 0)


def _steps(problem: Problem, each: Pass) -> list[Step]:
    """Return the launches of a pass: scores, sums, product, states."""
    p, call, x, states = problem, each.call, each.inputs, each.states
    heads, known, stepwise = p.B * p.H, (each.decay, call), each.variant.stepwise
    mask, sums = each.variant.mask, "sums" if call.normalize else ""

    steps = _step(build_scores(p.dtype, mask, stepwise), heads * call.rows * call.columns, "scores", x, *known)
    if sums:
        args = (sums, each.row_sum, "scores", x.q, states.norm, *known)
        steps += _step(build_sums(p.dtype, stepwise), heads * call.rows, *args)
    args = (each.out, "scores", sums, x, states.state, states.norm, *known)
    steps += _step(build_product(p.dtype, mask, stepwise), heads * call.rows * call.Dv, *args)

    width, v = (call.Dv, x.v) if call.normed == OF_COLUMNS else (call.D, x.k)
    finals = (states.state, x, call.D, call.Dv, 0), (states.norm_as_state, x._replace(v=v), 1, width, 1)
    for state, x, rows, width, alone in finals:
        if state.finishes:
            args = (state, x, *known, rows, width, alone)
            steps += _step(build_state(p.dtype, mask, stepwise), heads * rows * width, *args)
    return steps


def _step(kernel: Kernel, count: int, *args: Argument) -> list[Step]:
    """Return a launch with `count` threads, or none without elements."""
    return [Step(kernel, (cdiv(count, THREADS),), args)] if count else []
