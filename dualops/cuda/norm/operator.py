"""rms_norm and layer_norm as operators on rows (`rows.operator`): y = (h - mean) * rstd * (w + offset) + b.

h = x + residual, rounded to the storage dtype. Each thread has the mean of its numbers so far, and the sum of squared
differences to it. A warp sends its sum of squared differences to its own mean, and its sum of h. rms_norm has no mean,
and only the sum of h * h. To merge two sets of n and m numbers, the squares are added, and
n * m / (n + m) * (difference of means)^2 (Chan et al. 1979). Kept numbers are summed twice instead: mean = sum(h) / N,
then the sum of (h - mean)^2.

Ba, Kiros & Hinton 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, i32, noun, verb
from ..rows.operator import Keeping
from ..tile.numbers import numbers
from ..tile.packed import recomputed_i32
from ..tile.storage import access, storage
from .arguments import Variant, norm_axes, params_type, weights
from .staging import shared_weights, weights_layout


class Known(NamedTuple):
    """The sums of a thread's numbers so far; without a mean, only the sum of squares."""

    total: Any
    mean: Any
    squares: Any  # sum of squared differences to the mean
    columns: Any  # the number of these numbers


class Own(NamedTuple):
    """A norm's params, and in shared memory w and b, and each warp's number of columns and its reciprocal."""

    params: Any
    waiting: Any
    columns: Any
    inverse: Any


@dataclass(frozen=True)
class Norm:
    """The operator of a variant."""

    variant: Variant

    @property
    def dtype(self) -> str:
        return self.variant.dtype

    @property
    def rank(self) -> int:
        return self.variant.rank

    @property
    def inputs(self) -> int:
        return 1 + self.variant.added

    @property
    def params_type(self) -> Any:
        return params_type(self.variant)

    def named(self, walk: str) -> str:
        return f"norm_{walk}"

    def operator(self, keeping: Keeping) -> Any:
        return norm_operator(self.variant, keeping)

    def shared_bytes(self, columns: int) -> int:
        return weights_layout(columns, self.variant).nbytes


@noun
def norm_operator(variant: Variant, keeping: Keeping) -> Members:
    """The verbs of a norm."""
    mem, VECTOR, axes = storage(variant.dtype), access(variant.dtype, keeping.aligned).vector, norm_axes(variant)
    num, group, STEP = numbers(mem.number), keeping.group, keeping.row_threads * VECTOR
    LISTED = group.PARTS if variant.centred else 1
    columns_of = columns_of_warps(keeping.row_threads, VECTOR, mem.number)
    FILL, ADDS = num.zero, variant.added
    if keeping.columns:
        w_and_b = shared_weights(weights_layout(keeping.columns, variant), True, variant)
    else:
        w_and_b = weights(variant, keeping.aligned)

    @verb
    def none():
        return Known(num.zero, num.zero, num.zero, num.zero)

    @verb
    def _squares_of(frag, mean, present):
        squares = num.zero
        for v in range(keeping.vectors):
            few = num.zero  # the sum of one vector, so that no chain of additions is long
            for c in range(v * VECTOR, (v + 1) * VECTOR):
                apart = frag[c] - mean if variant.centred else frag[c]
                few += apart * apart
            squares += few if not variant.centred or present > i32(v) else num.zero
        return squares

    @verb
    def add(known, frag, other, present):
        if not variant.centred:
            return Known(num.zero, num.zero, known.squares + _squares_of(frag, num.zero, present), num.zero)
        total = num.zero
        for v in range(keeping.vectors):
            few = num.zero
            for c in range(v * VECTOR, (v + 1) * VECTOR):
                few += frag[c]
            total += few
        count = mem.number(i32(i32(min(max(present, i32(0)), i32(keeping.vectors))) * VECTOR))
        mean = total * num.reciprocal(max(count, num.one))
        apart, columns = mean - known.mean, known.columns + count
        weight = count * num.reciprocal(max(columns, num.one))
        squares = _squares_of(frag, mean, present) + apart * apart * known.columns * weight
        return Known(known.total + total, known.mean + apart * weight, known.squares + squares, columns)

    @verb
    def of_warp(known, own):
        total, squares = num.zero, known.squares
        if variant.centred:
            total = group.in_warp.sum(known.total)
            apart = known.mean - total * own.inverse[group.my_part()]
            squares += known.columns * apart * apart
        return group.in_warp.sum(squares), total

    @verb
    def merge(sent, at, own, N):
        """Return the row's mean and rstd."""
        inverse_N, row_mean, squares = num.one / mem.number(recomputed_i32(N)), num.zero, group.sum(sent, at)
        if variant.centred:
            total, between = num.zero, num.zero
            for k in range(group.LANE_PARTS):
                if group.given(k):
                    total += group.b(sent, at, k)
            row_mean = group.lanes.sum(total) * inverse_N
            for k in range(group.LANE_PARTS):
                if group.given(k):
                    apart = group.b(sent, at, k) * own.inverse[group.part(k)] - row_mean
                    between += own.columns[group.part(k)] * apart * apart
            squares += group.lanes.sum(between)
        return row_mean, num.rsqrt(squares * inverse_N + own.params.eps)

    @verb
    def keep(frag, other, sent, left, own, N):
        """Return the row's mean and rstd; numbers become h - mean."""
        row_mean, squares = num.zero, num.zero
        if variant.centred:
            total = num.zero
            for i in range(len(frag)):
                total += frag[i]
            row_mean = group.sum_of_row(total, 0, sent) / mem.number(N)
            for j in range(keeping.vectors):
                inside = left > j * STEP
                for i in range(j * VECTOR, (j + 1) * VECTOR):
                    frag[i] = frag[i] - row_mean if inside else num.zero
        for i in range(len(frag)):
            squares += frag[i] * frag[i]
        squares = group.sum_of_row(squares, 1, sent)
        return row_mean, num.rsqrt(squares / mem.number(N) + own.params.eps)

    @verb
    def write_kept(frag, at, other, found, own, column, inside):
        w_frag, b_frag = cuda.local.array(VECTOR, mem.number), cuda.local.array(VECTOR, mem.number)
        w_and_b.load(w_frag, b_frag, own.waiting, own.params, column, inside)
        for c in range(VECTOR):
            frag[at + c] *= found[1]
            if variant.w is not None:
                frag[at + c] *= w_frag[c]
            if variant.b is not None:
                frag[at + c] += b_frag[c]

    @verb
    def write(frag, at, other, found, own, column, inside):
        if variant.centred:
            for c in range(at, at + VECTOR):
                frag[c] -= found[0]
        write_kept(frag, at, other, found, own, column, inside)

    @verb
    def end(found, own, place):
        if variant.statistics:
            axes.write_statistics(place, own.params, found[0], found[1])

    @verb
    def smem(params):
        columns, inverse = cuda.shared.array(LISTED, mem.number), cuda.shared.array(LISTED, mem.number)
        return Own(params, w_and_b.smem(), columns, inverse)

    @verb
    def prepare(own, N, share):
        if variant.centred:
            for part in range(cuda.threadIdx.x, LISTED, keeping.row_threads):
                own.columns[part] = columns_of(part, N, share)
                own.inverse[part] = num.one / max(own.columns[part], num.one)
            group.meet()

    @verb
    def init(own):
        w_and_b.init(own.waiting)

    @verb
    def fetch(own, columns):
        w_and_b.copy(own.waiting, own.params.w, own.params.b, columns)

    @verb
    def wait(own):
        w_and_b.wait(own.waiting)

    return locals()


def columns_of_warps(row_threads: int, vector: int, number: Any) -> Callable[[Any, Any, Any], Any]:
    """Return the verb (part, N, share) -> the number of a row's columns that a warp of the cluster has."""
    WARPS, WARP_COLUMNS = max(row_threads // 32, 1), min(row_threads, 32) * vector

    @verb
    def columns_of(part, N, share):
        rank, warp = part // WARPS, part % WARPS
        width = max(min(share, N - rank * share), 0)
        whole, rest = width // (WARPS * WARP_COLUMNS), width % (WARPS * WARP_COLUMNS)
        return number(i32(whole * WARP_COLUMNS + max(min(rest - warp * WARP_COLUMNS, WARP_COLUMNS), 0)))

    return columns_of
