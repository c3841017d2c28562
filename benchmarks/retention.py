"""retention: its asv classes and their peers, the forms of flash-linear-attention (fla).

fla has tokens before heads in memory, like the cases, computes its states in bfloat16 in forward, and multiplies
float32 in TF32.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from .cases import suite
from .contestant import Contestant, with_autograd
from .samples import Part, Selection, Shapes
from .tree import spec

default_gamma = import_module(f"{spec.__name__}.retention").default_gamma
LONG = 2**16  # from this many tokens on, only two heads are checked: the reference would take minutes


def one_batch(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator) -> Selection | list[Part]:
    """Pick one batch with all of its heads, since decays depend on the head's number; for packed sequences, all. For
    long sequences, pick two heads, and pass their decays.
    """
    entries = (*problem.spec.inputs, *problem.spec.gradient_inputs)
    axes = {entry.name: entry.axes for entry in entries}
    b = None if "cu_seqlens" in shapes else int(rng.integers(shapes["q"][0]))
    few = b is not None and problem.Sq >= LONG and problem.H > 2
    two = np.sort(rng.choice(problem.H, 2, replace=False)) if few else np.arange(0)

    def taken(name: str) -> tuple[Any, ...]:
        own = next(axes[known] for known in (name, f"d{name}", name.removeprefix("d")) if known in axes)
        assert own is not None
        picked = {"B": slice(None) if b is None else slice(b, b + 1), "H": two if few else slice(None)}
        return tuple(picked.get(axis, slice(None)) for axis in own)

    found = {name: taken(name) for name in shapes}
    if not few:
        return found
    names = [[output.name for output in outputs] for outputs in (problem.spec.gradients, problem.spec.outputs)]
    results = next(tuple(there) for each in names if (there := [name for name in each if name in shapes]))
    decay_given = {"gamma", "log_decay"} & shapes.keys()
    decays = {} if decay_given else {"gamma": default_gamma(problem.H)[two].astype(np.float32)}
    return [Part(results, found, {}, decays)]


def plain(problem: spec.Problem) -> None:
    """Raise NotImplementedError for options that fla lacks, or returns in another form."""
    known = {"form", "scale", "max_seqlen"}
    defaults = {param.name: param.default for param in problem.spec.params}
    options = [name for name, value in problem.params.items() if name not in known and value != defaults[name]]
    options += [entry.name for entry in problem.spec.inputs if entry.optional and entry.name in problem.arrays]
    if options:
        raise NotImplementedError(f"fla is not asked for {', '.join(options)}")
    if "cu_seqlens" not in problem.arrays and problem.Sq != problem.Sk:
        raise NotImplementedError("fla has as many queries as keys")


def fla(problem: spec.Problem, *, name: str, function: str) -> Contestant:
    """Return one of fla's functions, of q, k [B, S, H, D] and v [B, S, H, Dv]."""
    plain(problem)
    theirs = getattr(import_module("fla.ops.retention"), function)

    def forward(q: Any, k: Any, v: Any) -> Any:
        o, _ = theirs(*(x.transpose(1, 2) for x in (q, k, v)), scale=problem.scale)
        return o.transpose(1, 2)

    return with_autograd(name, problem, forward)


def fla_varlen(problem: spec.Problem) -> Contestant:
    """Return chunk_retention for a batch of one, with the ends of the sequences in it."""
    plain(problem)
    theirs = import_module("fla.ops.retention").chunk_retention

    def forward(q: Any, k: Any, v: Any, cu_seqlens: Any) -> Any:
        o, _ = theirs(*(x.unsqueeze(0) for x in (q, k, v)), scale=problem.scale, cu_seqlens=cu_seqlens)
        return o.squeeze(0)

    return with_autograd("fla chunk", problem, forward)


FUNCTIONS = {
    "fla chunk": "chunk_retention",
    "fla fused chunk": "fused_chunk_retention",
    "fla parallel": "parallel_retention",
}

Retention = suite(
    "retention",
    sample=one_batch,
    peers={name: partial(fla, name=name, function=function) for name, function in FUNCTIONS.items()},
    rungs=("sm80",),
)
RetentionVarlen = suite("retention_varlen", sample=one_batch, peers={"fla chunk": fla_varlen})
