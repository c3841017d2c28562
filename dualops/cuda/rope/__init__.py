"""rope on the GPU: which kernel serves which problem, and the public functions.

simt.py       a thread rotates the same pairs in several heads of a token
naive.py      one thread per pair
tables.py     cos and sin of angles, computed in float64
arguments.py  the arguments of both kernels
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ...spec import rope as SPEC, rope_tables as SPEC_TABLES
from ..launch.operation import Operation
from ..public import Array
from . import naive, simt, tables


def rope(
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    *,
    positions: Array | None = None,
    dim: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    out: tuple[Array, Array] | None = None,
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Rotate the first R dimensions of q and k, in one launch. Su et al. 2021, arXiv:2104.09864.

    q [B, H, S, D], k [B, Hkv, S, D]: device arrays of one dtype (float64, float32, float16, bfloat16), any strides with
    a contiguous last axis. cos, sin of that dtype or of float32 (float64 for float64), with R/2 columns, R at most D,
    in one of two forms: [Smax, R/2] has a row for each position; [B, S, R/2] or [1, S, R/2] has a row for each token.

    positions [S] or [B, S] of int64 or int32: the row of [Smax, R/2] for each token; without them token s uses row s.
    On a GPU their values are not checked, since a check would wait for the GPU. A token whose position has no row
    becomes NaN in its first R dimensions, and nothing is read outside the tables.
    dim: R, if not all of D is rotated. A table may also have R columns with two equal halves, as Hugging Face's
    (half-rotated pairs only); R (or D) decides which of the two it is
    interleaved: dimensions 2i and 2i + 1 are a pair (GPT-J), not i and i + R/2 (Llama, NeoX)
    inplace: overwrite q and k, and return them; their rows may alternate in memory, as in the result of one projection

    Returns (q, k) rotated, of their shapes, dtypes and orders of axes. Arithmetic is float32 (float64 for float64),
    rounded once. out: a pair of arrays to write to, which may be q and k. kernel: "naive" or "simt" instead of the
    best. stream: a stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call. No gradient is recorded: see dualops.torch_bridge.
    """
    given = _results(SPEC.name, inplace, (q, k), out)
    return forward((q, k, cos, sin, positions), (dim, interleaved, inplace), given, kernel, stream)


def rope_backward(
    dq_rotated: Array,
    dk_rotated: Array,
    cos: Array,
    sin: Array,
    *,
    positions: Array | None = None,
    dim: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    out: tuple[Array, Array] | None = None,
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Compute the gradient of `rope` with respect to q and k: the rotation by the opposite angles.

    dq_rotated, dk_rotated: the gradients of rope's results; the other arguments are those of the `rope` call. Returns
    (dq, dk) of their shapes, dtypes and orders of axes; with inplace it overwrites and returns them. out, kernel,
    stream and errors are those of `rope`. cos and sin get no gradient.
    """
    given = _results(f"{SPEC.name}_backward", inplace, (dq_rotated, dk_rotated), out)
    arrays = (dq_rotated, dk_rotated, cos, sin, positions)
    return backward(arrays, (dim, interleaved, inplace), given, kernel, stream)


def rope_tables(
    positions: Array,
    dim: int | None = None,
    *,
    base: float | None = None,
    scaling: tuple[Any, ...] | Mapping[str, Any] | None = None,
    dtype: str = "float32",
    out: tuple[Array, Array] | None = None,
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Compute the tables cos and sin of `rope` for positions.

    positions [S] or [B, S] of int64 or int32, of any sign; dim: R, even; base: of the frequencies base ** (-2i / R),
    10000 if neither base nor scaling gives it. scaling changes the frequencies. It is Hugging Face's dict,
    config.rope_parameters (for a model with several, that of one kind of layers), or a tuple:

    ("linear", factor): divides all frequencies by the factor
    ("llama3", factor, low, high, original): divides frequencies with less than `low` turns in `original` positions by
    the factor, keeps those with more than `high` turns, and interpolates between the two
    ("yarn", factor, original, fast=32, slow=1, attention_factor, truncate=True): the same by pair, between `slow` and
    `fast` turns, rounded outwards to whole pairs; cos and sin are multiplied by attention_factor, by default 0.1
    log(factor) + 1, or the value that a dict's mscale and mscale_all_dim give
    ("dynamic", factor, original, length): the base grows with the length of the sequence beyond `original`; add both to
    a dict, as "max_position_embeddings" and "seq_len", since Hugging Face's dict lacks them

    A dict may have the base, as rope_theta, and a partial_rotary_factor: then dim is D and R is int(D * factor).
    longrope, proportional and multimodal scalings raise an error.

    Returns (cos, sin) [S, R/2] or [B, S, R/2] of `dtype` ("float32", "float64", "float16" or "bfloat16"). Angles,
    cos and sin are computed in float64, and then rounded. out: a pair of arrays to write to. kernel, stream and errors
    are those of `rope`.
    """
    return forward_tables((positions,), (dim, base, scaling, dtype), out, kernel, stream)


def _results(op: str, inplace: Any, inputs: tuple[Any, Any], out: Any) -> Any:
    """Return the arrays for the results, None for new ones. The spec checks that inplace is a truth value."""
    if not isinstance(inplace, (bool, np.bool_)) or not inplace:
        return out
    if out is not None:
        raise TypeError(f"{op}: inplace is True and out is given, expected one of them")
    return inputs


PLACES, PLACES_BACKWARD = ({o.name: o.like for o in outputs} for outputs in (SPEC.outputs, SPEC.gradients))
FORWARD, BACKWARD = ([partial(rung.choices, turn=turn) for rung in (simt, naive)] for turn in (1.0, -1.0))
forward = Operation(SPEC, rungs=FORWARD, inplace=PLACES)
backward = Operation(SPEC, rungs=BACKWARD, backward=True, inplace=PLACES_BACKWARD)
forward_tables = Operation(SPEC_TABLES, rungs=(tables.forward_choices,))
