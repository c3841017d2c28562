"""rms_norm and layer_norm as operators on rows (`rows.operator`): y = (h - mean) * rstd * (w + offset) + b.

h = x + residual, as it is stored. A warp sends the sum of squares of h about its own mean, and the sum of h; without a
mean, the sum of h * h alone. Kept numbers are summed twice: mean = sum(h) / N, then the sum of (h - mean)^2.

Ba, Kiros & Hinton 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, members, noun, verb
from ..rows.operator import PLAIN, Keeping
from ..tile.numbers import numbers
from ..tile.packed import anew_i32
from ..tile.storage import access, storage
from .merging import listed_means
from .moments import thread_moments
from .staging import shared_weights, weights_layout
from .variant import Variant, params_type
from .verbs import norm_axes, weights


class OwnSmem(NamedTuple):
    """What a norm keeps in shared memory."""

    waiting: Any  # w and b
    listed: Any  # how many columns warps have


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
    mem, vec, axes = storage(variant.dtype), access(variant.dtype, keeping.aligned), norm_axes(variant)
    num, group, VECTOR = numbers(mem.number), keeping.group, vec.vector
    moments, STEP = thread_moments(variant, keeping.vectors), keeping.row_threads * VECTOR
    listed = listed_means(keeping, variant)
    FILL, INPUTS, ADDS = num.zero, 1 + variant.added, variant.added

    @verb
    def add(known, frag, other, present):
        return moments.add(known, frag, present)

    @verb
    def of_warp(known, own):
        total = group.in_warp.sum(known.total) if variant.centred else num.zero
        return group.in_warp.sum(moments.squares(known, total * listed.my_inverse(own.listed))), total

    @verb
    def merge(sent, at, own, N, params):
        inverse_N, row_mean = num.one / mem.number(anew_i32(N)), num.zero
        if variant.centred:
            row_mean, squares = listed.merge(sent, at, own.listed, inverse_N)
        else:
            squares = group.sum(sent, at)
        return row_mean, num.rsqrt(squares * inverse_N + params.eps)

    @verb
    def keep(frag, other, sent, left, N, params):
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
        return row_mean, num.rsqrt(squares / mem.number(N) + params.eps)

    @verb
    def write_kept(frag, at, other, found, own, params, column, inside):
        w_frag, b_frag = cuda.local.array(VECTOR, mem.number), cuda.local.array(VECTOR, mem.number)
        load(w_frag, b_frag, own, params, column, inside)
        for c in range(VECTOR):
            frag[at + c] *= found[1]
            if variant.w is not None:
                frag[at + c] *= w_frag[c]
            if variant.b is not None:
                frag[at + c] += b_frag[c]

    @verb
    def write(frag, at, other, found, own, params, column, inside):
        if variant.centred:
            for c in range(at, at + VECTOR):
                frag[c] -= found[0]
        write_kept(frag, at, other, found, own, params, column, inside)

    @verb
    def end(found, params, place):
        if variant.statistics:
            axes.write_statistics(place, params, found[0], found[1])

    own_weights = _shared if keeping.columns else _loaded
    load, memory = own_weights(variant, keeping, listed)
    return members(locals(), none=moments.none, **memory)


def _loaded(variant: Variant, keeping: Keeping, listed: Any) -> tuple[Any, dict[str, Any]]:
    """The verb (w_frag, b_frag, own, params, column, inside): load w + offset and b of an access; no shared memory."""
    w_and_b = weights(variant, keeping.aligned)

    @verb
    def load(w_frag, b_frag, own, params, column, inside):
        w_and_b.load_w_plus(w_frag, 0, params.w, column, inside, params.offset)
        w_and_b.load_b(b_frag, 0, params.b, column, inside)

    return load, {name: made for name, made in PLAIN.items() if name != "end"}


def _shared(variant: Variant, keeping: Keeping, listed: Any) -> tuple[Any, dict[str, Any]]:
    """The same verb, which reads them from shared memory; and the operator's verbs of that."""
    w_and_b = shared_weights(weights_layout(keeping.columns, variant), True, variant)

    @verb
    def load(w_frag, b_frag, own, params, column, inside):
        w_and_b.recall_w(w_frag, 0, own.waiting, column, params.offset)
        w_and_b.recall_b(b_frag, 0, own.waiting, column)

    @verb
    def smem():
        return OwnSmem(w_and_b.smem(), listed.smem())

    @verb
    def prepare(own, N, share):
        listed.fill(own.listed, N, share)

    @verb
    def init(own):
        w_and_b.init(own.waiting)

    @verb
    def fetch(own, params, columns):
        w_and_b.copy(own.waiting, params.w, params.b, columns)

    @verb
    def wait(own):
        w_and_b.wait(own.waiting)

    return load, {"smem": smem, "prepare": prepare, "init": init, "fetch": fetch, "wait": wait}
