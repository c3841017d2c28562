"""What the benchmarks of rms_norm and layer_norm share."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .contestant import Contestant, PeerMaker
from .tree import spec


def compiled(make: PeerMaker) -> PeerMaker:
    """Both functions of a peer of torch's operators through torch.compile, which turns each into Triton kernels."""

    def maker(problem: spec.Problem) -> Contestant:
        torch = import_module("torch")
        torch.compiler.reset()
        theirs = make(problem)
        assert theirs.backward is not None
        forward, backward = (torch.compile(f, dynamic=False) for f in (theirs.forward, theirs.backward))
        return Contestant("torch.compile", forward, backward)

    return maker


def added(x: Any, residual: Any) -> Any:
    """x + residual, or x where there is none: of inputs, and of dx and dsummed."""
    return x if residual is None else x + residual


def with_summed(y: Any, h: Any, residual: Any) -> Any:
    """What forward returns: y, and h if it is a result."""
    return y if residual is None else (y, h)


def of_rows(problem: spec.Problem) -> None:
    """Raise NotImplementedError for what Liger and QuACK do not do."""
    x = problem.arrays["x"]
    if len(x.shape) != 2:
        raise NotImplementedError(f"{problem.spec.name} of x {x.shape}: only of two axes")
    if "w" not in problem.arrays:
        raise NotImplementedError(f"{problem.spec.name} without w")
