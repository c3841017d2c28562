"""rope and rope_tables: their asv classes and their peers, which get tables as wide as heads, in q's dtype."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from .cases import suite
from .contestant import Contestant
from .samples import Selection, Shapes, rows
from .tree import spec

SAMPLED_TOKENS = 256

Tables = Callable[[Any, Any], tuple[Any, Any]]


def tokens(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator) -> Selection:
    """Pick some tokens of one batch, including the first and the last, in all heads, and their rows of the tables."""
    drawn = rng.choice(problem.S, min(problem.S, SAMPLED_TOKENS), replace=False)
    batches = next(iter(shapes.values()))[0]  # generated ones; later batches may repeat them
    taken, b = np.union1d(drawn, [0, problem.S - 1]), int(rng.integers(batches))
    batch = slice(b, b + 1)
    # of q and k; of tables for each batch; of tables by position
    every: dict[int, Any] = {4: (batch, slice(None), taken), 3: (batch, taken), 2: taken}
    return {name: every[len(shape)] for name, shape in shapes.items()}


def plain(problem: spec.Problem) -> None:
    """Raise NotImplementedError for options that peers lack: partial rotation, positions, tables for each batch."""
    cos = problem.arrays["cos"].shape
    if (2 * problem.half, cos[-1]) != (problem.D, problem.half) or "positions" in problem.arrays or len(cos) == 3:
        raise NotImplementedError("only all dimensions, by tables that have a row for each token")


def widened(problem: spec.Problem, turn: int = 1) -> Tables:
    """Return a function (cos, sin) -> [1, 1, S, D] of q's dtype. It computes them once per copy of the data, as a model
    does. turn: -1 for the inverse rotation.
    """
    torch, made = import_module("torch"), {}

    def tables(cos: Any, sin: Any) -> tuple[Any, Any]:
        place = cos.data_ptr()
        if place not in made:
            dtype, S = getattr(torch, problem.dtype), problem.S
            repeat = (lambda x: x.repeat_interleave(2, -1)) if problem.interleaved else (lambda x: x.repeat(1, 2))
            made[place] = tuple(repeat(table[:S]).to(dtype)[None, None] for table in (cos, turn * sin))
        return made[place]

    return tables


def formula(problem: spec.Problem) -> Callable[..., Any]:
    """Return Hugging Face's formula: x * cos + other * sin, where `other` has the other number of each pair."""
    torch, half = import_module("torch"), problem.half

    def halves(x: Any) -> Any:
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    def neighbours(x: Any) -> Any:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    other = neighbours if problem.interleaved else halves

    def apply(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        return q * cos + other(q) * sin, k * cos + other(k) * sin

    return apply


def contestant(name: str, problem: spec.Problem, apply: Callable[..., Any]) -> Contestant:
    """Return `apply` for both directions: the gradient is the rotation by the opposite angles."""
    plain(problem)
    tables, back = widened(problem), widened(problem, -1)
    return Contestant(
        name,
        lambda q, k, cos, sin: apply(q, k, *tables(cos, sin)),
        lambda dq_rotated, dk_rotated, cos, sin: apply(dq_rotated, dk_rotated, *back(cos, sin)),
    )


def eager(problem: spec.Problem) -> Contestant:
    """Return Hugging Face's formula, operation by operation."""
    return contestant("torch eager", problem, formula(problem))


def compiled(problem: spec.Problem) -> Contestant:
    """Return the same through torch.compile."""
    torch = import_module("torch")
    torch.compiler.reset()
    return contestant("torch.compile", problem, torch.compile(formula(problem), dynamic=False))


def liger(problem: spec.Problem) -> Contestant:
    """Return Liger's kernel, for both directions. It overwrites q and k, so they must be restored after it."""
    plain(problem)
    if problem.interleaved:
        raise NotImplementedError("Liger has no interleaved pairs")
    functions, tables = import_module("liger_kernel.ops.rope"), widened(problem)
    return Contestant(
        "Liger",
        lambda q, k, cos, sin: functions.LigerRopeFunction.apply(q, k, *(x[0] for x in tables(cos, sin))),
        lambda dq_rotated, dk_rotated, cos, sin: functions.rope_backward(
            dq_rotated, dk_rotated, *(x[0] for x in tables(cos, sin))
        )[:2],
    )


def tables_eager(problem: spec.Problem) -> Contestant:
    """Return angles in float64 by torch, operation by operation; scaled frequencies are computed before."""
    torch, frequencies = import_module("torch"), import_module("dualops.reference.rope").inverse_frequencies
    made = torch.from_numpy(frequencies(2 * problem.half, problem.theta, problem.scaling))
    made = made.to(problem.arrays["positions"].device)
    dtype = getattr(torch, problem.dtype)

    def forward(positions: Any) -> tuple[Any, Any]:
        angles = positions[..., None] * made
        return angles.cos().to(dtype), angles.sin().to(dtype)

    return Contestant("torch eager", forward)


Rope = suite(
    "rope", sample=tokens, peers={"torch eager": eager, "torch.compile": compiled, "Liger": liger}, rungs=("naive",)
)
RopeTables = suite("rope_tables", sample=rows, peers={"torch eager": tables_eager})
