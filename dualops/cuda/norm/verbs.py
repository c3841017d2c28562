"""Verbs of the norms: addresses of rows, and weights as numbers."""

from __future__ import annotations

from collections.abc import Callable

from ...spec.meta import compute_dtype
from ..compiler.backend import Members, cuda, i32, kept_noun, members, verb
from ..row_walk import row_axes
from ..tile.numbers import numbers
from ..tile.storage import access, storage
from .arguments import Variant


@kept_noun
def norm_axes(variant: Variant) -> Members:
    """The verbs that find rows in memory, and read and write their statistics."""
    mem, num = storage(compute_dtype(variant.dtype)), numbers(storage(variant.dtype).number)
    axes = row_axes(variant.rank)

    @verb
    def statistics(place, inputs):
        """Return the row's mean (0 for rms_norm) and rstd."""
        row_mean, row_rstd = num.zero, mem.load(inputs.rstd.data, axes.start(place, inputs.rstd))
        if variant.centred:
            row_mean = mem.load(inputs.mean.data, axes.start(place, inputs.mean))
        return row_mean, row_rstd

    @verb
    def write_statistics(place, params, row_mean, row_rstd):
        mem.store(params.rstd.data, axes.start(place, params.rstd), row_rstd)
        if variant.centred:
            mem.store(params.mean.data, axes.start(place, params.mean), row_mean)

    return members(locals(), **axes.members())


@kept_noun
def weights(variant: Variant, aligned: bool) -> Members:
    """The verbs that load w and b, in the variant's dtypes, for one access to x; zeros if keep is false.

    If a call has no w or no b, nothing is loaded for it.
    """
    load_w, load_b = (_loads(variant.dtype, dtype, aligned) for dtype in (variant.w, variant.b))
    count = access(variant.dtype, aligned).vector

    @verb
    def load_w_plus(frag, at, w, index, keep, offset):
        """Load w + offset."""
        if variant.w is not None:
            load_w(frag, at, w, index, keep)
            for c in range(at, at + count):
                frag[c] += offset

    @verb
    def smem():
        """Return nothing: w and b are not in shared memory (`shared_weights`)."""
        return i32(0)

    @verb
    def load(w_frag, b_frag, waiting, params, column, inside):
        """Load w + offset and b of an access to x."""
        load_w_plus(w_frag, 0, params.w, column, inside, params.offset)
        load_b(b_frag, 0, params.b, column, inside)

    return members(
        locals(),
        load_w=load_w,  # (frag, at, w, index, keep)
        load_b=load_b,  # (frag, at, b, index, keep)
    )


def _loads(dtype: str, weights_dtype: str | None, aligned: bool) -> Callable[..., None]:
    """Return the verb (frag, at, w, index, keep) for weights of weights_dtype with an x of dtype."""
    mem, num = storage(weights_dtype or dtype), numbers(storage(dtype).number)
    count = access(dtype, aligned).vector

    @verb
    def load_none(frag, at, w, index, keep):
        pass

    @verb
    def load_vectors(frag, at, w, index, keep):
        for c in range(0, count, mem.vector):
            mem.load_vector(frag, at + c, w, index + c, keep, num.zero)

    @verb
    def load_one(frag, at, w, index, keep):
        frag[at] = num.zero
        if keep:
            frag[at] = mem.load(w, index)

    if weights_dtype is None:
        return load_none
    return load_vectors if aligned else load_one


@verb
def meet_block():
    """A barrier of the block."""
    cuda.syncthreads()
