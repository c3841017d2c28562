"""matmul in torch: memory, and what is kept for the gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dualops.torch_bridge import matmul

from .conftest import LAYOUTS, values
from .operators import Recorder

PROBLEMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "nn": ((3, 4), (4, 5), {}),
    "linear": ((2, 3, 4), (5, 4), {"transpose_b": True, "activation": "gelu"}),
}


class Arguments:
    """A problem's tensors, which are leaves, and its options."""

    def __init__(
        self, name: str, dtype: torch.dtype, device: str, layout: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    ):
        a, b, self.options = PROBLEMS[name]
        self.tensors = tuple(
            layout(values(shape, dtype, device, seed=seed)).detach().requires_grad_()
            for seed, shape in enumerate((a, b, (5,)))
        )

    def __call__(self, **more: Any) -> Any:
        a, b, bias = self.tensors
        return matmul(a, b, bias=bias, **self.options, **more)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_results_are_row_major_and_gradients_lie_as_their_inputs(layout: str, device: str) -> None:
    arguments = Arguments("linear", torch.float32, device, LAYOUTS[layout])
    y, z = arguments(return_preactivation=True)
    assert y.is_contiguous() and z.is_contiguous()
    for x, gradient in zip(arguments.tensors, torch.autograd.grad(y, arguments.tensors, torch.ones_like(y))):
        assert (gradient.shape, gradient.stride()) == (x.shape, x.stride())


def test_the_preactivation_is_kept_only_where_backward_needs_it() -> None:
    def asked(arguments: Arguments) -> bool:
        with Recorder() as recorder:
            arguments()
        return recorder.calls[0][1]["return_preactivation"]

    arguments = Arguments("linear", torch.float32, "cpu")
    assert asked(arguments) and not asked(Arguments("nn", torch.float32, "cpu"))
    with torch.no_grad():
        assert not asked(arguments)
    for x in arguments.tensors:
        x.requires_grad_(False)
    assert not asked(arguments)


def test_backward_without_the_preactivation_is_an_error() -> None:
    a, b, _ = Arguments("linear", torch.float32, "cpu").tensors
    y, _ = torch.ops.dualops.matmul.default(a, b, None, False, True, "gelu")
    with pytest.raises(TypeError, match="matmul_backward: preactivation is missing, expected it with activation"):
        y.sum().backward()
