"""layer_norm: its asv class and its peers. Backward peers get x, mean, rstd, dy and run only their kernels."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .cases import suite
from .contestant import Contestant
from .norms import added, compiled, of_rows, with_summed
from .samples import rows
from .tree import spec


def eager(problem: spec.Problem) -> Contestant:
    """Return torch's function and the aten operator of its gradient; residual and dsummed are added separately."""
    torch, shape, eps = import_module("torch"), [problem.N], problem.eps

    def forward(x: Any, w: Any = None, b: Any = None, residual: Any = None) -> Any:
        h = added(x, residual)
        return with_summed(torch.nn.functional.layer_norm(h, shape, w, b, eps), h, residual)

    def backward(x: Any, mean: Any, rstd: Any, dy: Any, w: Any = None, b: Any = None, dsummed: Any = None) -> Any:
        wanted, statistics = [True, w is not None, b is not None], (mean[..., None], rstd[..., None])
        found = torch.ops.aten.native_layer_norm_backward(dy, x, shape, *statistics, w, b, wanted)
        dx, *rest = (each for each, is_wanted in zip(found, wanted) if is_wanted)
        return added(dx, dsummed), *rest

    return Contestant("torch eager", forward, backward)


def liger(problem: spec.Problem) -> Contestant:
    """Return the functions that Liger's autograd function calls."""
    plain(problem)
    eps, functions = problem.eps, import_module("liger_kernel.ops.layer_norm")
    return Contestant(
        "Liger",
        lambda x, w, b: functions.layer_norm_forward(x, w, b, eps)[0],
        lambda x, mean, rstd, dy, w, b: functions.layer_norm_backward(dy, x, w, b, mean, rstd),
    )


def quack(problem: spec.Problem) -> Contestant:
    """Return QuACK's backward function, and the operator that its forward function calls: the function requires float32
    weights, the operator does not.
    """
    plain(problem)
    torch, eps, functions = import_module("torch"), problem.eps, import_module("quack.rmsnorm")

    def forward(x: Any, w: Any, b: Any) -> Any:
        y = torch.empty_like(x)
        functions._rmsnorm_fwd(x, w, y, bias=b, eps=eps, is_layernorm=True)
        return y

    return Contestant("QuACK", forward, lambda x, mean, rstd, dy, w, b: functions.layernorm_bwd(x, w, dy, rstd, mean))


def plain(problem: spec.Problem) -> None:
    """Raise NotImplementedError for problems that Liger and QuACK do not support."""
    of_rows(problem)
    if "b" not in problem.arrays:
        raise NotImplementedError("layer_norm without b")
    if "residual" in problem.arrays:
        raise NotImplementedError("layer_norm with a residual")


LayerNorm = suite(
    "layer_norm",
    sample=rows,
    peers={"torch eager": eager, "torch.compile": compiled(eager), "Liger": liger, "QuACK": quack},
)
