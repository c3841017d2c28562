"""The arguments that every kernel of attention has: arrays by batch, head and token, sizes, lengths, options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ...spec import Problem
from ..backend import Namespace, i32, i64, types, verb
from ..tile.storage import storage
from ..views import boundary, number_type, strided, whole
from .options import WITHOUT_OPTIONS, Having, arguments, having


@dataclass(frozen=True)
class Variant:
    """What kernels are built for, beside their Config."""

    dtype: str
    D: int
    Dv: int
    having: Having
    varlen: bool


def variant(problem: Problem) -> Variant:
    """What kernels for this problem are built for."""
    return Variant(problem.dtype, problem.D, problem.Dv, having(problem), is_varlen(problem))


def general(found: Variant) -> Variant:
    """What kernels are built for that know no options, and widths only at the launch."""
    return replace(found, D=0, Dv=0, having=WITHOUT_OPTIONS)


def is_varlen(problem: Problem) -> bool:
    return "cu_seqlens_q" in problem.arrays


def sizes(problem: Problem) -> tuple[Any, ...]:
    """H, group, Sq, Sk, whether the last query stands at the last key, scale, lengths, options."""
    lengths = ()
    if is_varlen(problem):
        lengths = tuple(whole(problem.arrays, name, 1) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    p = problem
    aligned = 0 if p.causal == "top_left" else 1
    return p.H, p.group, p.Sq, p.Sk, aligned, p.scale, lengths, arguments(p)


def size_types(found: Variant) -> tuple[Any, ...]:
    """The types of `sizes`."""
    lengths = types.UniTuple(strided("int32", 1), 2) if found.varlen else types.Tuple([])
    return (*[i32] * 5, storage(found.dtype).number, lengths, found.having.argtypes)


def array_type(found: Variant) -> Any:
    return strided(found.dtype, 3)


def statistic_type(found: Variant) -> Any:
    """The type of lse and delta."""
    return number_type(found.dtype, 3)


class Spans(Namespace):
    """Where sequences lie among the tokens."""

    of_batch: Callable[..., Any]  # (lengths, b, Sq, Sk of the longest) -> first query, first key, Sq and Sk of batch b


@cache
def spans(varlen: bool) -> Spans:
    """The verb for sequences of different lengths, or for batches of one shape."""

    @verb
    def batch(lengths, b, Sq, Sk):
        return i64(0), i64(0), Sq, Sk

    @verb
    def part(lengths, b, Sq, Sk):
        ends_q, ends_k = lengths
        q_first, k_first = boundary(ends_q, b), boundary(ends_k, b)
        q_end, k_end = boundary(ends_q, b + 1), boundary(ends_k, b + 1)
        return i64(q_first), i64(k_first), i64(q_end - q_first), i64(k_end - k_first)

    return Spans(of_batch=part if varlen else batch)
