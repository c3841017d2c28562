"""One call of each operator of the bridge, made from a case of its spec, and its gradient."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import torch

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


def bridge_call(name: str, device: str, dtype: str = "float32") -> BridgeCall:
    """Of a small case that has elements and a gradient, where the operator has one."""
    spec = OPERATORS[name]
    small = spec.tagged(Tag.SIM) + spec.tagged(Tag.TEST)
    cases = [case for case in small if case.dtype == dtype and all(map(prod, case.shapes.values()))]
    case = next(case for case in cases if case.backward or not spec.gradients)
    differentiable = {output.name.removeprefix("d") for output in spec.gradients}
    tensors = {}
    for key, array in values(spec, case).items():
        tensors[key] = tensor(array, device)
        if key in differentiable and array.dtype.name in FLOATS:
            tensors[key].requires_grad_()
    return BridgeCall(spec, case, tensors)


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
