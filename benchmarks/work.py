"""The work of a case: operations and bytes, and the rate that follows from its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

import numpy as np

from .tree import spec

band = import_module(f"{spec.__name__}.attention").band  # from the suite's tree, like everything that counts work
DIRECTIONS = ("forward", "backward")
# Flops per byte from which a case is quoted in TFLOP/s. Row operators have a handful and attention over more than a few
# keys has hundreds; an H200 balances at 12 in float32 and near 200 in bfloat16.
INTENSE = 32
ROWS = 512  # rows of pairs that are counted together


def bind(operator: spec.Spec, case: spec.Case, direction: str = "forward", device: str = "cuda:0") -> spec.Problem:
    """Return the problem of a case with contiguous inputs, without memory.

    A gradient gets the incoming gradients of all results that are returned by default; that of lse is left out.
    """
    shapes = dict(case.shapes)

    def metas(inputs: Sequence[spec.base.Input]) -> dict[str, spec.ArrayMeta]:
        there = {entry.name: case.dtype_of(entry) for entry in inputs if entry.name in shapes}
        strides = spec.meta.contiguous_strides
        return {
            name: spec.ArrayMeta(shapes[name], dtype, strides(shapes[name]), device, 0) for name, dtype in there.items()
        }

    forward = operator.bind(metas(operator.inputs), case.params)
    if direction == "forward":
        return forward
    for output in operator.outputs:
        shapes |= dict.fromkeys((output.name, f"d{output.name}"), output.shape(forward))
    return operator.bind_backward(metas(gradient_inputs(operator, case)), case.params)


def gradient_inputs(operator: spec.Spec, case: spec.Case) -> list[spec.base.Input]:
    """Return the arrays of a case's gradient: inputs, results that it needs, gradients of the default results."""
    unasked = {output.name for output in operator.outputs if not operator.request(output)}
    problem = bind(operator, replace(case, params={**case.params, **operator.requests}))
    results = problem.outputs()
    kept = {name for name in operator.saved if operator.saved_when.get(name, lambda p: True)(problem)}
    there = {*case.shapes, *(results.keys() & kept), *(f"d{name}" for name in results if name in unasked)}
    return [entry for entry in operator.gradient_inputs if not entry.optional or entry.name in there]


def directions(operator: spec.Spec, case: spec.Case | None = None) -> tuple[str, ...]:
    """Return ("forward", "backward"), or ("forward",) for an operator without a gradient, or a case without it."""
    backward = operator.backward_cost is not None and (case is None or case.backward)
    return DIRECTIONS if backward else DIRECTIONS[:1]


class Work(NamedTuple):
    """The least that a direction of a case must do."""

    flops: int
    bytes_read: int
    bytes_written: int

    @classmethod
    def of(cls, operator: spec.Spec, case: spec.Case, direction: str) -> Work:
        """Return the work. Raises NotImplementedError for the backward direction of an operator without a gradient."""
        cost = operator.forward_cost if direction == "forward" else operator.backward_cost
        if cost is None:
            raise NotImplementedError(f"{operator.name} has no {direction}")
        problem = bind(operator, case, direction)
        flops = round(sum(cost.flops(one) for one in sequences(operator, case, problem)) * shown(problem))
        return cls(flops, cost.bytes_read(problem), cost.bytes_written(problem))

    @property
    def nbytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.flops > INTENSE * self.nbytes else "TB/s"

    def rate(self, seconds: float) -> float:
        """Return the rate in `unit`."""
        return (self.flops if self.unit == "TFLOP/s" else self.nbytes) / seconds / 1e12


def sequences(operator: spec.Spec, case: spec.Case, problem: spec.Problem) -> list[spec.Problem]:
    """Return the problem, or one problem per sequence if lengths differ: the spec counts each as the longest."""
    if "cu_seqlens_q" not in case.shapes:
        return [problem]
    p = problem
    return [
        spec.Problem(operator, p.dtype, {**p.dims, "B": 1, "Sq": Sq, "Sk": Sk}, p.params, p.arrays)
        for Sq, Sk in _lengths(operator, case)
    ]


def shown(problem: spec.Problem) -> float:
    """Return the share of the pairs within causal mask and window that a mask_mod shows, in the first head.

    The function is called on arrays: functions of cases work on arrays element by element.
    """
    p = problem
    if p.params.get("mask_mod") is None:
        return 1.0
    left, right = band(p)
    j, pairs, seen = np.arange(p.Sk), 0, 0
    for m in range(0, p.Sq, ROWS):
        i = np.arange(m, min(m + ROWS, p.Sq))[:, None]
        at = i + (0 if p.causal == "top_left" else p.Sk - p.Sq)
        inside = (j >= at - left) & (j <= at + right)
        pairs += int(inside.sum())
        seen += int((inside & p.mask_mod.function(0, 0, i, j)).sum())
    return seen / max(pairs, 1)


_drawn: dict[str, list[tuple[int, int]]] = {}


def _lengths(operator: spec.Spec, case: spec.Case) -> list[tuple[int, int]]:
    """Return the queries and keys of each sequence, as the generator draws them."""
    key = f"{operator.name} {case}"
    if key not in _drawn:
        arrays = operator.generate(operator, case, np.random.default_rng(case.seed))
        keys = arrays["k_lengths"] if "k_lengths" in arrays else np.diff(arrays["cu_seqlens_k"])
        _drawn[key] = list(zip(np.diff(arrays["cu_seqlens_q"]).tolist(), keys.tolist()))
    return _drawn[key]
