"""The implementations that are timed: dualops' own, and the peers'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from .tree import spec


class Contestant(NamedTuple):
    """An implementation. Its arrays have the spec's names, and parameters are bound already.

    release: frees memory that calls have kept, such as autograd graphs, for the other contestants; a later call
    allocates it again.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    release: Callable[[], object] = lambda: None


# Raises ImportError if the peer is not installed, NotImplementedError if it does not support the problem.
PeerMaker = Callable[[spec.Problem], Contestant]


def dualops_contestant(operator: spec.Spec, case: spec.Case, rung: str | None = None) -> Contestant:
    """Return the operator of the importable `dualops`, on its default rung or on this one.

    Raises NotImplementedError if that dualops does not have it.
    """
    functions = import_module("dualops.cuda")
    if not hasattr(functions, operator.name):
        raise NotImplementedError(f"this dualops has no {operator.name}")
    given = case.params if rung is None else {**case.params, "kernel": rung}
    backward = getattr(functions, f"{operator.name}_backward", None)
    return Contestant(
        "dualops" if rung is None else f"dualops {rung}",
        partial(getattr(functions, operator.name), **given),
        None if backward is None else partial(backward, **given),
    )


def with_autograd(name: str, problem: spec.Problem, forward: Callable[..., Any]) -> Contestant:
    """Return `forward` and its gradient by torch's autograd.

    The graph is built once for each copy of the data, at its first use after `release`. So a later call is the gradient
    alone. dualops' forward results are not used.
    """
    torch = import_module("torch")
    inputs = list(problem.arrays)
    wanted = [name.removeprefix("d") for name in problem.outputs(problem.spec.gradients)]
    incoming = f"d{problem.spec.outputs[0].name}"
    graphs: dict[int, tuple[Any, list[Any]]] = {}

    def backward(**arrays: Any) -> Any:
        place = arrays[inputs[0]].data_ptr()
        if place not in graphs:
            given = {name: arrays[name].detach() for name in inputs}
            leaves = [given[name].requires_grad_() for name in wanted]
            with torch.enable_grad():
                graphs[place] = forward(**given), leaves
        result, leaves = graphs[place]
        return torch.autograd.grad(result, leaves, arrays[incoming], retain_graph=True)

    return Contestant(name, forward, backward, graphs.clear)
