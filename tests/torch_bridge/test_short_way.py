"""Which calls go straight to the implementation, and which implementation that is."""

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from .affine import DEFAULTS, OPERATOR
from .conftest import values


class Subclass(torch.Tensor):
    """A subclass."""


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls that reach the implementation without the dispatcher."""
    calls: list[tuple[Any, ...]] = []
    compute, run = OPERATOR.compute, OPERATOR.dispatch

    def counted(args: tuple[Any, ...], on_gpu: bool, *before: Any) -> tuple[Any, Any]:
        calls.append(args)
        return compute(args, on_gpu, *before)

    def dispatched(*args: Any) -> Any:
        count = len(calls)
        try:
            return run(*args)
        finally:
            del calls[count:]

    monkeypatch.setattr(OPERATOR, "compute", counted)
    monkeypatch.setattr(OPERATOR, "dispatch", dispatched)
    return calls


X = values((3, 5), torch.float32, "cpu")
WATCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "function mode": Mode,
    "profile": profile,
}
WATCHED_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "subclass": lambda: X.as_subclass(Subclass),
    "meta": lambda: X.to("meta"),
    "negated": lambda: torch.complex(X, X).conj().imag,
}


@pytest.mark.parametrize(
    "tensor", [X, torch.nn.Parameter(X), X.to(torch.bfloat16).t()], ids=["plain", "parameter", "strided"]
)
@pytest.mark.parametrize(
    "watch", [torch.no_grad, torch.inference_mode, torch.enable_grad, partial(torch.autocast, "cpu", torch.bfloat16)]
)
def test_short_way_is_taken(
    tensor: torch.Tensor, watch: Callable[[], AbstractContextManager[Any]], short_calls: list[tuple[Any, ...]]
) -> None:
    with watch():
        OPERATOR(tensor, None, None, *DEFAULTS)
    assert len(short_calls) == 1


@pytest.mark.parametrize("watch", WATCHES)
def test_short_way_is_not_taken_where_torch_watches(watch: str, short_calls: list[tuple[Any, ...]]) -> None:
    with WATCHES[watch]():
        OPERATOR(X, None, None, *DEFAULTS)
    assert not short_calls


@pytest.mark.parametrize("kind", WATCHED_TENSORS)
def test_short_way_is_not_taken_by_odd_tensors(kind: str, short_calls: list[tuple[Any, ...]]) -> None:
    OPERATOR(WATCHED_TENSORS[kind](), None, None, *DEFAULTS)
    assert not short_calls


def test_short_way_is_not_taken_when_traced(short_calls: list[tuple[Any, ...]]) -> None:
    """A trace that did not see the operator would keep its result as a constant."""
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
        traced: Any = torch.jit.trace(lambda t: OPERATOR(t, None, None, *DEFAULTS)[0], X, check_trace=False)
    assert not short_calls
    torch.testing.assert_close(traced(X + 1), X + 1)


def test_tangents_are_not_lost() -> None:
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="jvp"):
            OPERATOR(forward_ad.make_dual(X, X), None, None, *DEFAULTS)
        y, _ = OPERATOR(X, None, None, *DEFAULTS)  # a tensor without a tangent may pass
    torch.testing.assert_close(y, X)


class Pretender(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda: bool = True


class FakePlan:
    """Gives what it was made with."""

    notes: Any = None

    def __init__(self, results: list[torch.Tensor]):
        self.results = results

    def run(self, tensors: Any, pointers: Any) -> list[torch.Tensor]:
        assert pointers == "pointers"
        return self.results


def test_cuda_tensors_go_to_the_kernels() -> None:
    """In the spec's order, with None for missing arrays and the fixed parameters; results are distinguished."""
    seen: list[Any] = []
    plans = [FakePlan([torch.ones(3, 5), torch.ones(3)]), FakePlan([torch.ones(3, 5)])]

    def find(*call: Any, before: Any) -> Any:
        seen[:] = call
        assert before is None
        return plans[0], "pointers"

    def with_numbers(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*tensors[:2], tensors[2].item())

    direction = replace(OPERATOR)
    direction.rule = OPERATOR.rule
    direction.operation = SimpleNamespace(find=find, host_places=[2], with_numbers=with_numbers)
    x, seed = X.as_subclass(Pretender), torch.tensor(4)
    found, kept = direction.compute((x, None, seed, *DEFAULTS), on_gpu=True)
    assert all(map(operator.is_, found, plans[0].results))
    assert kept.having == [True, True]
    assert plans[0].notes is kept, "what is known of such calls is not worked out again"
    arrays, params = seen
    assert arrays[0] is x and arrays[1:] == (None, 4), "a number on the host goes to the launch as such"
    given = dict(zip(direction.names[3:], DEFAULTS, strict=True)) | {"rank": 3}
    assert params == tuple(given[param.name] for param in direction.spec.params)
    del plans[0]
    found, kept = direction.compute((x, None, None, *DEFAULTS[:-1], False), on_gpu=True)
    assert found == (plans[0].results[0], None)
    assert kept.having == [True, False]
    assert tuple(direction.run(x, None, None, *DEFAULTS[:-1], False)[1].shape) == (0,)


def test_a_recorded_call_has_its_gradients_kernels_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where new kernels are needed, before those of forward are built."""
    asked: list[Any] = []
    monkeypatch.setattr(
        import_module("dualops.cuda.compiler.offline"), "build_gradient_ahead", lambda *args: asked.append(args)
    )
    new = SimpleNamespace(problem="problem", device="device")

    def find(*call: Any, before: Any) -> Any:
        before(new)
        return FakePlan([torch.ones(3, 5), torch.ones(3)]), []

    monkeypatch.setattr(FakePlan, "run", lambda plan, *_: plan.results)
    direction = replace(OPERATOR)
    direction.rule, direction.backward = OPERATOR.rule, None
    direction.operation = SimpleNamespace(find=find, host_places=())
    ctx = SimpleNamespace(save_for_backward=lambda *_: None, set_materialize_grads=lambda _: None)
    for expected in ([], [("problem", "device")]):
        direction.compute_and_keep(ctx, [DEFAULTS, True], X.as_subclass(Pretender), None, torch.tensor(4))
        assert asked == expected
        direction.backward = OPERATOR.backward


@pytest.mark.parametrize("module", ["softmax", "flash_attention", "rms_norm", "rope", "matmul", "retention"])
def test_operations_are_those_of_the_public_functions(module: str) -> None:
    forward = getattr(import_module(f"dualops.torch_bridge.{module}"), "_operator")  # noqa: B009
    for direction in (forward, forward.backward):
        assert direction.operation.op == direction.name
        assert direction.operation.inputs == [*direction.names[: direction.count]]
        assert [*direction.kernel_params((*direction.names, *direction.fixed))] == [*direction.operation.defaults]
