"""What a case asks of a device: operations and bytes, and the rate that a time of it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

import numpy as np

from .tree import spec

band = import_module(f"{spec.__name__}.attention").band  # of the suite's tree, as all that counts
DIRECTIONS = ("forward", "backward")
# Flops a byte from which a case is quoted in TFLOP/s. Row operators have a handful and attention over more than a few
# keys has hundreds; an H200 balances at 12 in float32 and near 200 in bfloat16.
INTENSE = 32
ROWS = 512  # of pairs that are looked at together


def bind(operator: spec.Spec, case: spec.Case, direction: str = "forward", device: str = "cuda:0") -> spec.Problem:
    """The problem of a case with contiguous inputs, as yet without memory.

    A gradient is given those of all results that are returned unasked; that of lse is left out.
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
    """What the gradient of a case is given: inputs, results that it needs, gradients of what is returned unasked."""
    unasked = {output.name for output in operator.outputs if not operator.request(output)}
    problem = bind(operator, replace(case, params={**case.params, **operator.requests}))
    results = problem.outputs()
    kept = {name for name in operator.saved if operator.saved_when.get(name, lambda p: True)(problem)}
    there = {*case.shapes, *(results.keys() & kept), *(f"d{name}" for name in results if name in unasked)}
    return [entry for entry in operator.gradient_inputs if not entry.optional or entry.name in there]


def directions(operator: spec.Spec, case: spec.Case | None = None) -> tuple[str, ...]:
    """("forward", "backward"), or ("forward",) of an operator without a gradient, or of a case that wants none."""
    backward = operator.backward_cost is not None and (case is None or case.backward)
    return DIRECTIONS if backward else DIRECTIONS[:1]


class Work(NamedTuple):
    """The least that a direction of a case must do."""

    flops: int
    bytes_read: int
    bytes_written: int

    @classmethod
    def of(cls, operator: spec.Spec, case: spec.Case, direction: str) -> Work:
        """Raises NotImplementedError for the backward direction of an operator without one."""
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
        """In `unit`."""
        return (self.flops if self.unit == "TFLOP/s" else self.nbytes) / seconds / 1e12


def sequences(operator: spec.Spec, case: spec.Case, problem: spec.Problem) -> list[spec.Problem]:
    """The problem; of sequences of different lengths one problem each, for the spec takes each to be the longest."""
    if "cu_seqlens_q" not in case.shapes:
        return [problem]
    p = problem
    return [
        spec.Problem(operator, p.dtype, {**p.dims, "B": 1, "Sq": Sq, "Sk": Sk}, p.params, p.arrays)
        for Sq, Sk in _lengths(operator, case)
    ]


def shown(problem: spec.Problem) -> float:
    """Of the pairs that causal mask and window leave, the share that a mask_mod shows, as it tells of the first head.

    A function of a case does to arrays what it does to their elements.
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
    """Queries and keys of each sequence, as the generator draws them."""
    key = f"{operator.name} {case}"
    if key not in _drawn:
        arrays = operator.generate(operator, case, np.random.default_rng(case.seed))
        keys = arrays["k_lengths"] if "k_lengths" in arrays else np.diff(arrays["cu_seqlens_k"])
        _drawn[key] = list(zip(np.diff(arrays["cu_seqlens_q"]).tolist(), keys.tolist()))
    return _drawn[key]
