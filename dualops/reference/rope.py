"""Rotary position embeddings in NumPy: rotation of queries and keys by their positions, and the tables of cos and sin.

Su et al. 2021, arXiv:2104.09864. A query at position m is rotated by the angle m * f, a key at position n by n * f.
Their inner product then depends on m - n alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..spec import Problem, rope as SPEC, rope_tables as SPEC_TABLES
from ..spec.base import Output
from ..spec.meta import numpy_dtype
from ..spec.rope_scaling import Normal, yarn_range
from ._rounding import arithmetic, bound

Scaling = tuple[Any, ...] | Mapping[str, Any] | None


def rope(
    q: np.ndarray,
    k: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    positions: np.ndarray | None = None,
    dim: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """q and k with their first R dimensions rotated, pair by pair; the dimensions from R on are unchanged.

    q [B, H, S, D], k [B, Hkv, S, D] of one dtype. cos, sin of that dtype or float32 (float64 for float64), with R/2
    columns, R at most D, in one of two forms: [Smax, R/2] has a row for each position; [B, S, R/2] or [1, S, R/2] one
    for each token. Reshape tables of B * S rows to the latter.

    positions [S] or [B, S] of int64 or int32: the row of [Smax, R/2] for each token; by default token s uses row s
    dim: R, if less than D. It decides whether a table has R/2 columns, or R columns with two equal halves as Hugging
        Face's (half-rotated pairs only)
    interleaved: dimensions 2i and 2i + 1 are a pair (GPT-J), not i and i + R/2 (Llama, NeoX)
    inplace: write over q and k, and return them

    Returns q and k rotated, of their shapes and dtypes. Arithmetic is float32 (float64 for float64), rounded once.
    Raises ValueError for more tokens than rows, and for a position without a row.
    """
    problem, arrays = bound(SPEC, locals())
    rotated = _turned(problem, arrays, ("q", "k"))
    return _given_back(problem, SPEC.name, SPEC.outputs, (q, k), rotated)


def rope_backward(
    dq_rotated: np.ndarray,
    dk_rotated: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    positions: np.ndarray | None = None,
    dim: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient with respect to q and k, from those of the rotated ones; cos and sin have none.

    Returns dq, dk of the shapes and dtypes of dq_rotated and dk_rotated; with inplace those two, overwritten.
    """
    problem, arrays = bound(SPEC, locals(), backward=True)
    # x' = T x  with  T = [[cos, -sin], [sin, cos]], so  dx = T.T dx': the rotation by the opposite angle
    turned = _turned(problem, arrays | {"sin": -sin}, ("dq_rotated", "dk_rotated"))
    return _given_back(problem, f"{SPEC.name}_backward", SPEC.gradients, (dq_rotated, dk_rotated), turned)


def rope_tables(
    positions: np.ndarray,
    dim: int | None = None,
    *,
    base: float | None = None,
    scaling: Scaling = None,
    dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the angles of positions, in the form that `rope` takes.

    positions [S] or [B, S] of int64 or int32, of any sign; dim: R, even; base: that of the frequencies base ** (-2i /
    R), by default the scaling's, or 10000. scaling changes the frequencies. It is Hugging Face's dict,
    config.rope_parameters (for a model with several, that of one kind of layers), or a tuple:

    ("linear", factor): all are divided by the factor
    ("llama3", factor, low, high, original): frequencies with less than `low` turns in `original` positions are divided
    by the factor, those with more than `high` turns stay, and those between are interpolated
    ("yarn", factor, original, fast=32, slow=1, attention_factor, truncate=True): interpolated by pair, between the
    pairs with `slow` and `fast` turns, rounded outwards to whole pairs. cos and sin are multiplied by attention_factor.
    Its default is 0.1 log(factor) + 1, or what a dict's mscale and mscale_all_dim give
    ("dynamic", factor, original, length): the base grows with the length of the sequence beyond `original`; a dict
    needs both, as "max_position_embeddings" and "seq_len", which Hugging Face keeps elsewhere

    A dict may have the base, as rope_theta, and a partial_rotary_factor: then dim is D and R is int(D * factor). The
    longrope, proportional and multimodal scalings are refused.

    Returns cos, sin [S, R/2] or [B, S, R/2] of `dtype` ("float32", "float64", "float16" or "bfloat16"). They are
    computed in float64, then rounded.
    """
    problem, arrays = bound(SPEC_TABLES, locals())
    frequencies = inverse_frequencies(2 * problem.half, problem.theta, problem.scaling)  # [R/2]
    angles = arrays["positions"][..., None] * frequencies  # [..., R/2]
    magnitude = dict(problem.scaling or ()).get("attention_factor", 1.0)
    cos, sin = (magnitude * function(angles) for function in (np.cos, np.sin))
    return cos.astype(numpy_dtype(problem.dtype)), sin.astype(numpy_dtype(problem.dtype))


def inverse_frequencies(R: int, base: float, scaling: Normal | None) -> np.ndarray:
    """Return the radians per position of each pair's angle, [R/2] of float64.

    base: for a dynamic scaling, the base of this sequence's length (`dualops.spec.rope_scaling.base_and_width`).
    """
    scaling_dict, pairs = dict(scaling or ()), np.arange(R // 2)
    frequencies = float(base) ** (-2 * pairs / R)  # [R/2]
    name, factor = scaling_dict.get("rope_type", "default"), scaling_dict.get("factor", 1.0)
    if name in ("default", "dynamic"):
        return frequencies
    if name == "linear":
        return frequencies / factor
    # kept: 0 where a frequency is divided by the factor, 1 where it stays
    if name == "yarn":
        first, last = yarn_range(R, base, scaling_dict)
        kept = 1 - np.clip((pairs - first) / (last - first), 0.0, 1.0)
    else:
        low, high = scaling_dict["low_freq_factor"], scaling_dict["high_freq_factor"]
        turns = (
            scaling_dict["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        )  # in the positions of the training
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _turned(problem: Problem, arrays: Mapping[str, np.ndarray], names: tuple[str, str]) -> tuple[np.ndarray, ...]:
    """Rotate both arrays by the tables among `arrays`."""
    cos, sin = (_rows_of_tokens(problem, arrays, name) for name in ("cos", "sin"))
    return tuple(rotate(arrays[name], cos, sin, problem.interleaved) for name in names)


def _rows_of_tokens(problem: Problem, arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return a table with a row for each token, [B or 1, 1, S, R/2], in the dtype of arithmetic."""
    table = arithmetic(arrays[name][..., : problem.half])
    if table.ndim == 3:
        return table[:, None]
    if "positions" not in arrays:
        return table[None, None, : problem.S]
    return table[np.atleast_2d(arrays["positions"])][:, None]


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotate the pairs among the first R dimensions of x [B, H, S, D]; cos, sin [B or 1, 1, S, R/2]."""
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    x1, x2 = arithmetic(x[..., first]), arithmetic(x[..., second])  # [B, H, S, R/2]
    rotated = x.copy(order="K")
    with np.errstate(invalid="ignore", over="ignore"):
        rotated[..., first] = x1 * cos - x2 * sin
        rotated[..., second] = x2 * cos + x1 * sin
    return rotated


def _given_back(
    problem: Problem,
    op: str,
    outputs: tuple[Output, ...],
    inputs: tuple[np.ndarray, np.ndarray],
    results: tuple[np.ndarray, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the results; in place, write them to the inputs and return those. Raises ValueError if inputs share
    memory.
    """
    if problem.inplace:
        wanted = problem.outputs(outputs)
        problem.spec.bind_out(op, wanted, dict(zip(wanted, problem.arrays.values())))
        if np.shares_memory(*inputs):
            result, other = next(iter(wanted)), list(problem.arrays)[1]
            raise ValueError(f"{op}: out {result} overlaps {other} in memory, expected memory of its own")
        for array, result in zip(inputs, results, strict=True):
            array[...] = result
        return inputs
    one, two = results
    return one, two
