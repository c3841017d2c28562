"""matmul in torch: values, gradients, memory, what is kept and computed, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dualops.torch_bridge import matmul

from .conftest import LAYOUTS, values
from .operators import Recorder, equal

FORWARD, BACKWARD = torch.ops.dualops.matmul.default, torch.ops.dualops.matmul_backward.default
ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
# shapes of a and b, transposes, activation: each of them with each other somewhere
PROBLEMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool, bool, str | None]] = {
    "nn": ((3, 4), (4, 5), False, False, None),
    "linear": ((2, 3, 4), (5, 4), False, True, "gelu"),
    "tn": ((2, 1, 4, 3), (3, 4, 5), True, False, "silu"),
    "tt": ((4, 3), (2, 5, 4), True, True, "relu"),
    "no terms": ((3, 0), (5, 0), False, True, "relu"),
    "no rows": ((2, 0, 4), (1, 4, 5), False, False, None),
}


class Arguments:
    """A problem's tensors, which are leaves, and its options."""

    def __init__(
        self, name: str, dtype: torch.dtype, device: str, layout: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    ):
        a, b, transpose_a, transpose_b, self.activation = PROBLEMS[name]
        shapes = (a, b, (5,))
        self.tensors = tuple(
            layout(values(shape, dtype, device, seed=seed)).detach().requires_grad_()
            for seed, shape in enumerate(shapes)
        )
        self.options: dict[str, Any] = {"transpose_a": transpose_a, "transpose_b": transpose_b}

    def __call__(self, *tensors: torch.Tensor, **more: Any) -> Any:
        a, b, bias = tensors or self.tensors
        return matmul(a, b, bias=bias, activation=self.activation, **self.options, **more)

    def expected(self, *tensors: torch.Tensor) -> torch.Tensor:
        """torch's own."""
        a, b, bias = tensors or self.tensors
        a = a.mT if self.options["transpose_a"] else a
        b = b.mT if self.options["transpose_b"] else b
        return ACTIVATIONS[self.activation](a @ b + bias)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_is_torchs(name: str, device: str) -> None:
    arguments = Arguments(name, torch.float64, device)
    y, expected = arguments(), arguments.expected()
    torch.testing.assert_close(y, expected)
    dy = values(y.shape, torch.float64, device, seed=5)
    found, theirs = (torch.autograd.grad(result, arguments.tensors, dy) for result in (y, expected))
    torch.testing.assert_close(found, theirs)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset"])
def test_results_are_row_major_and_gradients_lie_as_their_inputs(layout: str, device: str) -> None:
    arguments = Arguments("linear", torch.float32, device, LAYOUTS[layout])
    y, z = arguments(return_preactivation=True)
    assert y.is_contiguous() and z.is_contiguous()
    for x, gradient in zip(arguments.tensors, torch.autograd.grad(y, arguments.tensors, torch.ones_like(y))):
        assert (gradient.shape, gradient.stride()) == (x.shape, x.stride())


# --- gradients -----------------------------------------------------------------------------------


def test_only_what_is_wanted_is_computed(device: str) -> None:
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        arguments = Arguments("linear", torch.float64, device)
        for x, wants in zip(arguments.tensors, wanted):
            x.requires_grad_(wants)
        with Recorder() as recorder:
            arguments().sum().backward()
        given = recorder.calls[-1][1]
        assert tuple(given[f"{name}_gradient"] for name in ("a", "b", "bias")) == wanted
        assert tuple(x.grad is not None for x in arguments.tensors) == wanted


def test_the_preactivation_is_kept_only_where_backward_needs_it(device: str) -> None:
    def asked(arguments: Arguments) -> bool:
        with Recorder() as recorder:
            arguments()
        return recorder.calls[0][1]["return_preactivation"]

    arguments = Arguments("linear", torch.float32, device)
    assert asked(arguments) and not asked(Arguments("nn", torch.float32, device))
    with torch.no_grad():
        assert not asked(arguments)
    for x in arguments.tensors:
        x.requires_grad_(False)
    assert not asked(arguments)


def test_backward_without_the_preactivation_is_an_error(device: str) -> None:
    a, b, _ = Arguments("linear", torch.float32, device).tensors
    y, _ = FORWARD(a, b, None, False, True, "gelu")
    with pytest.raises(TypeError, match="matmul_backward: preactivation is missing, expected it with activation"):
        y.sum().backward()


# --- what torch demands of an operator -----------------------------------------------------------


def test_compiled_once_for_every_size(device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    function = torch.compile(
        lambda a, b: matmul(a, b, activation="relu"), fullgraph=True, backend=counter, dynamic=True
    )
    for B, M, N, K in ((2, 3, 4, 5), (3, 7, 6, 9), (4, 33, 12, 2)):
        a, b = values((B, M, K), torch.float32, device), values((K, N), torch.float32, device, seed=1)
        equal(function(a, b), matmul(a, b, activation="relu"))
    assert counter.frame_count == 1
