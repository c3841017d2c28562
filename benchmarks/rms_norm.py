"""rms_norm: its asv class and its peers. Backward peers get x, rstd, dy and run only their backward kernels."""

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
    if problem.offset:
        raise NotImplementedError("torch has no offset")

    def forward(x: Any, w: Any = None, residual: Any = None) -> Any:
        h = added(x, residual)
        return with_summed(torch.nn.functional.rms_norm(h, shape, w, eps), h, residual)

    def backward(x: Any, rstd: Any, dy: Any, w: Any = None, dsummed: Any = None) -> Any:
        wanted = [True, w is not None]
        dx, dw = torch.ops.aten._fused_rms_norm_backward(dy, x, shape, rstd[..., None], w, wanted)
        return added(dx, dsummed), dw

    return Contestant("torch eager", forward, backward)


def liger(problem: spec.Problem) -> Contestant:
    """Return the functions that Liger's autograd functions call, with all arithmetic in float32, as in dualops. dx has
    its own memory: by default Liger overwrites dy.
    """
    of_rows(problem)
    eps, offset, mode = problem.eps, problem.offset, "gemma"
    plain, fused = (import_module(f"liger_kernel.ops.{name}") for name in ("rms_norm", "fused_add_rms_norm"))
    settings = import_module("liger_kernel.ops.utils").calculate_settings(problem.N)
    number = plain._CASTING_MODE_GEMMA.value

    def forward(x: Any, w: Any, residual: Any = None) -> Any:
        if residual is None:
            return plain.rms_norm_forward(x, w, eps, offset, mode, None)[0]
        return fused.fused_add_rms_norm_forward(x, residual, w, eps, offset, mode)[:2]

    def backward(x: Any, rstd: Any, dy: Any, w: Any, dsummed: Any = None) -> Any:
        if dsummed is None:
            return plain.rms_norm_backward(dy, x, w, rstd, offset, number, *settings, in_place=False, row_mode=None)
        stages = 2
        dx, _, dw = fused.fused_add_rms_norm_backward(
            dy, dsummed, x, w, rstd, offset, number, *settings, stages, in_place=False
        )
        return dx, dw

    return Contestant("Liger", forward, backward)


def quack(problem: spec.Problem) -> Contestant:
    """Return QuACK's forward and backward functions, without its autograd function."""
    of_rows(problem)
    eps, offset, functions = problem.eps, problem.offset, import_module("quack.rmsnorm")

    def forward(x: Any, w: Any, residual: Any = None) -> Any:
        y, h, _ = functions.rmsnorm_fwd(x, w, residual=residual, eps=eps, weight_offset=offset)
        return with_summed(y, h, residual)

    def backward(x: Any, rstd: Any, dy: Any, w: Any, dsummed: Any = None) -> Any:
        return functions.rmsnorm_bwd(x, w, dy, rstd, dsummed, weight_offset=offset)[:2]

    return Contestant("QuACK", forward, backward)


RmsNorm = suite(
    "rms_norm",
    sample=rows,
    peers={"torch eager": eager, "torch.compile": compiled(eager), "Liger": liger, "QuACK": quack},
)
