"""Calls of each operator of the bridge, made from cases of its spec, and their gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dualops import torch_bridge
from dualops.spec import OPERATORS, Case, Spec, Tag
from dualops.spec.meta import FLOATS
from tests import checks
from tests.problems import values

DIFFERENTIABLE = [name for name, spec in OPERATORS.items() if spec.gradients]
# the bits of a dtype: NumPy has no bfloat16 of torch's, nor torch one of NumPy's
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Tensors = tuple[torch.Tensor, ...]


class BridgeCall(NamedTuple):
    """A call of an operator on tensors of its own."""

    spec: Spec
    case: Case
    tensors: dict[str, torch.Tensor]

    def __call__(self) -> Tensors:
        """All results, those on request included where the case asks for them."""
        function = getattr(torch_bridge, self.spec.name)
        results = checks.call(function, self.spec.inputs, self.tensors, **self.case.params)
        return results if isinstance(results, tuple) else (results,)

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """What gradients are taken by."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    def gradient(self) -> Tensors:
        """Forward, and then `torch.autograd.grad` with gradients that tell all elements apart."""
        results = [result for result in self() if result.requires_grad]
        incoming = [incoming_gradient(result) for result in results]
        return torch.autograd.grad(results, list(self.leaves.values()), incoming)


def bridge_call(name: str, device: str, dtype: str = "float32", case: Case | None = None) -> BridgeCall:
    """Of a case in this dtype, by default the operator's `richest_case`."""
    spec = OPERATORS[name]
    case = case or richest_case(name)
    if case.dtype != dtype:  # precision is of float32 alone
        params = {key: value for key, value in case.params.items() if key != "precision"}
        case = replace(case, dtype=dtype, dtypes={}, params=params)
    differentiable = {output.name.removeprefix("d") for output in spec.gradients}
    differentiable |= {name for name, other in spec.gradient_shared.items() if other in differentiable}
    tensors = {}
    for key, array in values(spec, case).items():
        tensors[key] = tensor(array, device)
        if key in differentiable and array.dtype.name in FLOATS:
            tensors[key].requires_grad_()
    return BridgeCall(spec, case, tensors)


def whole_cases(spec: Spec) -> list[Case]:
    """The small cases that have elements, and a gradient where the operator has one; and can be asked of the bridge."""
    small = [case for case in spec.tagged(Tag.SIM) + spec.tagged(Tag.TEST) if "return_row_sum" not in case.params]
    return [case for case in small if all(map(prod, case.shapes.values())) and (case.backward or not spec.gradients)]


def richest_case(name: str) -> Case:
    """Of the covering cases that any dtype has, the one with most inputs."""
    return max((case for case in covering_cases(name) if "precision" not in case.params), key=lambda c: len(c.shapes))


@cache
def covering_cases(name: str) -> list[Case]:
    """A few small cases that have all of an operator: each input given and left out, each kind of each parameter."""
    spec, seen, chosen = OPERATORS[name], set[Any](), list[Case]()
    cases = [case for case in whole_cases(spec) if case.dtype == "float32"]
    for case in sorted(cases, key=lambda case: sum(map(prod, case.shapes.values()))):
        if not facets(spec, case) <= seen:
            seen |= facets(spec, case)
            chosen.append(case)
    for case in [*chosen]:
        if facets(spec, case) <= set[Any]().union(*(facets(spec, other) for other in chosen if other is not case)):
            chosen.remove(case)
    return chosen


def facets(spec: Spec, case: Case) -> set[Any]:
    """What a case has that others may not have."""
    words = (bool, str, type(None))
    params = {name: value if isinstance(value, words) else type(value).__name__ for name, value in case.params.items()}
    return {*params.items(), *((entry.name, entry.name in case.shapes) for entry in spec.inputs if entry.optional)}


class Recorder(TorchDispatchMode):
    """The calls of operators of this package: name, and arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dualops":
            given = {argument.name: argument.default_value for argument in func._schema.arguments}
            given |= dict(zip(given, args)) | (kwargs or {})
            self.calls.append((func._opname, given))
            self.made.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """In one graph, by torch's compiler without a backend of its own, which has forgotten what it compiled before."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def equal(actual: Any, expected: Any) -> None:
    """Bit for bit but for NaN, with the same strides."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_stride=True, equal_nan=True)


def tensor(array: np.ndarray, device: str) -> torch.Tensor:
    """A contiguous copy of a NumPy array, bit for bit."""
    words = torch.from_numpy(np.ascontiguousarray(array).view(f"u{array.itemsize}").view(f"i{array.itemsize}").copy())
    return words.to(device).view(getattr(torch, array.dtype.name)).reshape(array.shape)


def incoming_gradient(result: torch.Tensor) -> torch.Tensor:
    """Numbers between -1 and 1; 0 where the result is infinite, which no change of an input would move."""
    numbers = torch.sin(torch.arange(result.numel(), device=result.device, dtype=torch.float64))
    return numbers.reshape(result.shape).masked_fill(~result.detach().isfinite(), 0).to(result.dtype)


def same_bits(some: Tensors, others: Tensors) -> bool:
    """Whether tensors are equal bit for bit, NaN included."""
    return len(some) == len(others) and all(
        one.dtype == two.dtype and torch.equal(bits(one), bits(two)) for one, two in zip(some, others, strict=True)
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, contiguous."""
    return x.detach().contiguous().view(_BITS[x.element_size()])
