"""Arguments of all attention kernels: arrays along batch, head and token; sizes; lengths; options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Members, i32, i64, kept_noun, types, verb
from ..launch.step import Step
from ..launch.views import boundary, by_token, number_type, strided, whole
from ..tile.storage import storage
from ..unowned import filled, unowned_steps
from .options import WITHOUT_OPTIONS, Having, arguments, having


@dataclass(frozen=True)
class Variant:
    """What a kernel is built for, in addition to its Config."""

    dtype: str
    D: int
    Dv: int
    having: Having
    varlen: bool


def variant(problem: Problem) -> Variant:
    """Return the variant of a problem."""
    return Variant(problem.dtype, problem.D, problem.Dv, having(problem), is_varlen(problem))


def general(found: Variant) -> Variant:
    """Return the variant of kernels that have no options and get widths at the launch."""
    return replace(found, D=0, Dv=0, having=WITHOUT_OPTIONS)


def is_varlen(problem: Problem) -> bool:
    return "cu_seqlens_q" in problem.arrays


class Served(NamedTuple):
    """Which sequences of varlen a launch computes; the others look empty to it."""

    few: int  # 1: those of at most most_queries queries and at least least_keys keys; 0: all others
    most_queries: int
    least_keys: int = 0


MOST_SCALE = 2.0**126
ALL = Served(0, -1)


def serving(problem: Problem, served: Served) -> Problem:
    """Return the problem with only these sequences; the longest may be shorter then."""
    p, dims = problem, dict(problem.dims)
    if served.few:
        dims["Sq"] = min(p.Sq, served.most_queries)
    return Problem(p.spec, p.dtype, dims, {**p.params, "served": served}, p.arrays)


def has_usual_scale(problem: Problem) -> bool:
    """Return whether tensor-core kernels can use `scale`: the largest product gives the largest score, and scale *
    log2(e) is finite in float32.
    """
    return 0 < problem.scale <= MOST_SCALE


def fewest_queries(problem: Problem) -> Any:
    """Return a lower bound of the queries of a sequence of varlen, from what the host knows."""
    p = problem
    return min(p.Sq, p.total_q - (p.B - 1) * p.Sq)


class Work(NamedTuple):
    """How large a problem is, and how its scores are made."""

    H: Any  # heads of queries
    group: Any  # heads of queries that share a head of keys
    Sq: Any  # queries of the longest sequence
    Sk: Any  # keys of the longest sequence
    aligned: Any  # 1: the last query has the position of the last key; 0: the first query that of the first key
    scale: Any
    lengths: Any  # of varlen: as in `spans`; otherwise ()
    options: Any  # the arguments of each option, in order


def sizes(problem: Problem) -> Work:
    """Return the work of a problem."""
    lengths = ()
    if is_varlen(problem):
        starts = "k_starts" if "k_starts" in problem.arrays else "cu_seqlens_k"
        ends = (whole(problem.arrays, name, 1) for name in ("cu_seqlens_q", "cu_seqlens_k", starts))
        lengths = (*ends, problem.params.get("served", ALL))
    p = problem
    aligned = 0 if p.causal == "top_left" else 1
    return Work(p.H, p.group, p.Sq, p.Sk, aligned, p.scale, lengths, arguments(p))


def size_types(found: Variant) -> Any:
    """Return the type of `Work`, which is also the sequence of its fields' types."""
    ends = strided("int32", 1)
    lengths = types.Tuple([ends, ends, ends, types.NamedUniTuple(i32, 3, Served)] if found.varlen else [])
    return types.NamedTuple((*[i32] * 5, storage(found.dtype).number, lengths, found.having.argtypes), Work)


def unowned(problem: Problem, results: Mapping[str, ArrayMeta]) -> Sequence[Step]:
    """Return the steps that fill results for tokens of varlen that belong to no sequence; of either direction."""
    if "o" in results:
        lse = [filled(results, "lse", -inf, heads_first=True)] if "lse" in results else []
        return unowned_steps(problem, results, "cu_seqlens_q", [filled(results, "o"), *lse])
    found = list(unowned_steps(problem, results, "cu_seqlens_q", [filled(results, "dq")]))
    if "cu_seqlens_k" in problem.arrays:  # with key ranges, `key_ranges` writes all keys
        found += unowned_steps(problem, results, "cu_seqlens_k", [filled(results, name) for name in ("dk", "dv")])
    return found


class Inputs(NamedTuple):
    """Arrays that forward reads."""

    q: Any  # [B, H, Sq, D]
    k: Any  # [B, Hkv, Sk, D]
    v: Any  # [B, Hkv, Sk, Dv]


class GradientInputs(NamedTuple):
    """Arrays that the gradient reads."""

    q: Any  # [B, H, Sq, D]
    k: Any  # [B, Hkv, Sk, D]
    v: Any  # [B, Hkv, Sk, Dv]
    do: Any  # [B, H, Sq, Dv]
    lse: Any  # [B, H, Sq]
    delta: Any  # [B, H, Sq]: rowsum(do * o) - dlse


def inputs_of(metas: Mapping[str, ArrayMeta], varlen: bool) -> Inputs:
    """Return the inputs of forward."""
    return Inputs(*(by_token(metas, name, varlen) for name in Inputs._fields))


def gradient_inputs_of(metas: Mapping[str, ArrayMeta], varlen: bool) -> GradientInputs:
    """Return the inputs of the gradient; delta is among `metas`."""
    return GradientInputs(*(by_token(metas, name, varlen) for name in GradientInputs._fields))


def inputs_type(found: Variant) -> Any:
    """Return the type of `Inputs`."""
    return types.NamedUniTuple(array_type(found), 3, Inputs)


def gradient_inputs_type(found: Variant) -> Any:
    """Return the type of `GradientInputs`."""
    return types.NamedTuple((*[array_type(found)] * 4, *[statistic_type(found)] * 2), GradientInputs)


def array_type(found: Variant) -> Any:
    return strided(found.dtype, 3)


def statistic_type(found: Variant) -> Any:
    """Return the type of lse and delta."""
    return number_type(found.dtype, 3)


@kept_noun
def spans(varlen: bool) -> Members:
    """Where a sequence lies among the tokens. Without varlen, sequences are batches of one shape.

    lengths: cu_seqlens_q, cu_seqlens_k, k_starts and `Served`.
    """

    @verb
    def of_batch(lengths, b, Sq, Sk):
        """Return first query, first key, Sq and Sk of batch b, 0 if it is not served. Sq, Sk: of the longest."""
        if not varlen:
            return i64(0), i64(0), i32(Sq), i32(Sk)
        ends_q, ends_k, k_starts, served = lengths
        q_first, k_first = boundary(ends_q, b), boundary(k_starts, b)
        Sq, Sk = i32(boundary(ends_q, b + 1) - q_first), i32(boundary(ends_k, b + 1) - boundary(ends_k, b))
        if i32((Sq <= served.most_queries) & (Sk >= served.least_keys)) != served.few:
            Sq, Sk = i32(0), i32(0)
        return i64(q_first), i64(k_first), Sq, Sk

    @verb
    def key_out(lengths, b):
        """Return the row of dk and dv of the first key. Key ranges have rows of their own, as they may share keys."""
        return i64(boundary(lengths[1], b)) if varlen else i64(0)

    return locals()
