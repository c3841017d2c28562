"""Optimizers in torch's form: `Lion`, which uses the operator of that name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..spec import lion as SPEC
from ..spec.domains import boolean, optional, shown
from ..spec.lion import LISTS
from ..spec.meta import number_meta
from .lion import lion
from .sharding import local_shards

_negatives: Callable[..., Iterable[Tensor]] = getattr(torch, "_foreach_neg")  # noqa: B009  private, and in one launch

# of a parameter group, beyond lr, betas and weight_decay, which lion-pytorch has too
OPTIONS: dict[str, Any] = {
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "fused": None,
    "momentum_dtype": None,
    "master_weights": False,
}
# the boolean ones
FLAGS: dict[str, Callable[[Any], Any]] = {
    "foreach": optional(boolean),
    "maximize": boolean,
    "capturable": boolean,
    "fused": optional(boolean),
    "master_weights": boolean,
}


class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675): steps by the sign of an interpolated momentum.

        c = beta1 * m + (1 - beta1) * g
        p = p * (1 - lr * weight_decay) - lr * sign(c)
        m = beta2 * m + (1 - beta2) * g

    All dense parameters of a group that share their dtypes are one launch. The arithmetic is float32 (float64 for
    float64 parameters), bit for bit that of `dualops.reference.lion`, which CPU parameters use.

    params: parameters, (name, parameter) pairs, or groups of them with their own options; a group may be empty.
    lr: a number, or a tensor without axes; a tensor on a GPU is read when the kernel runs. betas, weight_decay: see
    above.
    foreach, fused: torch's options, None, True or False, but not both True. They change nothing, since there is only
    one implementation; both accept a tensor as lr. GradScaler unscales the gradients before the step, with fused=True
    too.
    maximize: step towards larger values.
    capturable: keep lr as a tensor on the device of the group's first parameter, so that a CUDA graph of `step` can be
    replayed with another lr: a scheduler of torch.optim.lr_scheduler writes to it in place. Call `step` once before the
    capture.
    momentum_dtype: of the momenta; None: the parameters' dtype. float32, float16 or bfloat16, except for float64
    parameters.
    master_weights: keep float32 copies of the parameters; a step updates these and rounds them to the parameters.

    Parameters may be DTensors, as fully_shard (FSDP2) and parallelize_module make them: each process steps its shards
    in place, with the same bits as one process with the same gradients. The state is sharded as its DTensor, so
    torch.distributed.checkpoint saves and loads it.

    State: `exp_avg`, the momentum, with lion-pytorch's name, so that state dicts load both ways; with master_weights
    also `master`. Options that a loaded state dict lacks are unchanged.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        momentum_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ):
        given = {"betas": betas, "weight_decay": weight_decay}
        defaults = {"lr": lr, **SPEC.normal_params(SPEC.params, given, "Lion")}
        options = (foreach, maximize, capturable, fused, momentum_dtype, master_weights)
        if foreach and fused:
            raise RuntimeError("Lion: foreach and fused are both True, expected one of them at most")
        super().__init__(params, defaults | dict(zip(OPTIONS, options, strict=True)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _settle(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in OPTIONS.items():
                group.setdefault(name, default)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict of this class or of lion-pytorch's Lion."""
        theirs, mine = state_dict["param_groups"], self.param_groups
        merged = [{**{name: own[name] for name in OPTIONS}, **group} for group, own in zip(theirs, mine)] + theirs[
            len(mine) :
        ]  # torch describes a different number of groups
        super().load_state_dict({**state_dict, "param_groups": merged})
        for group in self.param_groups:
            _settle(group)
        # torch has cast everything to the parameters' dtype
        numbers = [number for group in theirs for number in group["params"]]
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for number, (param, group) in zip(numbers, params, strict=True):
            saved = state_dict["state"].get(number, {})
            for name, dtype in (("exp_avg", group["momentum_dtype"] or param.dtype), ("master", _wide(param))):
                if name in saved:
                    self.state[param][name] = saved[name].to(device=param.device, dtype=dtype, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Returns the result of `closure`, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for device, lists in self._lists(group).items():
                if group["maximize"]:
                    lists = local_shards("Lion", lists)
                    lists["grads"] = list(_negatives(lists["grads"]))
                lr = group["lr"]
                if isinstance(lr, Tensor) and lr.is_cuda and lr.device != device:
                    lr = lr.to(device)
                lion(**lists, lr=lr, betas=group["betas"], weight_decay=group["weight_decay"])
        return loss

    def _lists(self, group: dict[str, Any]) -> dict[torch.device, dict[str, list[Tensor]]]:
        """Return the tensors of a group's step, by device; parameters without state get one."""
        found: dict[torch.device, dict[str, list[Tensor]]] = {}
        has_master = group["master_weights"]
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError("Lion: a gradient is sparse, which is not supported")
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(param, dtype=group["momentum_dtype"])
            if has_master and "master" not in state:
                state["master"] = param.detach().to(_wide(param), copy=True)
            device = param.device
            lists = found.get(device)
            if lists is None:
                lists = found[device] = {name: [] for name in LISTS[: 4 if has_master else 3]}
            lists["params"].append(param)
            lists["grads"].append(grad)
            lists["momenta"].append(state["exp_avg"])
            if has_master:
                lists["master"].append(state["master"])
        return found


def _settle(group: dict[str, Any]) -> None:
    """Check a group's flags and lr, and make lr a tensor on the parameters' device if it must be read there."""
    for name, domain in FLAGS.items():
        try:
            group[name] = domain(group[name])
        except TypeError as error:
            raise TypeError(f"Lion: {name} is {shown(group[name])}, {error}") from None
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            raise ValueError(f"Lion: lr has shape {tuple(lr.shape)} and dtype {lr.dtype}, expected one float")
        group["lr"] = lr.reshape(())  # the same memory
    elif number_meta(lr, "Lion", "lr", ("float64",)).pointer < 0:
        raise ValueError(f"Lion: lr is {lr}, expected 0 or more")
    if group["capturable"] and group["params"]:
        first = group["params"][0]
        dtype = lr.dtype if isinstance(lr, Tensor) else _wide(first)
        group["lr"] = torch.as_tensor(group["lr"], dtype=dtype, device=first.device)


def _wide(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's arithmetic."""
    return torch.float64 if param.dtype is torch.float64 else torch.float32
