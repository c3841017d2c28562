"""softmax: its asv class and its peers. Backward peers get y and dy and run only their backward kernel."""

from __future__ import annotations

from importlib import import_module

from .cases import suite
from .contestant import Contestant
from .samples import rows
from .tree import spec


def eager(problem: spec.Problem) -> Contestant:
    """Return torch.softmax, and the aten operator of its gradient."""
    torch, axis = import_module("torch"), problem.axis
    return Contestant(
        "torch eager",
        lambda x: torch.softmax(x, axis),
        lambda y, dy: torch.ops.aten._softmax_backward_data(dy, y, axis, y.dtype),
    )


def compiled(problem: spec.Problem) -> Contestant:
    """Return the same two through torch.compile, which generates a Triton kernel for each."""
    torch = import_module("torch")
    torch.compiler.reset()
    theirs = eager(problem)
    assert theirs.backward is not None
    return Contestant(
        "torch.compile", torch.compile(theirs.forward, dynamic=False), torch.compile(theirs.backward, dynamic=False)
    )


def liger(problem: spec.Problem) -> Contestant:
    """Return Liger's autograd function, and the function that its backward calls."""
    of_last_axis(problem)
    ops = import_module("liger_kernel.ops.softmax")
    block_size, num_warps = import_module("liger_kernel.ops.utils").calculate_settings(problem.N)
    return Contestant(
        "Liger",
        lambda x: ops.LigerSoftmaxFunction.apply(x),
        lambda y, dy: ops._softmax_backward(dy, y, block_size, num_warps, block_size < problem.N),
    )


def quack(problem: spec.Problem) -> Contestant:
    """Return QuACK's forward and backward functions, without its autograd function."""
    of_last_axis(problem)
    functions = import_module("quack.softmax")
    return Contestant("QuACK", functions.softmax_fwd, lambda y, dy: functions.softmax_bwd(dy, y))


def of_last_axis(problem: spec.Problem) -> None:
    """Raise NotImplementedError for problems that Liger and QuACK do not support."""
    name, x = next(iter(problem.arrays.items()))
    if len(x.shape) != 2 or problem.axis != 1:
        raise NotImplementedError(f"softmax along axis {problem.axis} of {name} {x.shape}: only along the last of two")


Softmax = suite(
    "softmax", sample=rows, peers={"torch eager": eager, "torch.compile": compiled, "Liger": liger, "QuACK": quack}
)
