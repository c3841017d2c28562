"""Lion: its asv classes and its peers. All overwrite params and momenta, as an optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from . import cases
from .cases import CLOCK, require_gpu, require_measured_tree, suite
from .clock import VirtualClock
from .contestant import Contestant
from .samples import Selection, Shapes, rows
from .tree import spec

BETAS, WEIGHT_DECAY, LR = (0.9, 0.99), 0.1, 1e-4


def elements(problem: spec.Problem, shapes: Shapes, rng: np.random.Generator) -> Selection:
    """Pick some elements of each array, and lr."""
    picked = rows(problem, {name: shape for name, shape in shapes.items() if shape}, rng)
    return picked | {name: ... for name, shape in shapes.items() if not shape}


def formula(params: Any, grads: Any, momenta: Any, lr: Any, betas: Any, weight_decay: float, master: Any = None) -> Any:
    """Compute the step in plain torch, as a user would write it."""
    p = params if master is None else master
    step = momenta.lerp(grads.to(momenta.dtype), 1 - betas[0]).sign_()
    p.mul_(1 - lr * weight_decay).add_(step.to(p.dtype) * -lr)
    momenta.lerp_(grads.to(momenta.dtype), 1 - betas[1])
    if master is None:
        return params, momenta
    params.copy_(master)
    return params, momenta, master


def eager(problem: spec.Problem) -> Contestant:
    """Return the step in torch, operation by operation."""
    options = (problem.betas, problem.weight_decay)
    return Contestant(
        "torch eager",
        lambda params, grads, momenta, lr, master=None: formula(params, grads, momenta, lr, *options, master),
    )


def compiled(problem: spec.Problem) -> Contestant:
    """Return the same through torch.compile: one Triton kernel."""
    torch = import_module("torch")
    torch.compiler.reset()
    return Contestant("torch.compile", torch.compile(eager(problem).forward, dynamic=False))


def lion_pytorch(problem: spec.Problem) -> Contestant:
    """Return lion-pytorch's Triton kernel, whose lr is a number."""
    if "master" in problem.arrays:
        raise NotImplementedError("lion-pytorch has no master weights")
    update = import_module("lion_pytorch.triton").update_fn
    known: dict[int, float] = {}

    def forward(params: Any, grads: Any, momenta: Any, lr: Any) -> Any:
        place = lr.data_ptr()
        if place not in known:
            known[place] = float(lr)
        update(params, grads, momenta, known[place], problem.weight_decay, *problem.betas)
        return params, momenta

    return Contestant("lion-pytorch", forward)


Lion = suite(
    "lion", sample=elements, peers={"torch eager": eager, "torch.compile": compiled, "lion-pytorch": lion_pytorch}
)


# --- many tensors --------------------------------------------------------------------------------


class Model:
    """`count` parameters of `size` elements with gradients, on a device."""

    def __init__(self, count: int, size: int, dtype: str, device: str = "cuda"):
        torch = import_module("torch")
        made = torch.randn(2, count, size, device=device).to(getattr(torch, dtype))
        self.params = [torch.nn.Parameter(row.clone()) for row in made[0]]
        for param, gradient in zip(self.params, made[1]):
            param.grad = gradient.clone()


def dualops_step(params: Sequence[Any]) -> Callable[[], object]:
    """Return a step of dualops' optimizer."""
    optimizer = import_module("dualops.torch_bridge.optim").Lion(params, LR, BETAS, WEIGHT_DECAY)
    return optimizer.step


def lion_pytorch_step(params: Sequence[Any]) -> Callable[[], object]:
    """Return a step of lion-pytorch's optimizer on its Triton kernel, with one launch per tensor."""
    return import_module("lion_pytorch").Lion(params, LR, BETAS, WEIGHT_DECAY, use_triton=True).step


def foreach_step(params: Sequence[Any]) -> Callable[[], object]:
    """Return a step with torch's operations on lists, as in lion-pytorch's second optimizer."""
    torch = import_module("torch")
    momenta = [torch.zeros_like(param) for param in params]
    grads = [param.grad for param in params]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_mul_(params, 1 - LR * WEIGHT_DECAY)
        updates = torch._foreach_lerp(momenta, grads, 1 - BETAS[0])
        torch._foreach_sign_(updates)
        torch._foreach_add_(params, updates, alpha=-LR)
        torch._foreach_lerp_(momenta, grads, 1 - BETAS[1])

    return step


def compiled_foreach_step(params: Sequence[Any]) -> Callable[[], object]:
    """Return the same through torch.compile: a few kernels, but a minute of compilation for a thousand tensors."""
    return import_module("torch").compile(foreach_step(params))


STEPS: dict[str, Callable[[Sequence[Any]], Callable[[], object]]] = {
    "dualops": dualops_step,
    "lion-pytorch": lion_pytorch_step,
    "torch foreach": foreach_step,
    "torch.compile": compiled_foreach_step,
}


class LionLists:
    """Steps of `dualops.torch_bridge.optim.Lion` on many tensors, including the host's work."""

    params: ClassVar[list[list[str]]] = [["1000x10000-bfloat16", "300x1000000-bfloat16"]]
    param_names: ClassVar[list[str]] = ["tensors"]
    timer: ClassVar[VirtualClock] = CLOCK
    number, rounds, repeat, warmup_time, timeout, version = 1, 1, cases.Suite.repeat, 0.0, 300.0, "1"
    calls: ClassVar[dict[str, Callable[[], object]]] = {}

    def setup(self, tensors: str) -> None:
        """Raise NotImplementedError, which asv reports as skipped, if nothing can be timed."""
        require_gpu()
        require_measured_tree()

    def time_step(self, tensors: str) -> None:
        from .timing import BURST_CALLS, stopwatch, warm_up

        if tensors not in self.calls:
            sizes, dtype = tensors.split("-")
            count, size = map(int, sizes.split("x"))
            self.calls[tensors] = dualops_step(Model(count, size, dtype).params)
            warm_up(self.calls[tensors])
        CLOCK.advance(stopwatch(self.calls[tensors], BURST_CALLS))
