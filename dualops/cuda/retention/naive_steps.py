"""The gradient of log_decay, the first idea: what passes over each step, a number for each query and step.

    1  passing [B, H, S + 1, S]: of row i and step t sum_(j < t) s_ij ds_ij, and what q_i has of the initial state
       0 where t > i; in row S the same of dstate, which is as one more query
    2  dlog_decay_t = sum over rows i >= t

Memory beside the results: as many numbers as scores, and a row. All sums are compensated.
"""

from __future__ import annotations

from ..backend import Kernel, builds, i64, kernel, pointer
from ..tile.numbers import numbers
from ..tile.storage import storage
from ..views import number_type, start, strided
from .arguments import call_type, span
from .decays import step_decays
from .naive_kernels import THREADS, my_index


@builds
def build_passing(dtype: str) -> Kernel:
    """retention_naive_passing(passing, scores, q, k, do, v, weights, terms, (state, norm, dstate, dnorm), decay, ends,
    call, B, begins, norm_begins, back_begins, back_norm_begins). A row a thread.

    scores, call: those of the pass dq, whose rows are do and whose states are [Dv, D]; the four flags say which of the
    states are there.
    """
    mem, decays = storage(dtype), step_decays(dtype)
    num = numbers(mem.number)

    @kernel(
        *[pointer(mem.number)] * 2,
        *[strided(dtype, 3)] * 4,
        *[number_type(dtype, 3)] * 2,
        *[number_type(dtype, 4), number_type(dtype, 3)] * 2,
        decays.argument,
        strided("int32", 1),
        call_type(dtype),
        *[i64] * 5,
        threads=THREADS,
    )
    def retention_naive_passing(
        passing,
        scores,
        q,
        k,
        do,
        v,
        weights,
        terms,
        state,
        norm,
        dstate,
        dnorm,
        decay,
        ends,
        call,
        B,
        begins,
        norm_begins,
        back_begins,
        back_norm_begins,
    ):
        index = my_index()
        head, r = index // (call.rows + 1), index % (call.rows + 1)
        b, h = head // call.H, head % call.H
        if b < B:
            first, count, _ = span(ends, call, b)
            mine = decays.of(decay, call, b, h, first, count)
            total, lost = num.zero, num.zero
            s, ds = start(state, b, h, 0), start(dstate, b, h, 0)
            n, dn = start(norm, b, h, 0), start(dnorm, b, h, 0)
            if r < count:
                q_row, do_row = start(q, b, h, first + r), start(do, b, h, first + r)
                weight, term = call.scale, num.one
                if call.row_weighted != 0:
                    weight *= weights.data[start(weights, b, h, first + r)]
                if call.row_term != 0:
                    term = terms.data[start(terms, b, h, first + r)]
                factor = decays.between(mine, 0, r + call.later) * weight
                for d in range(call.Dv):
                    query = factor * mem.load(q.data, q_row + d)
                    if begins != 0:
                        for e in range(call.D):
                            kept = state.data[s + e * state.strides[2] + d * state.strides[3]]
                            more = query * kept * mem.load(do.data, do_row + e)
                            total, lost = num.add_compensated(total, lost, more)
                    if norm_begins != 0:
                        more = query * norm.data[n + d * norm.strides[2]] * term
                        total, lost = num.add_compensated(total, lost, more)
                weight = num.one
                if call.row_weighted != 0:
                    weight = weights.data[start(weights, b, h, first + r)]
                for c in range(count):
                    passing[index * call.columns + c] = total if c <= r else num.zero
                    if c < r:
                        k_row, product, rest = start(k, b, h, first + c), num.zero, num.zero
                        for d in range(call.Dv):
                            more = mem.load(q.data, q_row + d) * mem.load(k.data, k_row + d)
                            product, rest = num.add_compensated(product, rest, more)
                        score = scores[(head * call.rows + r) * call.columns + c]
                        total, lost = num.add_compensated(total, lost, product * score * weight)
            elif r == call.rows:
                over = decays.between(mine, 0, count)
                for d in range(call.Dv):
                    if (begins != 0) & (back_begins != 0):
                        for e in range(call.D):
                            more = state.data[s + e * state.strides[2] + d * state.strides[3]] * over
                            more *= dstate.data[ds + e * dstate.strides[2] + d * dstate.strides[3]]
                            total, lost = num.add_compensated(total, lost, more)
                    if (norm_begins != 0) & (back_norm_begins != 0):
                        more = norm.data[n + d * norm.strides[2]] * dnorm.data[dn + d * dnorm.strides[2]] * over
                        total, lost = num.add_compensated(total, lost, more)
                for c in range(count):
                    passing[index * call.columns + c] = total
                    k_row, v_row = start(k, b, h, first + c), start(v, b, h, first + c)
                    factor = decays.between(mine, c + call.later, count)
                    for d in range(call.Dv):
                        key = factor * mem.load(k.data, k_row + d)
                        if back_begins != 0:
                            for e in range(call.D):
                                more = dstate.data[ds + e * dstate.strides[2] + d * dstate.strides[3]]
                                more *= key * mem.load(v.data, v_row + e)
                                total, lost = num.add_compensated(total, lost, more)
                        if back_norm_begins != 0:
                            more = key * dnorm.data[dn + d * dnorm.strides[2]]
                            total, lost = num.add_compensated(total, lost, more)

    return retention_naive_passing


@builds
def build_step_gradient(dtype: str) -> Kernel:
    """retention_naive_step_gradient(dlogs, passing, ends, call, B). A step a thread."""
    num = numbers(storage(dtype).number)

    @kernel(
        number_type(dtype, 3),
        pointer(storage(dtype).number),
        strided("int32", 1),
        call_type(dtype),
        i64,
        threads=THREADS,
    )
    def retention_naive_step_gradient(dlogs, passing, ends, call, B):
        index = my_index()
        head, t = index // call.columns, index % call.columns
        b, h = head // call.H, head % call.H
        if b < B:
            first, count, _ = span(ends, call, b)
            if t < count:
                rows = head * (call.rows + 1)
                total, lost = passing[(rows + call.rows) * call.columns + t], num.zero
                for i in range(t, count):
                    total, lost = num.add_compensated(total, lost, passing[(rows + i) * call.columns + t])
                dlogs.data[start(dlogs, b, h, first + t)] = total

    return retention_naive_step_gradient
