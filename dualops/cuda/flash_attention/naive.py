"""The naive rung: its launches and workspaces, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod

from ...spec import ArrayMeta, Problem
from ...spec.attention import broadcast_strides
from ...spec.meta import Strided, compute_dtype, contiguous_strides
from ..compiler.backend import Kernel
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Argument, Step
from ..launch.views import by_token
from . import simt
from .arguments import general, is_varlen, sizes, variant
from .naive_backward import Operands, build_bend, build_bias_gradient, build_score_gradients, build_transposed_product
from .naive_forward import THREADS, Product, build_product, build_scores, build_softmax, naive_variant
from .options import chain_of

REASON = "all scores in memory: for what needs more shared memory on simt than there is"


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the only way to compute attention."""
    yield Choice("naive", None, REASON, partial(forward_steps, problem, results), forward_workspace(problem))


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the only way to compute its gradient."""
    yield Choice("naive", None, REASON, partial(backward_steps, problem, results), backward_workspace(problem))


def forward_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return all scores, and a sum for each row."""
    return {"scores": _scores(problem), "row_sums": _rows(problem)}


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta]) -> Sequence[Step]:
    """Return the launches: scores, softmax, product."""
    p, metas, varlen = problem, {**problem.arrays, **results}, is_varlen(problem)
    o, lse, q, k, v = (by_token(metas, name, varlen) for name in ("o", "lse", "q", "k", "v"))
    work = sizes(p)
    plain, product = work._replace(options=()), Product(o, "scores", v, 1.0, p.Dv)
    scores, rows = _scores(p).size, _rows(p).size
    return [
        *_step(build_scores(naive_variant(p)), scores, "scores", q, k, p.D, p.B, work),
        *_step(build_softmax(naive_variant(p), "lse" in results), rows, "scores", "row_sums", lse, p.B, work),
        *_step(build_product(general(variant(p))), rows * p.Dv, product, "row_sums", 1, p.B, plain),
    ]


def backward_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return scores that become probabilities, their gradient, and a number for each row."""
    return {"probs": _scores(problem), "d_scores": _scores(problem), **simt.backward_workspace(problem)}


def backward_steps(problem: Problem, results: Mapping[str, ArrayMeta]) -> Sequence[Step]:
    """Return the launches: the equations of naive_backward.py, in order."""
    p, varlen = problem, is_varlen(problem)
    metas = {**p.arrays, **results, **simt.backward_workspace(p)}
    q, k, v, lse, delta = (by_token(metas, name, varlen) for name in ("q", "k", "v", "lse", "delta"))
    do, dq, dk, dv = (by_token(metas, name, varlen) for name in ("do", "dq", "dk", "dv"))
    own, plain_own = naive_variant(p), general(variant(p))
    work = sizes(p)
    plain = work._replace(options=())
    scores, rows, keys = _scores(p).size, _rows(p).size, p.B * p.Hkv * p.Sk
    transposed = build_transposed_product(plain_own)
    of_dv, of_dk = Product(dv, "probs", do, 1.0, p.Dv), Product(dk, "d_scores", q, p.scale, p.D)
    of_dq, of_d_scores = Product(dq, "d_scores", k, p.scale, p.D), Operands(v, do, lse, delta, p.Dv)

    steps = [
        *_step(build_scores(own), scores, "probs", q, k, p.D, p.B, work),
        *simt.delta_steps(p),
        *_step(build_score_gradients(own), scores, "probs", "d_scores", of_d_scores, p.B, work),
        *_step(transposed, keys * p.Dv, of_dv, p.B, p.Hkv, plain),
    ]
    if "dbias" in results:
        steps += _bias_gradient(p, results["dbias"])
    if chain_of(own.having, p.dtype, gradient=True).bends:
        steps += _step(build_bend(own), scores, "d_scores", q, k, p.D, p.B, work)
    steps += _step(build_product(plain_own), rows * p.D, of_dq, "", 0, p.B, plain)
    steps += _step(transposed, keys * p.D, of_dk, p.B, p.Hkv, plain)
    if "dsinks" in results:
        steps.append(simt.dsinks_step(p, results))
    return steps


def _bias_gradient(p: Problem, meta: ArrayMeta) -> Sequence[Step]:
    full = (p.B, p.H, p.Sq, p.Sk)
    own = (*(1 for _ in range(4 - len(meta.shape))), *meta.shape)
    over = tuple(1 if mine == size else size for mine, size in zip(own, full, strict=True))
    dbias = Strided("dbias", broadcast_strides(meta))
    return _step(build_bias_gradient(meta.dtype), prod(own), dbias, "d_scores", own, over, p.H, p.Sq, p.Sk)


def _step(kernel: Kernel, count: int, *args: Argument) -> Sequence[Step]:
    """Return a launch of `count` threads, or none for 0."""
    return [Step(kernel, (cdiv(count, THREADS),), args)] if count else []


def _scores(p: Problem) -> ArrayMeta:
    return _number_meta(p, (p.B, p.H, p.Sq, p.Sk))


def _rows(p: Problem) -> ArrayMeta:
    return _number_meta(p, (p.B, p.H, p.Sq))


def _number_meta(p: Problem, shape: tuple[int, ...]) -> ArrayMeta:
    """Return an array of the dtype of arithmetic, on q's device."""
    return ArrayMeta(shape, compute_dtype(p.dtype), contiguous_strides(shape), p.arrays["q"].device, 0)
