"""Shared by the forms of attention: a call's options as NumPy functions, and masked products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..spec import Problem, Spec
from ..spec.attention import OPTIONS, At, Chain, UserFunction, Verbs, as_they_are, compose, lists_of, variants
from ..spec.meta import Strided, compute_dtype, numpy_dtype
from ..spec.named import with_options
from ._functions import elementwise
from ._rounding import abs_strides, arithmetic, bound


class Options(NamedTuple):
    """The options of a call, as functions of any tile of scores."""

    chain: Chain
    args: tuple[Any, ...]
    problem: Problem
    offset: int  # position of query 0 among the keys
    first: int  # number of batch 0, if a batch is one of several sequences

    def everywhere(self) -> At:
        """Return the places of all scores."""
        return self.at(0, self.problem.Sq, 0, self.problem.Sk)

    def at(self, m0: int, m1: int, n0: int, n1: int) -> At:
        """Return the places of the scores of queries m0 to m1 and keys n0 to n1."""
        b, h = self.first + np.arange(self.problem.B), np.arange(self.problem.H)
        i, j = np.arange(m0, m1)[:, None], np.arange(n0, n1)
        distance = (i + self.offset - j).astype(numpy_dtype(compute_dtype(self.problem.dtype)))
        return At(b[:, None, None, None], h[:, None, None], i, j, i + self.offset, distance, j % 2)

    def scores(self, products: np.ndarray, at: At) -> np.ndarray:
        """Apply all options to s0 = scale * q @ k.T; masked scores are -inf. [B, H, queries, keys]"""
        visible = self.chain.visible(self.args, at)
        return np.where(visible, self.chain.score(products, self.args, at), -np.inf).astype(products.dtype)

    def counts(self, scores: np.ndarray, lse: np.ndarray, at: At) -> np.ndarray:
        """Mark the scores that have a part in gradients. lse [B, H, queries].

        A score of -inf has a part if its row is NaN, unless a mask hides it.
        """
        return (scores != -np.inf) | (np.isnan(lse)[..., None] & self.chain.visible(self.args, at))

    def slope(self, products: np.ndarray, at: At) -> np.ndarray:
        """Return the slope dS / ds0."""
        return np.broadcast_to(self.chain.slope(products, self.args, at), products.shape)

    def weight(self, at: At) -> np.ndarray:
        """Return the factor of the probabilities under dropout."""
        return self.chain.weight(self.args, at)

    def sinks(self) -> Any:
        """Return a logit for each head, [H, 1], or None."""
        return self.chain.sink(self.args, np.arange(self.problem.H))[:, None] if self.chain.sinks else None

    def key_range(self, m0: int, m1: int) -> tuple[int, int]:
        """Return the range of keys that any of the queries m0 to m1 may see."""
        return self.chain.key_range(self.args, m0, m1, self.offset, self.problem.Sk)

    def query_range(self, n0: int, n1: int) -> tuple[int, int]:
        """Return the range of queries that may see any of the keys n0 to n1."""
        return self.chain.query_range(self.args, n0, n1, self.offset, self.problem.Sq)


def bound_with_blocks(
    spec: Spec, given: Mapping[str, Any], *, backward: bool = False
) -> tuple[Problem, dict[str, Any]]:
    """Call `bound` with the array of a BlockMask. The array adds nothing to mask_mod: it only skips work."""
    if "options" in given:
        given = with_options(spec, given, given["options"], backward=backward)
        given.pop("options", None)
    if (block_mask := given["block_mask"]) is not None:
        _, mask_mod = as_they_are(None, given["mask_mod"])
        op = f"{spec.name}_backward" if backward else spec.name
        given = {**given, "block_mask": lists_of(op, block_mask, mask_mod, given["q"], given["k"])}
    return bound(spec, given, backward=backward)


def options_of(problem: Problem, arrays: Mapping[str, Any], first: int = 0, *, gradient: bool = False) -> Options:
    """Return the options of a problem with its arrays; with slopes for a gradient."""
    dtype = numpy_dtype(compute_dtype(problem.dtype))
    having = variants(OPTIONS, problem)
    chain = compose(having, _verbs(dtype, gradient))
    args = tuple(_in_numpy(option.args(problem), arrays, problem) for option, _ in having)
    return Options(chain, args, problem, 0 if problem.causal == "top_left" else problem.Sk - problem.Sq, first)


def _tanh_slope(x: Any, rate: Any) -> Any:
    # with e = exp(-2 |x|): 4 e / (1 + e)**2
    e = np.exp(-2 * np.abs(rate * x))
    return 4 * e / ((1 + e) * (1 + e))


def _verbs(dtype: np.dtype, gradient: bool) -> Verbs:
    """Return the functions that options are written in, for arrays with arithmetic in `dtype`."""
    number = partial(np.asarray, dtype=dtype)

    def function(user: UserFunction) -> Callable[..., Any]:
        return elementwise(user, number)

    return Verbs(
        verb=lambda function: function,
        number=number,
        integer=lambda value: value,
        wide=lambda value: value,
        word=lambda value: np.asarray(value, np.int64).astype(np.uint64),
        low=lambda value: np.asarray(value).astype(np.uint64) & np.uint64(0xFFFFFFFF),
        product=np.multiply,
        where=np.where,
        larger=np.maximum,
        smaller=np.minimum,
        tanh=np.tanh,
        bounded=lambda x, rate, size: size * np.tanh(rate * x),
        tanh_slope=_tanh_slope,
        reader=lambda dtype, rank: lambda array, *index: array[index],
        reader_at=lambda dtype, order: lambda array, at: array[at.b, at.h, at.i, at.j],
        function=function,
        gradient=gradient,
    )


def _in_numpy(args: Any, arrays: Mapping[str, Any], problem: Problem) -> Any:
    """Replace names in an option's arguments by arrays, and floats by the dtype of arithmetic."""
    dtype = numpy_dtype(compute_dtype(problem.dtype)).type

    def resolve(value: Any) -> Any:
        if isinstance(value, Strided):
            array = abs_strides(arrays[value.data])
            array = arithmetic(array) if array.dtype.kind not in "bi" else array
            full = (problem.B, problem.H, problem.Sq, problem.Sk)
            return np.broadcast_to(array, full) if len(value.strides) == len(full) else array
        if isinstance(value, str):
            return arrays[value]
        return dtype(value) if isinstance(value, float) else value

    return type(args)(*map(resolve, args))


def over_group(array: np.ndarray, group: int) -> np.ndarray:
    """Repeat key heads for the query heads: [B, Hkv, S, D] -> [B, H, S, D]."""
    return np.repeat(array, group, axis=1)


def group_sum(array: np.ndarray, group: int) -> np.ndarray:
    """Sum over each group, the gradient of `over_group`: [B, H, S, D] -> [B, Hkv, S, D]."""
    B, H, S, D = array.shape
    return array.reshape(B, H // group, group, S, D).sum(axis=2)


def masked_product(left: np.ndarray, right: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """left [.., m, k] @ right [.., k, n]. A pair that does not count adds nothing, even if `right` is NaN."""
    if np.isfinite(right).all():
        return left @ right
    result = np.zeros((*left.shape[:-1], right.shape[-1]), left.dtype)
    for index in np.ndindex(left.shape[:-1]):
        taken = counts[index]
        result[index] = left[index][taken] @ right[index[:-1]][taken]
    return result


def finite(row_max: np.ndarray) -> np.ndarray:
    """Replace the -inf of a row without visible keys by 0, so that -inf - (-inf) is never formed."""
    return np.where(row_max == -np.inf, 0, row_max).astype(row_max.dtype)
