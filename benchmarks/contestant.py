"""Whose implementation is timed: dualops' own, or a peer's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from .tree import spec


class Contestant(NamedTuple):
    """Somebody's implementation; arrays go in under the spec's names, parameters are bound already.

    release: drops what calls have kept, graphs of autograd say, so that others have the memory; a later call makes it
    anew.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    release: Callable[[], object] = lambda: None


# Raises ImportError where the peer is not installed, NotImplementedError where it cannot do the problem.
PeerMaker = Callable[[spec.Problem], Contestant]


def dualops_contestant(operator: spec.Spec, case: spec.Case, rung: str | None = None) -> Contestant:
    """The operator as the importable `dualops` has it, on the rung it takes or on this one.

    Raises NotImplementedError where it has not.
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
    """`forward`, and the gradient that torch's autograd has of it.

    The graph is made once for each copy of the data, when it is first seen since the last `release`, so that a later
    call is the gradient alone; what forward returned to dualops is not used.
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
