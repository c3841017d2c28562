"""The arguments that every kernel of attention has: arrays by batch, head and token, sizes, lengths, options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ...spec import ArrayMeta, Problem
from ...spec.attention import Strided
from ..backend import Namespace, i32, i64, types, verb
from ..tile.storage import storage
from .options import WITHOUT_OPTIONS, Having, arguments, having, strided


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


def array(metas: Mapping[str, ArrayMeta], name: str, varlen: bool) -> Strided:
    """An array [B, H, S, width] or [B, H, S], or its form without B, with strides along batch, head and token."""
    if name not in metas:
        return Strided(name, (0, 0, 0))
    strides = metas[name].strides
    if not varlen:
        return Strided(name, strides[:3])
    head, token = strides if len(strides) == 2 else (strides[1], strides[0])
    return Strided(name, (0, head, token))


def sizes(problem: Problem) -> tuple[Any, ...]:
    """H, group, Sq, Sk, whether the last query stands at the last key, scale, lengths, options."""
    lengths = ()
    if is_varlen(problem):
        lengths = tuple(Strided(name, problem.arrays[name].strides) for name in ("cu_seqlens_q", "cu_seqlens_k"))
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
    return strided("float64" if found.dtype == "float64" else "float32", 3)


class Spans(Namespace):
    """Where sequences lie among the tokens."""

    of_batch: Callable[..., Any]  # (lengths, b, Sq, Sk of the longest) -> first query, first key, Sq and Sk of batch b


@cache
def spans(varlen: bool) -> Spans:
    """The verb for sequences of different lengths, or for batches of one shape."""

    @verb
    def whole(lengths, b, Sq, Sk):
        return i64(0), i64(0), i32(Sq), i32(Sk)

    @verb
    def part(lengths, b, Sq, Sk):
        ends_q, ends_k = lengths
        q_first, k_first = ends_q.data[b * ends_q.strides[0]], ends_k.data[b * ends_k.strides[0]]
        q_end, k_end = ends_q.data[(b + 1) * ends_q.strides[0]], ends_k.data[(b + 1) * ends_k.strides[0]]
        return i64(q_first), i64(k_first), i32(q_end - q_first), i32(k_end - k_first)

    return Spans(of_batch=part if varlen else whole)


@verb
def start(x, b, h, token):
    """Where a token's row of an array begins."""
    return i64(b) * x.strides[0] + i64(h) * x.strides[1] + i64(token) * x.strides[2]
