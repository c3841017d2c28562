"""A step of training of `torch_bridge.nn` modules, by each way to shard their parameters."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualops import torch_bridge as ours
from dualops.torch_bridge.optim import Lion

from .conftest import values

TOKENS, WIDTH, HIDDEN, BATCH = 6, 8, 12, 4


class Block(nn.Module):
    """Two norms, two products, and the sum that leads past the second norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ours.nn.RMSNorm(WIDTH), ours.nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.double()
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(1 + values(tuple(param.shape), torch.float64, "cpu", seed=i))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(ours.softmax(self.up(self.first(x))))
        y, summed = self.second(hidden, residual=x)  # SequenceParallel takes one argument by its place
        return y + summed


def trained(model: nn.Module, run: nn.Module, x: Tensor, reading: Callable[[], Any] = nullcontext) -> dict[str, Tensor]:
    """Parameters after two steps, and the gradients of the first; both are whole, or are made so by `reading`."""
    optimizer, found = Lion(run.parameters(), 2e-3, weight_decay=0.1), {}
    for _ in range(2):
        optimizer.zero_grad()
        (run(x) * 1.5 + 0.5).sin().square().mean().backward()
        if not found:
            with reading():
                found = {f"d {name}": _whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
    with reading():
        return found | {name: _whole(p) for name, p in model.named_parameters()}


def _whole(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def batch() -> Tensor:
    return values((BATCH, TOKENS, WIDTH), torch.float64, "cpu", seed=50)


def alone() -> dict[str, Tensor]:
    model = Block()
    return trained(model, model, batch())


def _in_parallel(model: Block, mesh: Any) -> None:
    """Norms of sharded tokens, products with sharded columns and rows."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {
        "first": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "second": SequenceParallel(),
    }
    parallelize_module(model, mesh, plan)


def tensor_parallel(mesh: Any) -> dict[str, Tensor]:
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = Block()
    _in_parallel(model, mesh["tensor"])
    return trained(model, model, distribute_tensor(batch(), mesh["tensor"], [Replicate()]))


def fsdp2(mesh: Any) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = Block()
    for part in (model.up, model.first, model):
        fully_shard(part, mesh=mesh["data"])
    return trained(model, model, batch()[mesh["data"].get_local_rank() :: 2])


def fsdp2_of_tensor_parallel(mesh: Any) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = Block()
    _in_parallel(model, mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])
    mine = batch()[mesh["data"].get_local_rank() :: 2]
    return trained(model, model, distribute_tensor(mine, mesh["tensor"], [Replicate()]))


def fsdp1(mesh: Any) -> dict[str, Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model, data = Block(), mesh["data"]
    run = FSDP(model, process_group=data.get_group(), use_orig_params=True, device_id=torch.device("cpu"))
    reading = partial(FSDP.summon_full_params, run, with_grads=True)
    return trained(model, run, batch()[data.get_local_rank() :: 2], reading)


WAYS: dict[str, Any] = {
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "tensor parallel": tensor_parallel,
    "FSDP2 of tensor parallel": fsdp2_of_tensor_parallel,
}
