"""Which part of a result is held against the reference, where the whole would take minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .tree import spec

SAMPLED_ELEMENTS = 2**21

Shapes = Mapping[str, tuple[int, ...]]
Selection = dict[str, Any]  # name of an array -> an index of it
# (the problem, shapes of what is to be picked from: inputs and results, a generator)
Sample = Callable[[spec.Problem, Shapes, np.random.Generator], Selection]


def rows(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator) -> Selection:
    """Whole rows, the first and the last among them: every array has one row for each index of axis 0."""
    shape = next(iter(shapes.values()))
    count = min(shape[0], max(8, SAMPLED_ELEMENTS // int(np.prod(shape[1:]))))
    return dict.fromkeys(shapes, np.union1d(rng.choice(shape[0], count, replace=False), [0, shape[0] - 1]))


def one_head(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator) -> Selection:
    """One key head of one batch with the query heads that read it; of sequences one after another, of all of them.

    The gradient of what all batches or heads share is a sum over them: then all are taken. Options that depend on where
    a score is get the first batch and head, so that places in the sample are those in the whole.
    """
    entries = (*problem.spec.inputs, *problem.spec.gradient_inputs)
    axes = {entry.name: entry.axes for entry in entries} | {"bias": ("B", "H", "Sq", "Sk")}
    taken = _taken(problem, shapes, rng)
    picked: Selection = {}
    for name, shape in shapes.items():
        own = axes[name if name in axes else name.removeprefix("d")]
        assert own is not None
        last = own[len(own) - len(shape) :]  # a bias may be without the first
        whole = slice(None)
        picked[name] = tuple(whole if size == 1 else taken.get(axis, whole) for axis, size in zip(last, shape))
    return picked


def _taken(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator) -> dict[str, slice]:
    """What is taken of an axis, if not all."""
    shared = set()  # axes that a gradient is summed over
    if "dbias" in shapes:
        bias = shapes["dbias"]
        full = (*(1 for _ in range(4 - len(bias))), *bias)
        shared = {axis for axis, size in zip(("B", "H"), full) if size == 1}
    if "dsinks" in shapes:
        shared.add("B")
    placed = bool(problem.dropout_p or problem.score_mod or problem.mask_mod)
    several = "B" in shared or "cu_seqlens_q" in shapes
    taken: dict[str, slice] = {}
    if not several:
        b = 0 if placed else int(rng.integers(problem.B))
        taken["B"] = slice(b, b + 1)
    counted = problem.dropout_p and several  # dropout counts the heads of all batches
    if "H" not in shared and not counted:
        head = 0 if placed else int(rng.integers(problem.Hkv))
        taken["Hkv"] = slice(head, head + 1)
        taken["H"] = slice(head * problem.group, (head + 1) * problem.group)
    return taken
