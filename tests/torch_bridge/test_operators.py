"""What holds of every operator in torch, made from its spec; what is special about one has a file of its own."""

from __future__ import annotations

import pytest
import torch

from dualops import testing
from dualops.spec import OPERATORS
from dualops.torch_bridge.arguments import as_numpy

from .operators import DIFFERENTIABLE, Tensors, bridge_call, incoming_gradient, same_bits

differentiable = pytest.mark.parametrize("name", DIFFERENTIABLE)


@pytest.mark.parametrize("name", [name for name, spec in OPERATORS.items() if not spec.updates])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_against_float64(name: str, dtype: str, device: str) -> None:
    call = bridge_call(name, device, dtype)
    arrays = {key: testing.to_numpy(tensor.detach()) for key, tensor in call.tensors.items()}
    testing.check(name, call(), arrays, call.case.params)


@differentiable
def test_gradients_against_differences(name: str, device: str) -> None:
    """In float64, along random directions."""
    call = bridge_call(name, device, "float64")

    def function(*leaves: torch.Tensor) -> Tensors:
        return call._replace(tensors={**call.tensors, **dict(zip(call.leaves, leaves, strict=True))})()

    leaves = tuple(leaf.detach().requires_grad_() for leaf in call.leaves.values())
    assert leaves and torch.autograd.gradcheck(function, leaves, fast_mode=True)


@differentiable
def test_a_gradient_of_the_gradient_is_refused(name: str, device: str) -> None:
    call = bridge_call(name, device)
    results = [result for result in call() if result.requires_grad]
    incoming = [incoming_gradient(result).requires_grad_() for result in results]
    first, *_ = torch.autograd.grad(results, [*call.leaves.values()], incoming, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"^{name}_backward: its gradient is not implemented"):
        first.sum().backward()


@differentiable
def test_compiled_is_eager(name: str, device: str) -> None:
    call = bridge_call(name, device)
    torch._dynamo.reset()
    results = torch.compile(lambda tensors: call._replace(tensors=tensors)(), fullgraph=True, backend="aot_eager")(
        call.tensors
    )
    assert same_bits(results, call())
    incoming = [incoming_gradient(result) for result in results if result.requires_grad]
    wanted = [result for result in results if result.requires_grad]
    assert same_bits(torch.autograd.grad(wanted, [*call.leaves.values()], incoming), call.gradient())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATORS)
def test_storages_can_be_resized_afterwards(name: str, dtype: str, device: str) -> None:
    """As FSDP resizes those of parameters: arguments, results and gradients."""
    call = bridge_call(name, device, dtype)
    own = {key: given.detach().clone().requires_grad_(given.requires_grad) for key, given in call.tensors.items()}
    call = call._replace(tensors=own)
    results = [result for result in call() if result is not None]
    wanted = [result for result in results if result.requires_grad]
    gradients: Tensors = ()
    if wanted:
        gradients = torch.autograd.grad(wanted, [*call.leaves.values()], [incoming_gradient(one) for one in wanted])
    assert results or OPERATORS[name].updates
    for tensor in (*own.values(), *results, *gradients):
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().nbytes() == 0


def test_arrays_of_tensors_are_their_memory() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool):
        tensor = torch.arange(12).reshape(3, 4).to(dtype)
        for view in (tensor, tensor.t(), tensor[:, 1::2], tensor[:0], tensor[0, 0], tensor[:1].expand(3, 4)):
            array = as_numpy(view)
            assert array.shape == view.shape
            assert array.tolist() == view.tolist()
        as_numpy(tensor)[1, 2] = 0
        assert tensor[1, 2] == 0
    with pytest.raises(TypeError, match=r"^expected a tensor that is not lazily negated: resolve_neg\(\) it$"):
        as_numpy(torch.zeros(3, dtype=torch.complex64).conj().imag)
