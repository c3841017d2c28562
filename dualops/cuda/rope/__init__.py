"""rope on the GPU: which kernel serves which problem, and the public functions.

simt.py     a thread turns the same pairs in several heads of a token
naive.py    one thread a pair
tables.py   cos and sin of angles, computed in float64
arguments.py     the arguments of both kernels
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """q and k with their first R dimensions rotated, in one launch; Su et al. 2021, arXiv:2104.09864.

    q [B, H, S, D], k [B, Hkv, S, D]: device arrays of one dtype (float64, float32, float16, bfloat16), any strides with
    a contiguous last axis. cos, sin of that dtype or of float32 (float64 for float64), with R/2 columns, R at most D,
    in one of two forms: [Smax, R/2] has a row for each position, [B, S, R/2] one for each token, or [1, S, R/2].

    positions [S] or [B, S] of int64 or int32: which row of [Smax, R/2] a token uses; without them token s uses row s.
    On a GPU their values are not checked, as a check would wait for the GPU: a token whose position has no row becomes
    NaN in its first R dimensions, and nothing is read outside the tables.
    dim: R, where not all of D is rotated. From it, or from D, follows whether a table has R/2 columns, or R as Hugging
    Face's have, whose halves are alike (half-rotated pairs only)
    interleaved: dimensions 2i and 2i + 1 are a pair (GPT-J), not i and i + R/2 (Llama, NeoX)
    inplace: write over q and k, and return them; they may take turns in memory, as parts of one projection do

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
    """The gradient of `rope` with respect to q and k: the rotation by the opposite angles.

    dq_rotated, dk_rotated: the gradients of what rope returned; the other arguments as rope had them. Returns (dq, dk)
    of their shapes, dtypes and orders of axes; with inplace themselves, written over. out, kernel, stream and errors as
    for `rope`. cos and sin get no gradient.
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
    """cos and sin of the angles that positions stand for, as `rope` takes them.

    positions [S] or [B, S] of int64 or int32, of any sign; dim: R, even; base: that of the frequencies
    base ** (-2i / R), 10000 if neither it nor the scaling says. scaling changes them: Hugging Face's dict as it is,
    config.rope_parameters (of a model with several, that of one kind of layers), or a tuple:

    ("linear", factor): all are divided by the factor
    ("llama3", factor, low, high, original): those that turn less than `low` times in `original` positions are divided
    by the factor, those that turn more than `high` times stay, and those between are mixed of both
    ("yarn", factor, original, fast=32, slow=1, attention_factor, truncate=True): the same by pair, between those that
    turn `slow` and `fast` times, rounded outwards to whole pairs; cos and sin are multiplied by attention_factor,
    by default 0.1 log(factor) + 1, or the value that a dict's mscale and mscale_all_dim give
    ("dynamic", factor, original, length): the base grows with the length of the sequence beyond `original`; a dict
    needs both, as "max_position_embeddings" and "seq_len", which Hugging Face keeps elsewhere

    A dict may have the base, as rope_theta, and a partial_rotary_factor: then dim is D and R is int(D * that). What
    there is of longrope, proportional and multimodal scalings is refused.

    Returns (cos, sin) [S, R/2] or [B, S, R/2] of `dtype` ("float32", "float64", "float16" or "bfloat16"). Angles,
    cos and sin are computed in float64, and then rounded. out: a pair of arrays to write to. kernel, stream and errors
    as for `rope`.
    """
    return forward_tables((positions,), (dim, base, scaling, dtype), out, kernel, stream)


def _results(op: str, inplace: Any, inputs: tuple[Any, Any], out: Any) -> Any:
    """Where the results go. That inplace is a truth value at all is for the spec to say."""
    if not isinstance(inplace, (bool, np.bool_)) or not inplace:
        return out
    if out is not None:
        raise TypeError(f"{op}: inplace is True and out is given, expected one of them")
    return inputs


PLACES, PLACES_BACKWARD = ({o.name: o.like for o in outputs} for outputs in (SPEC.outputs, SPEC.gradients))
FORWARD = (simt.forward_choices, naive.forward_choices)
BACKWARD = (simt.backward_choices, naive.backward_choices)
forward = Operation(SPEC, rungs=FORWARD, inplace=PLACES)
backward = Operation(SPEC, rungs=BACKWARD, backward=True, inplace=PLACES_BACKWARD)
forward_tables = Operation(SPEC_TABLES, rungs=(tables.forward_choices,))
