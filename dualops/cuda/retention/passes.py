"""Retention and its gradient as passes of one kind. A pass has arrays in the roles of rows and columns, and a
direction.

    o  = pass(q, k, v)      with the state of k and v, from the first token on
    dq = pass(do, v, k)     the same state, transposed
    dv = pass(k, q, do)     from the last token on, with the gradient of the state: it begins as dstate
    dk = pass(v, do, q)     the same, transposed

dq_i = sum_j gamma^(i - j) (do_i . v_j) k_j is retention itself. dv and dk are retention with reversed time. If results
were divided by n_i, do_i has the weight 1 / n_i, and the term -sign(r_i) * (do_i . o_i) is added to the score do_i .
v_j. This term acts like one more column of ones in v: the state of that column is the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ..launch.views import absent, by_token, whole
from .arguments import (
    ABS,
    LONGEST_CHUNK,
    NO_CHUNK,
    OF_COLUMNS,
    OF_ROWS,
    SIGNED,
    Call,
    Inputs,
    State,
    Variant,
    is_varlen,
    slots_of,
    workspace,
)
from .decays import logs_of, prefix_sums_of

NOTHING, NO_STATE, NO_NORM = absent(3), absent(4), absent(3)
TILED = ("q", "k", "v", "do")  # the arrays that kernels load by tiles
OFF = ("row_weighted", "row_term", "column_weighted", "column_term", "normed", "normalize", "sums")  # by default


@dataclass(frozen=True)
class States:
    """The states [B, H, D, Dv] and norms [B, H, width] with which a pass begins, and those that it leaves."""

    initial: Strided = NO_STATE
    final: Strided = NO_STATE
    initial_norm: Strided = NO_NORM
    final_norm: Strided = NO_NORM

    @property
    def begin(self) -> bool:
        return bool(self.initial.data or self.initial_norm.data)

    @property
    def end(self) -> bool:
        return bool(self.final.data or self.final_norm.data)

    @property
    def state(self) -> State:
        return _both_ends(self.initial, self.final)

    @property
    def norm(self) -> State:
        return _both_ends(self.initial_norm, self.final_norm)

    @property
    def norm_as_state(self) -> State:
        """The norm as a state of one row."""
        return _both_ends(*(x._replace(strides=(*x.strides[:2], 0, x.strides[2])) for x in self.norm[:2]))


def _both_ends(initial: Strided, final: Strided) -> State:
    return State(initial, final, int(bool(initial.data)), int(bool(final.data)))


@dataclass(frozen=True)
class Pass:
    """One pass: its arrays by role, its sizes and its options."""

    out: Strided
    inputs: Inputs
    variant: Variant
    call: Call
    states: States
    gamma: Strided
    row_sum: Strided
    logs: Strided  # log_decay
    prefix_sums: Strided  # its prefix sums

    @property
    def decay(self) -> Strided:
        """The decay argument of kernels that read prefix sums: the sums, or gamma."""
        return self.prefix_sums if self.variant.stepwise else self.gamma

    @property
    def has_states(self) -> bool:
        return self._kept(self.states.final)

    @property
    def has_norms(self) -> bool:
        return self.call.normed != 0 and self._kept(self.states.final_norm)

    def _kept(self, final: Strided) -> bool:
        """Whether states are needed, between chunks or at an end."""
        return self.call.chunk < self.call.columns or self.states.begin or bool(final.data)

    def chunks(self, final: Strided) -> int:
        """Return how many chunks of a sequence add to a state. Only the final state needs the last chunk."""
        return self.call.slots if final.data else max(self.call.slots - 1, 0)


def passes_of(problem: Problem, results: Mapping[str, ArrayMeta], chunk: int) -> tuple[Pass, ...]:
    """Return the pass of forward, or those of dq, dv and dk. chunk: rows that read each other directly."""
    if "do" in problem.arrays:
        return _backward_passes(problem, results, chunk)
    p, metas = problem, {**problem.arrays, **results}
    o, q, k, v = (by_token(metas, name, is_varlen(p)) for name in ("o", "q", "k", "v"))
    begin, end = whole(p.arrays, "initial_state", 4), whole(results, "state", 4)
    mask = whole(p.arrays, "mask", 3)
    states = States(begin, end, whole(p.arrays, "initial_norm", 3), whole(results, "state_norm", 3))
    normalize, normed = {None: (0, 0), "signed": (SIGNED, OF_ROWS), "abs": (ABS, 0)}[p.normalize]
    call = _call(p, chunk, states)._replace(normalize=normalize, normed=normed, sums=int(p.return_row_sum))
    row_sum = by_token(results, "row_sum", is_varlen(p))
    return (_pass(p, o, Inputs(q, k, v, NOTHING, NOTHING, mask), call, states, row_sum),)


def normalizer_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return a weight and a term for each query of a normalized call's gradient."""
    if problem.normalize is None or "do" not in problem.arrays:
        return {}
    shape = problem.arrays["row_sum"].shape
    return {"weights": workspace(problem, shape), "terms": workspace(problem, shape)}


def _backward_passes(problem: Problem, results: Mapping[str, ArrayMeta], chunk: int) -> tuple[Pass, ...]:
    p, metas = problem, {**problem.arrays, **results, **normalizer_workspace(problem)}
    q, k, v, do, dq, dk, dv = (by_token(metas, name, is_varlen(p)) for name in ("q", "k", "v", "do", "dq", "dk", "dv"))
    initial, dstate, dinitial = (whole(metas, name, 4) for name in ("initial_state", "dstate", "dinitial_state"))
    norm, dnorm, dinitial_norm = (whole(metas, name, 3) for name in ("initial_norm", "dstate_norm", "dinitial_norm"))
    signed, weighted = int(p.normalize == "signed"), int(p.normalize is not None)
    normed, mask = OF_COLUMNS * signed, whole(p.arrays, "mask", 3)

    forth = States(transposed(initial), initial_norm=norm)
    call = _call(p, chunk, forth)._replace(D=p.Dv, Dv=p.D, row_weighted=weighted, row_term=signed, normed=normed)
    weights, terms = (by_token(metas, name, is_varlen(p)) for name in ("weights", "terms"))
    pass_dq = _pass(p, dq, Inputs(do, v, k, weights, terms, mask), call, forth)

    mask = mask._replace(strides=(mask.strides[0], mask.strides[2], mask.strides[1]))
    back = States(dstate, dinitial)
    call = _call(p, chunk, back)._replace(rows=p.Sk, columns=p.Sq, offset=0, direction=-1, later=0)
    call = call._replace(kept_scale=p.scale, state_scale=1.0, column_weighted=weighted)
    pass_dv = _pass(p, dv, Inputs(k, q, do, weights, terms, mask), call, back)

    back = States(transposed(dstate), initial_norm=dnorm, final_norm=dinitial_norm)
    first = _call(p, chunk, back).first_chunk
    call = call._replace(D=p.Dv, Dv=p.D, first_chunk=first, column_term=signed, normed=normed)
    pass_dk = _pass(p, dk, Inputs(v, do, q, weights, terms, mask), call, back)
    return pass_dq, pass_dv, pass_dk


def _pass(
    problem: Problem, out: Strided, inputs: Inputs, call: Call, states: States, row_sum: Strided = NOTHING
) -> Pass:
    p, variant = problem, variant_of(problem)
    logs = logs_of(p.arrays, "log_decay", is_varlen(p))
    prefix_sums = prefix_sums_of(p) if variant.stepwise else NOTHING
    return Pass(out, inputs, variant, call, states, whole(p.arrays, "gamma", 1), row_sum, logs, prefix_sums)


def _call(problem: Problem, chunk: int, states: States) -> Call:
    """Return the sizes and options of a pass of queries over keys."""
    p, state_chunk = problem, min(chunk, LONGEST_CHUNK)
    alone = chunk >= p.Sk
    return Call(
        B=p.B,
        H=p.H,
        rows=p.Sq,
        columns=p.Sk,
        D=p.D,
        Dv=p.Dv,
        offset=p.Sk - p.Sq,
        direction=1,
        chunk=chunk,
        first_chunk=0 if states.begin else NO_CHUNK if alone else 1,
        state_chunk=state_chunk,
        slots=slots_of(p, state_chunk)[0],
        later=1,
        has_gamma=int("gamma" in p.arrays),
        varlen=int(is_varlen(p)),
        scale=p.scale,
        kept_scale=1.0,
        state_scale=p.scale,
        ends=whole(p.arrays, "cu_seqlens", 1),
        **dict.fromkeys(OFF, 0),
    )


def transposed(state: Strided) -> Strided:
    """Return a state [B, H, D, Dv] as one [B, H, Dv, D]."""
    b, h, d, v = state.strides
    return state._replace(strides=(b, h, v, d))


def variant_of(problem: Problem) -> Variant:
    """Return what kernels for this problem are built for. Aligned: all rows of q, k, v and do are whole 16-byte
    vectors.
    """
    p, vector = problem, 16 // problem.itemsize
    metas = [p.arrays[name] for name in TILED if name in p.arrays]
    sizes = [p.D, p.Dv, *(stride for meta in metas for stride in meta.strides[:-1])]
    aligned = all(size % vector == 0 for size in sizes) and all(meta.pointer % 16 == 0 for meta in metas)
    return Variant(p.dtype, aligned, p.dtype_of("mask") or "", p.normalize is not None, "log_decay" in p.arrays)
