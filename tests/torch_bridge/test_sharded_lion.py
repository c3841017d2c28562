"""Lion on DTensors: each process steps its shards, to the bits of one process with the whole tensors."""

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from dualops.torch_bridge import lion
from dualops.torch_bridge.optim import Lion

from .conftest import values
from .sharded import Found, found_by

pytestmark = pytest.mark.xdist_group("sharded_lion")  # the processes start once
WORLD, STEPS, AT = 2, 4, 2  # saved and loaded after AT steps
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "maximize": {"maximize": True},
    "capturable": {"capturable": True},
    "masters": {"master_weights": True, "momentum_dtype": torch.float32},
}


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "masters" else torch.float32


def net(dtype: torch.dtype, device: str) -> nn.Module:
    """Sizes that two processes do not share evenly, and one that a process has nothing of."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.copy_(values(tuple(param.shape), torch.float32, "cpu", seed=i))
    return model.to(device, dtype)


def optimizer_of(model: nn.Module, name: str) -> Lion:
    return Lion(model.parameters(), 0.03, weight_decay=0.1, **OPTIONS[name])


def with_gradients(model: nn.Module, turn: int) -> None:
    """The same numbers, whichever process has them."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for i, param in enumerate(model.parameters()):
        grad = values(tuple(param.shape), param.dtype, param.device.type, seed=100 * turn + i)
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        else:
            param.grad = grad


def whole(x: Any) -> Any:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x.detach().clone()).cpu()


def whole_state(model: nn.Module, optimizer: Lion) -> list[Tensor]:
    states = [optimizer.state[param] for param in model.parameters()]
    return [whole(p) for p in model.parameters()] + [whole(state[key]) for state in states for key in sorted(state)]


def alone(name: str, device: str = "cpu") -> list[Tensor]:
    model = net(dtype_of(name), device)
    optimizer = optimizer_of(model, name)
    for turn in range(STEPS):
        with_gradients(model, turn)
        optimizer.step()
    return whole_state(model, optimizer)


def steps(name: str, mesh: Any) -> tuple[list[Tensor], list[bool]]:
    """What STEPS steps come to, and whether shards stayed where they lay and count as modified."""
    from torch.distributed.fsdp import fully_shard

    model = net(dtype_of(name), mesh.device_type)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, name)
    params: list[Any] = list(model.parameters())
    before = [(p.to_local().data_ptr(), p._version) for p in params]
    for turn in range(STEPS):
        with_gradients(model, turn)
        optimizer.step()
    kept = [p.to_local().data_ptr() == at and p._version > version for p, (at, version) in zip(params, before)]
    states = [optimizer.state[p][key] for p in params for key in optimizer.state[p]]
    return whole_state(model, optimizer), [*kept, all(s.placements == params[0].placements for s in states)]


def resumed(name: str, mesh: Any) -> list[Tensor]:
    """What comes of AT steps, a checkpoint, and the other steps in a model and an optimizer made afterwards."""
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import fully_shard

    where: list[Any] = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(where)
    for first in (True, False):
        model = net(dtype_of(name), mesh.device_type)
        fully_shard(model, mesh=mesh)
        optimizer = optimizer_of(model, name)
        if first:
            turns = range(AT)
        else:
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            found: Any = dict(zip(("model", "optimizer"), state_dict.get_state_dict(model, optimizer)))
            load(found, checkpoint_id=where[0])
            state_dict.set_state_dict(
                model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
            )
            turns = range(AT, STEPS)
        for turn in turns:
            with_gradients(model, turn)
            optimizer.step()
        if first:
            found = dict(zip(("model", "optimizer"), state_dict.get_state_dict(model, optimizer)))
            save(found, checkpoint_id=where[0])
    return whole_state(model, optimizer)


def moved(mesh: Any) -> list[Tensor]:
    """A gradient that is a sum over processes, and one that is whole, with sharded parameters and a plain one."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    grad = values((5, 3), torch.float32, "cpu", seed=7)
    halves = [grad.clone(), torch.zeros_like(grad)][mesh.get_local_rank()]
    params = [distribute_tensor(values((5, 3), torch.float32, "cpu"), mesh, [Shard(0)]) for _ in range(2)]
    grads = [
        DTensor.from_local(halves, mesh, [Partial()], run_check=False),
        distribute_tensor(grad, mesh, [Replicate()]),
    ]
    params, grads = [*params, values((5, 3), torch.float32, "cpu")], [*grads, grad]
    momenta = [torch.zeros_like(p) for p in params]
    lion(params, grads, momenta, 0.1)
    return [whole(x) for x in (*params, *momenta)]


def refused(mesh: Any) -> list[str]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    plain = values((4, 2), torch.float32, "cpu")
    shard, full = distribute_tensor(plain, mesh, [Shard(0)]), distribute_tensor(plain, mesh, [Replicate()])
    partial_sum = DTensor.from_local(plain, mesh, [Partial()], run_check=False)
    found = []
    for arrays in (
        (shard, plain, torch.zeros_like(shard)),
        (plain, shard, torch.zeros_like(plain)),
        (shard, shard, full),
        (partial_sum, shard, partial_sum),
        ([shard], [shard], []),
    ):
        try:
            lion(*arrays, 0.1)
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def compiled(mesh: Any) -> list[Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def step(param: Tensor, grad: Tensor, momentum: Tensor) -> None:
        lion(param, grad, momentum, 0.1)

    param, grad = (distribute_tensor(values((5, 3), torch.float32, "cpu", seed=i), mesh, [Shard(0)]) for i in (0, 7))
    momentum = torch.zeros_like(param)
    torch.compile(step, backend="aot_eager", fullgraph=True)(
        param, grad.redistribute(placements=[Replicate()]), momentum
    )
    return [whole(x) for x in (param, momentum)]


REFUSALS = [
    "TypeError: lion: grads[0] is a Tensor, params[0] is a DTensor, expected the same",
    "TypeError: lion: grads[0] is a DTensor, params[0] is a Tensor, expected the same",
    "ValueError: lion: momenta[0] has placements R, params[0] has S(0), expected the same",
    "ValueError: lion: params[0] has placements P(sum), expected Shard or Replicate",
]
CHECKS: dict[str, Any] = {
    **{f"steps {name}": partial(steps, name) for name in OPTIONS},
    **{f"resumed {name}": partial(resumed, name) for name in OPTIONS},
    "moved": moved,
    "compiled": compiled,
    "refused": refused,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_by((WORLD,), CHECKS, tmp_path_factory.mktemp("lion"))


@pytest.fixture(scope="module")
def found_on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    checks = {name: check for name, check in CHECKS.items() if name.startswith(("steps", "resumed"))}
    return found_by((WORLD,), checks, tmp_path_factory.mktemp("gpus"), "cuda")


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(some, others))


@pytest.mark.parametrize("name", OPTIONS)
def test_shards_are_stepped_in_place_to_the_bits_of_one_process(name: str, found: list[Found]) -> None:
    for each in found:
        results, kept = each[f"steps {name}"]
        assert same(results, alone(name)) and all(kept)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_resumes_to_the_same_bits(name: str, found: list[Found]) -> None:
    for each in found:
        assert same(each[f"resumed {name}"], alone(name))


@pytest.mark.cuda(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_shards_on_two_gpus(name: str, found_on_gpus: list[Found]) -> None:
    expected = alone(name, "cuda")
    for each in found_on_gpus:
        results, kept = each[f"steps {name}"]
        assert same(results, expected) and all(kept)
        assert same(each[f"resumed {name}"], expected)


def test_gradients_get_the_placements_of_parameters_also_in_a_compiled_function(found: list[Found]) -> None:
    param, grad = values((5, 3), torch.float32, "cpu"), values((5, 3), torch.float32, "cpu", seed=7)
    momentum = torch.zeros_like(param)
    lion(param, grad, momentum, 0.1)
    for each in found:
        assert same(each["moved"], [param] * 3 + [momentum] * 3)
        assert same(each["compiled"], [param, momentum])


def test_tensors_that_do_not_fit_together(found: list[Found]) -> None:
    for each in found:
        *known, lengths = each["refused"]
        assert known == REFUSALS and lengths.startswith("ValueError: lion: ")
