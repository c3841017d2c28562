"""optim.Lion: a loop over formulas in torch, bit for bit; state dicts of lion-pytorch's layout; torch's ways of use."""

import copy
import io
from inspect import signature
from typing import Any

import pytest
import torch

from dualops.torch_bridge.optim import Lion

from .conftest import values

Model = list[torch.nn.Parameter]
OPTIONS = ("foreach", "maximize", "capturable", "fused", "momentum_dtype", "master_weights")
DEFAULTS = [None, False, False, None, None, False]


def model(device: str, dtype: torch.dtype = torch.float32) -> Model:
    return [torch.nn.Parameter(values(shape, dtype, device, seed=i)) for i, shape in enumerate([(7, 5), (11,), ()])]


def with_gradients(params: Model, turn: int) -> None:
    for i, param in enumerate(params):
        param.grad = values(tuple(param.shape), param.dtype, str(param.device), seed=100 * turn + i)


class Plain:
    """Lion in torch's own operations, in float32, with momenta and masters of any dtype."""

    def __init__(self, params: Model, momentum_dtype: torch.dtype | None = None, masters: bool = False):
        self.params = [param.detach().clone() for param in params]
        self.momenta = [torch.zeros_like(p, dtype=momentum_dtype) for p in self.params]
        self.masters = [p.float() for p in self.params] if masters else None

    def step(self, params: Model, lr: float, betas: tuple[float, float], weight_decay: float, sign: float = 1) -> None:
        rate, decay = torch.tensor(lr), torch.tensor(weight_decay)
        (beta1, rest1), (beta2, rest2) = ((torch.tensor(b), torch.tensor(1 - b)) for b in betas)
        rate, decay, beta1, rest1, beta2, rest2 = (
            x.to(params[0].device) for x in (rate, decay, beta1, rest1, beta2, rest2)
        )
        for i, param in enumerate(params):
            assert param.grad is not None
            g, m = sign * param.grad.float(), self.momenta[i].float()
            p = self.params[i].float() if self.masters is None else self.masters[i]
            c = beta1 * m + rest1 * g
            p = p * (1 - rate * decay) - rate * torch.sign(c)
            self.momenta[i].copy_(beta2 * m + rest2 * g)
            self.params[i].copy_(p)
            if self.masters is not None:
                self.masters[i] = p


def same(optimizer: Lion, params: Model, plain: Plain) -> bool:
    found = [(param, optimizer.state[param]["exp_avg"]) for param in params]
    masters = plain.masters or [optimizer.state[param].get("master") for param in params]
    assert all(("master" in optimizer.state[param]) == (plain.masters is not None) for param in params)
    return all(
        torch.equal(p, a)
        and torch.equal(m, b)
        and (plain.masters is None or torch.equal(optimizer.state[p]["master"], w))
        for (p, m), a, b, w in zip(found, plain.params, plain.momenta, masters, strict=True)
    )


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("dtype", "momentum_dtype", "masters"),
    [
        (torch.float32, None, False),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, None, False),
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.bfloat16, True),
    ],
    ids=str,
)
def test_bits_of_a_plain_implementation(
    dtype: torch.dtype, momentum_dtype: torch.dtype | None, masters: bool, maximize: bool, device: str
) -> None:
    params = model(device, dtype)
    optimizer = Lion(
        params, 0.01, (0.85, 0.95), 0.1, maximize=maximize, momentum_dtype=momentum_dtype, master_weights=masters
    )
    plain = Plain(params, momentum_dtype, masters)
    for turn in range(4):
        with_gradients(params, turn)
        optimizer.step()
        plain.step(params, 0.01, (0.85, 0.95), 0.1, -1.0 if maximize else 1.0)
        assert same(optimizer, params, plain)


def test_groups_have_options_of_their_own(device: str) -> None:
    params = model(device)
    optimizer = Lion([{"params": params[:1], "lr": 0.5, "betas": (0.5, 0.5)}, {"params": params[1:]}], weight_decay=0.3)
    first, second = Plain(params[:1]), Plain(params[1:])
    with_gradients(params, 1)
    params[2].grad = None
    kept = params[2].detach().clone()
    optimizer.step()
    first.step(params[:1], 0.5, (0.5, 0.5), 0.3)
    second.step(params[1:2], 1e-4, (0.9, 0.99), 0.3)
    assert torch.equal(params[0], first.params[0]) and torch.equal(params[1], second.params[0])
    assert torch.equal(params[2], kept) and params[2] not in optimizer.state


def test_memory_that_moves_between_steps(device: str) -> None:
    """Gradients, and parameters that are given other memory; what overlaps is refused then as at first."""
    params = model(device)
    optimizer, plain = Lion(params, 0.01), Plain(params)
    for turn in range(4):
        with_gradients(params, turn)
        if turn > 1:
            params[turn - 2].data = params[turn - 2].detach().clone()
        optimizer.step()
        plain.step(params, 0.01, (0.9, 0.99), 0.0)
        assert same(optimizer, params, plain)
    params[1].grad = params[1].detach()
    with pytest.raises(ValueError, match=r"lion: params\[1\] overlaps grads\[1\] in memory"):
        optimizer.step()
    params[1].grad = optimizer.state[params[0]]["exp_avg"].view(-1)[5:16]
    with pytest.raises(ValueError, match=r"lion: momenta\[0\] overlaps grads\[1\] in memory"):
        optimizer.step()
    assert same(optimizer, params, plain)


@pytest.mark.parametrize("capturable", [False, True])
def test_groups_may_be_empty(capturable: bool, device: str) -> None:
    """As in torch's optimizers, wherever they stand; without any group there is nothing to optimize."""
    params = model(device)
    optimizer = Lion([{"params": []}, {"params": params}], 0.01, capturable=capturable)
    optimizer.add_param_group({"params": [], "lr": 0.5})
    plain = Plain(params)
    with_gradients(params, 1)
    optimizer.step()
    plain.step(params, 0.01, (0.9, 0.99), 0.0)
    assert same(optimizer, params, plain)
    again = Lion([{"params": []}, {"params": params}, {"params": []}], 0.1, capturable=capturable)
    again.load_state_dict(optimizer.state_dict())
    assert [float(group["lr"]) for group in again.param_groups] == pytest.approx([0.01, 0.01, 0.5])
    alone = Lion([{"params": []}], capturable=capturable)
    alone.step()
    alone.load_state_dict(alone.state_dict())
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        Lion([], capturable=capturable)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}], ids=str)
def test_foreach_and_fused_change_nothing(flags: dict[str, Any], capturable: bool, lr: Any, device: str) -> None:
    params = model(device)
    optimizer, plain = Lion(params, lr, weight_decay=0.1, capturable=capturable, **flags), Plain(params)
    for turn in range(2):
        with_gradients(params, turn)
        optimizer.step()
        plain.step(params, 0.01, (0.9, 0.99), 0.1)
        assert same(optimizer, params, plain)
    (group,) = optimizer.state_dict()["param_groups"]
    assert {name: group[name] for name in flags} == flags


def test_keywords_are_those_of_torchs_optimizers() -> None:
    theirs, ours = (signature(kind).parameters for kind in (torch.optim.Adam, Lion))
    for name in ("foreach", "maximize", "capturable", "fused"):
        assert ours[name].default is theirs[name].default
        assert ours[name].kind is theirs[name].kind


@pytest.mark.parametrize("fused", [None, True])
def test_a_scaler_unscales_the_gradients_and_leaves_out_steps(fused: bool | None, device: str) -> None:
    params = model(device)
    optimizer, scaler, plain = Lion(params, 0.01, fused=fused), torch.amp.GradScaler(device), Plain(params)
    for turn in range(3):
        scaler.scale(torch.ones((), device=device))
        with_gradients(params, turn)
        given = [param.grad for param in params if param.grad is not None]
        if turn == 1:
            given[0][0] = float("inf")
        else:
            plain.step(params, 0.01, (0.9, 0.99), 0.0)
        for grad in given:
            grad.mul_(scaler.get_scale())  # powers of two
        scaler.step(optimizer)
        scaler.update()
        assert same(optimizer, params, plain)


def test_closure_and_hooks() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer, seen = Lion([param], lr=0.25), []
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param * torch.tensor([1.0, -1.0, 0.0])).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 0.0
    assert param.tolist() == [0.75, 1.25, 1.0] and seen == ["after"]


# --- state dicts ---------------------------------------------------------------------------------


# of lion_pytorch.Lion(params, 0.01, (0.9, 0.99), 0.1) after a step, version 0.2.5
THEIRS: dict[str, Any] = {
    "state": {0: {"exp_avg": torch.full((2, 2), 0.01)}, 1: {"exp_avg": torch.tensor([-0.02, 0.5])}},
    "param_groups": [{"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "params": [0, 1]}],
}


def pair(dtype: torch.dtype = torch.float32) -> Model:
    return [torch.nn.Parameter(torch.ones(2, 2, dtype=dtype)), torch.nn.Parameter(torch.ones(2, dtype=dtype))]


def test_their_state_loads_and_goes_on() -> None:
    params = pair()
    optimizer = Lion(params, 0.5)
    optimizer.load_state_dict(copy.deepcopy(THEIRS))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.9, 0.99), 0.1)
    assert [group[name] for name in OPTIONS] == DEFAULTS
    plain = Plain(params)
    plain.momenta = [state["exp_avg"].clone() for state in THEIRS["state"].values()]
    with_gradients(params, 3)
    optimizer.step()
    plain.step(params, 0.01, (0.9, 0.99), 0.1)
    assert same(optimizer, params, plain)
    assert torch.equal(THEIRS["state"][0]["exp_avg"], torch.full((2, 2), 0.01))  # ours is a copy


def test_our_state_has_what_theirs_has() -> None:
    """Their class reads these keys of a group and of a state, and asks for no others."""
    params = pair()
    optimizer = Lion(params, 0.01, weight_decay=0.1)
    with_gradients(params, 0)
    optimizer.step()
    ours = optimizer.state_dict()
    assert {number: set(state) for number, state in ours["state"].items()} == {0: {"exp_avg"}, 1: {"exp_avg"}}
    (group,), (wanted,) = ours["param_groups"], THEIRS["param_groups"]
    assert {name: group[name] for name in wanted} == wanted
    assert set(group) == {*wanted, *OPTIONS}


def test_options_that_a_state_dict_does_not_have_stay() -> None:
    params = pair(torch.bfloat16)
    optimizer = Lion(params, 0.5, capturable=True, fused=True, momentum_dtype=torch.float32, master_weights=True)
    optimizer.load_state_dict(copy.deepcopy(THEIRS))
    (group,) = optimizer.param_groups
    assert [group[name] for name in OPTIONS] == [None, False, True, True, torch.float32, True]
    assert isinstance(group["lr"], torch.Tensor) and group["lr"].item() == pytest.approx(0.01)
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], torch.tensor([-0.02, 0.5]))  # not through bfloat16
    with_gradients(params, 0)
    optimizer.step()
    assert optimizer.state[params[0]]["master"].dtype is torch.float32


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("momentum_dtype", [None, torch.float32])
def test_round_trip_through_a_file(momentum_dtype: torch.dtype | None, capturable: bool, device: str) -> None:
    options: dict[str, Any] = {"momentum_dtype": momentum_dtype, "master_weights": True, "capturable": capturable}
    params = model(device, torch.bfloat16)
    optimizer = Lion(params, 0.01, (0.8, 0.9), 0.1, **options)
    for turn in range(2):
        with_gradients(params, turn)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    again = Lion(others, **options)
    again.load_state_dict(torch.load(file))
    for turn in range(2, 4):
        for each, one in ((params, optimizer), (others, again)):
            with_gradients(each, turn)
            one.step()
    for one, two in zip(params, others, strict=True):
        assert torch.equal(one, two)
        for name in ("exp_avg", "master"):
            mine, theirs = optimizer.state[one][name], again.state[two][name]
            assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)


def test_old_pickles_get_the_defaults() -> None:
    optimizer = Lion(pair(), 0.01)
    state = optimizer.__getstate__()
    for group in state["param_groups"]:
        for name in OPTIONS:
            del group[name]
    again = Lion.__new__(Lion)
    again.__setstate__(state)
    assert [again.param_groups[0][name] for name in OPTIONS] == DEFAULTS


def test_a_state_dict_of_other_groups_is_refused() -> None:
    two = {**THEIRS, "param_groups": THEIRS["param_groups"] * 2}
    with pytest.raises(ValueError, match="different number of parameter groups"):
        Lion(pair()).load_state_dict(two)


# --- lr ------------------------------------------------------------------------------------------


def rates(optimizer: Lion, steps: int) -> list[float]:
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=steps)
    found = []
    for turn in range(steps):
        with_gradients(optimizer.param_groups[0]["params"], turn)
        optimizer.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    return found


def test_a_scheduler_writes_to_the_tensor_that_a_graph_reads(device: str) -> None:
    params, others = model(device), model(device)
    plain, capturable = Lion(params, 0.5), Lion(others, 0.5, capturable=True)
    lr = capturable.param_groups[0]["lr"]
    assert lr.device.type == device and lr.shape == () and lr.dtype is torch.float32
    assert rates(plain, 5) == pytest.approx(rates(capturable, 5))
    assert capturable.param_groups[0]["lr"] is lr
    for one, two in zip(params, others, strict=True):
        torch.testing.assert_close(one, two)  # the scheduler computes in float64 here and in float32 there


def test_lr_as_a_tensor_of_the_callers(device: str) -> None:
    params, lr = model(device), torch.tensor([0.5], device=device)
    optimizer = Lion(params, lr)
    plain = Plain(params)
    for turn, value in enumerate((0.5, 0.125)):
        lr.fill_(value)
        with_gradients(params, turn)
        optimizer.step()
        plain.step(params, value, (0.9, 0.99), 0.0)
    assert same(optimizer, params, plain)


def test_lr_of_a_new_group_is_on_the_device_of_its_parameters(device: str) -> None:
    params = model(device, torch.float64)
    optimizer = Lion(params[:1], 0.5, capturable=True)
    optimizer.add_param_group({"params": params[1:], "lr": 0.25})
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.25]
    assert {group["lr"].dtype for group in optimizer.param_groups} == {torch.float64}


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -0.1}, ValueError, "Lion: lr is -0.1, expected 0 or more"),
        ({"lr": "0.1"}, TypeError, "Lion: lr is a str, expected a number"),
        ({"lr": torch.ones(2)}, ValueError, r"Lion: lr has shape \(2,\) and dtype torch.float32, expected one float"),
        ({"betas": (0.9, 1.1)}, ValueError, r"Lion: betas is \(0.9, 1.1\), expected two numbers from 0 to 1"),
        ({"weight_decay": -1}, ValueError, "Lion: weight_decay is -1, expected 0 or more"),
        ({"foreach": True, "fused": True}, RuntimeError, "Lion: foreach and fused are both True, expected one of them"),
        ({"foreach": "yes"}, TypeError, "Lion: foreach is 'yes', expected True or False"),
        ({"maximize": None}, TypeError, "Lion: maximize is None, expected True or False"),
    ],
)
def test_options_out_of_their_domain(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Lion(pair(), **options)


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = Lion(pair(), 0.5)
    with pytest.raises(ValueError, match="Lion: lr is -1, expected 0 or more"):
        optimizer.add_param_group({"params": pair(), "lr": -1})
    assert len(optimizer.param_groups) == 1


def test_sparse_and_complex() -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = Lion(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="Lion: a gradient is sparse, which is not supported"):
        optimizer.step()
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(TypeError, match=r"lion: params\[0\] has dtype complex64"):
        Lion([param]).step()
