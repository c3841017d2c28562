"""The sums of log_decay that weights are made of, before any other launch of a call.

    mark n of a sequence = sum over its tokens t < n of max(log_decay_t, LEAST_LOG)        n = 0 .. count

Weights are exp of a difference of two marks, which far into a sequence is a small difference of large numbers. So sums
are made in float64 with what each addition leaves over, and kept as two numbers of the arithmetic's type: what is
between two marks is then known to eps of itself, and to about eps^2 of the marks.

A block takes a head of a sequence, TILE tokens after TILE tokens, EACH neighbours a thread, whose sums meet in shared
memory in log2(THREADS) steps. A sum is made in an order that depends on its own place alone.

Shared memory: 2 * 2 * THREADS numbers of float64.
"""

from __future__ import annotations

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ...spec.retention import LEAST_LOG
from ..backend import Kernel, builds, cuda, f64, i64, kernel, verb
from ..step import Step
from ..tile.storage import storage
from ..views import number_type, start, strided
from .arguments import Call, call_type, is_varlen, span, workspace

THREADS, EACH = 128, 8
STEPS = THREADS.bit_length() - 1
TILE = THREADS * EACH
NOTHING, LEAST = f64(0), f64(LEAST_LOG)


@verb
def add(total, rest, x):
    """total + x, and what that leaves over added to the rest."""
    new = total + x
    of_x = new - total
    return new, rest + ((total - (new - of_x)) + (x - of_x))


@builds
def build_marks(dtype: str) -> Kernel:
    """retention_marks(marks, logs, ends, call). A head of a sequence a block."""
    number = storage(dtype).number

    @verb
    def put(marks, at, total, rest):
        marks.data[at] = number(total)
        marks.data[at + 1] = number((total - f64(number(total))) + rest)

    @verb
    def log_of(logs, b, h, token):
        x = f64(logs.data[start(logs, b, h, token)])
        return x if x > LEAST else LEAST

    @kernel(
        *[number_type(dtype, 3)] * 2,
        strided("int32", 1),
        call_type(dtype),
        threads=THREADS,
    )
    def retention_marks(marks, logs, ends, call):
        smem = cuda.shared.array(0, f64, alignment=16)
        tid = cuda.threadIdx.x
        head = i64(cuda.blockIdx.x)
        b, h = head // call.H, head % call.H
        first, _, count = span(ends, call, b)
        if tid == 0:
            put(marks, start(marks, b, h, first), NOTHING, NOTHING)
        before, before_rest = NOTHING, NOTHING  # of the tiles so far
        for t0 in range(0, count, TILE):
            mine = t0 + tid * EACH
            total, rest = NOTHING, NOTHING
            for t in range(mine, min(mine + EACH, count)):
                total, rest = add(total, rest, log_of(logs, b, h, first + t))
            for step in range(STEPS):
                at = step % 2 * 2 * THREADS
                smem[at + tid] = total
                smem[at + THREADS + tid] = rest
                cuda.syncthreads()
                other = tid - (1 << step)
                if other >= 0:
                    total, rest = add(smem[at + other], rest + smem[at + THREADS + other], total)
            at = STEPS % 2 * 2 * THREADS
            smem[at + tid] = total
            smem[at + THREADS + tid] = rest
            cuda.syncthreads()
            total, rest = before, before_rest
            if tid > 0:
                total, rest = add(before, before_rest + smem[at + THREADS + tid - 1], smem[at + tid - 1])
            for t in range(mine, min(mine + EACH, count)):
                total, rest = add(total, rest, log_of(logs, b, h, first + t))
                put(marks, start(marks, b, h, first + t + 1), total, rest)
            before, before_rest = add(before, before_rest + smem[at + 2 * THREADS - 1], smem[at + THREADS - 1])

    return retention_marks


def marks_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Two numbers for each token, and for the place after each sequence's last one, where there is a log_decay."""
    p = problem
    if "log_decay" not in p.arrays:
        return {}
    places = (1, p.H, p.total + p.B) if is_varlen(p) else (p.B, p.H, p.Sk + 1)
    return {"marks": workspace(p, (*places, 2))}


def marks_of(problem: Problem) -> Strided:
    """Along batch, head and token; sequence b of varlen has its first mark b places after its first token."""
    meta = marks_workspace(problem)["marks"]
    b, h, t, _ = meta.strides
    return Strided("marks", (t if is_varlen(problem) else b, h, t))


def marks_steps(problem: Problem, logs: Strided, ends: Strided, call: Call) -> list[Step]:
    """The launch, where there is a log_decay. call: of any pass."""
    heads = problem.B * problem.H
    if not logs.data or not heads:
        return []
    return [Step(build_marks(problem.dtype), (heads,), (marks_of(problem), logs, ends, call), 4 * THREADS * 8)]
