"""matmul: its asv class and its peers: cuBLAS, as torch calls it, float32 as float32."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .cases import suite
from .contestant import Contestant, with_autograd
from .samples import matrices
from .tree import spec


def eager(problem: spec.Problem) -> Contestant:
    """torch.matmul, which is cuBLAS, with torch's own kernels for what comes upon it."""
    return with_autograd("torch eager", problem, _forward(problem))


def compiled(problem: spec.Problem) -> Contestant:
    """The same through torch.compile, which leaves the product to cuBLAS and fuses the rest."""
    torch = import_module("torch")
    torch.compiler.reset()
    return with_autograd("torch.compile", problem, torch.compile(_forward(problem), dynamic=False))


def _forward(problem: spec.Problem) -> Any:
    torch = import_module("torch")
    if torch.backends.cuda.matmul.allow_tf32 or problem.precision is not None:
        raise NotImplementedError("cuBLAS is compared in float32 arithmetic: torch.backends.cuda.matmul.allow_tf32")
    functional = torch.nn.functional
    activations = {None: lambda z: z, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
    act = activations[problem.activation]

    def forward(a: Any, b: Any, bias: Any = None) -> Any:
        left, right = a.mT if problem.transpose_a else a, b.mT if problem.transpose_b else b
        if bias is not None and right.dim() == 2:
            return act(functional.linear(left, right.mT, bias.to(a.dtype)))  # cuBLAS adds the bias
        return act(left @ right if bias is None else left @ right + bias.to(a.dtype))

    return forward


Matmul = suite("matmul", sample=matrices, peers={"torch eager": eager, "torch.compile": compiled}, rungs=("naive",))
