"""The part of a result that is compared with the reference, if the whole would take minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .tree import spec

SAMPLED_ELEMENTS = 2**21
SAMPLED_INDICES = 512  # of an axis of a matrix: every tile of 64 x 64 of 8192 x 8192 has some 16 of its elements there

Shapes = Mapping[str, tuple[int, ...]]
Selection = dict[str, Any]  # name of an array -> an index of it


class Part(NamedTuple):
    """Some of the results: the indices into them and into all arguments, and parameters that request only them."""

    results: tuple[str, ...]
    picked: Selection
    params: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = {}  # additional arguments of the reference that a part does not contain


# (the problem, shapes of inputs and results to pick from, a random generator) -> one sample for all results, or one for
# each
Sample = Callable[[spec.Problem, Shapes, np.random.Generator], Selection | list[Part]]


def rows(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator) -> Selection:
    """Pick whole rows, including the first and the last: every array has one row for each index of axis 0.

    Weights are used whole. If their gradient is requested, which is a sum over rows, all rows are used.
    """
    shape = next(iter(shapes.values()))
    count = min(shape[0], max(8, SAMPLED_ELEMENTS // int(np.prod(shape[1:]))))
    taken = np.union1d(rng.choice(shape[0], count, replace=False), [0, shape[0] - 1])
    whole = shared(problem.spec)
    gradients = {output.name for output in problem.spec.gradients}
    if gradients & whole & shapes.keys():
        return dict.fromkeys(shapes, slice(None))
    return {name: slice(None) if name in whole else taken for name in shapes}


def shared(operator: spec.Spec) -> set[str]:
    """Return the names of weights and their gradients: the arrays without an axis of rows."""
    weights = [entry.name for entry in operator.inputs if entry.role is spec.base.Role.WEIGHT and entry.axes]
    return {*weights, *(f"d{name}" for name in weights)}


def one_head(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator) -> Selection:
    """Pick one key head of one batch with the query heads that read it; for packed sequences, of all sequences.

    The gradient of an array that all batches or heads share is a sum over them: then all are used. If options depend on
    a score's place, the first batch and head are picked, so that places in the sample are those in the whole.
    """
    entries = (*problem.spec.inputs, *problem.spec.gradient_inputs)
    axes = {entry.name: entry.axes for entry in entries} | {"bias": ("B", "H", "Sq", "Sk")}
    axes["block_mask"] = ("B", "H", "tiles of Sq", "tiles of Sk")
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
    """Return the part of each axis that is used, unless it is all."""
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
        b = 0 if placed else int(rng.integers(shapes["q"][0]))
        taken["B"] = slice(b, b + 1)
    counted = problem.dropout_p and several  # dropout counts the heads of all batches
    if "H" not in shared and not counted:
        head = 0 if placed else int(rng.integers(problem.Hkv))
        taken["Hkv"] = slice(head, head + 1)
        taken["H"] = slice(head * problem.group, (head + 1) * problem.group)
    return taken


def matrices(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator) -> Selection | list[Part]:
    """Pick some rows and some columns of a product, with all of its terms; of one batch, if every array has its own.

    Each gradient is a product too, with its own rows, columns and terms. The bias's gradient, a sum over all rows and
    batches, is sampled together with b's.
    """
    if "dy" not in shapes:
        return _of_product(problem, shapes, rng, terms="K")
    da, db = ("da",), tuple(name for name in ("db", "dbias") if name in shapes)
    for_da = {name: shape for name, shape in shapes.items() if name not in db}
    for_db = {name: shape for name, shape in shapes.items() if name not in da}
    return [
        Part(da, _of_product(problem, for_da, rng, terms="N"), {"b_gradient": False, "bias_gradient": False}),
        Part(db, _of_product(problem, for_db, rng, terms="M"), {"a_gradient": False}),
    ]


def _of_product(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator, terms: str) -> Selection:
    """Pick the whole axis that is summed over, and some indices of the other two."""
    sizes = {"M": problem.M, "N": problem.N, "K": problem.K}
    taken = {axis: _some(size, rng) for axis, size in sizes.items() if axis != terms}
    of_a, of_b = ("MK", "KM")[problem.transpose_a], ("KN", "NK")[problem.transpose_b]
    axes = {"a": of_a, "da": of_a, "b": of_b, "db": of_b, "bias": "N", "dbias": "N"}
    batches = {shape[:-2] for name, shape in shapes.items() if axes.get(name) != "N"}
    one = len(batches) == 1 and "dbias" not in shapes  # which is a sum over all batches
    batch = tuple(slice(b, b + 1) for b in rng.integers(next(iter(batches)))) if one else (...,)
    picked: Selection = {}
    for name in shapes:
        own = axes.get(name, "MN")
        picked[name] = (*(batch if len(own) == 2 else ()), *_crossed([taken.get(axis) for axis in own]))
    return picked


def _some(size: int, rng: np.random.Generator) -> np.ndarray:
    """Pick some indices of an axis, in order, including the first and the last."""
    return np.union1d(rng.choice(size, min(size, SAMPLED_INDICES), replace=False), [0, size - 1])


def _crossed(indices: list[np.ndarray | None]) -> tuple[Any, ...]:
    """Return an index of these places along each axis; None for all places of an axis."""
    if len(indices) == 2 and indices[0] is not None and indices[1] is not None:
        return indices[0][:, None], indices[1]
    return tuple(slice(None) if found is None else found for found in indices)
