"""What the gradient of a normalized call needs of each query, before any other launch.

    weight = 1 / n,  n = max(1, |row_sum|)
    term = -sign(row_sum) * (do . o)  if "signed" and |row_sum| > 1, else 0           16 lanes a query

A NaN in row_sum makes both NaN. It reaches the gradients of all tokens before the query.
"""

from __future__ import annotations

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel
from ..launch.arrays import cdiv
from ..launch.step import Step
from ..launch.views import by_token, number_type, start, strided
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from .arguments import is_varlen, workspace

ROWS = THREADS // LANES  # queries of a block


@builds
def build_normalizer_grad(dtype: str, signed: bool) -> Kernel:
    """retention_weights(weights, terms, row_sum, o, do, H, S, Dv): for all tokens of all sequences."""
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


def normalizer_grad_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return a weight and a term for each query of a normalized call."""
    if problem.normalize is None:
        return {}
    shape = problem.arrays["row_sum"].shape
    return {"weights": workspace(problem, shape), "terms": workspace(problem, shape)}


def normalizer_grad_steps(problem: Problem) -> list[Step]:
    """Return the launch, if the call was normalized."""
    p, extra = problem, normalizer_grad_workspace(problem)
    if not extra or not extra["weights"].size:
        return []
    batches, tokens = (1, p.total) if is_varlen(p) else (p.B, p.Sq)
    metas, names = {**p.arrays, **extra}, ("weights", "terms", "row_sum", "o", "do")
    args = (*(by_token(metas, name, is_varlen(p)) for name in names), p.H, tokens, p.Dv)
    kernel = build_normalizer_grad(p.dtype, p.normalize == "signed")
    return [Step(kernel, (batches * p.H * cdiv(tokens, ROWS),), args)]
