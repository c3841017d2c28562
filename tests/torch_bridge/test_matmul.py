"""matmul in torch: values, gradients, opcheck, compilation, torch.func, autocast, what is kept and computed, errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dualops import reference
from dualops.torch_bridge import matmul
from dualops.torch_bridge.arguments import as_numpy

from .conftest import DTYPES, LAYOUTS, transposed, values

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


class Recorder(TorchDispatchMode):
    """The calls of operators of this package, by name, with their arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dualops":
            names = [argument.name for argument in func._schema.arguments]
            defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
            self.calls.append((func._opname, defaults | dict(zip(names, args))))
        return func(*args, **(kwargs or {}))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_stride=True)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_is_torchs(name: str, device: str) -> None:
    arguments = Arguments(name, torch.float64, device)
    y, expected = arguments(), arguments.expected()
    torch.testing.assert_close(y, expected)
    dy = values(y.shape, torch.float64, device, seed=5)
    found, theirs = (torch.autograd.grad(result, arguments.tensors, dy) for result in (y, expected))
    torch.testing.assert_close(found, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bridge_adds_no_rounding(dtype: torch.dtype) -> None:
    """CPU tensors get the reference's results, bit for bit."""
    arguments = Arguments("linear", dtype, "cpu")
    a, b, bias = (as_numpy(x) for x in arguments.tensors)
    expected = reference.matmul(a, b, transpose_b=True, bias=bias, activation="gelu", return_preactivation=True)
    for actual, one in zip(arguments(return_preactivation=True), expected):
        assert as_numpy(actual).dtype == one.dtype
        assert as_numpy(actual).tobytes() == one.tobytes()


def test_precisions_are_the_references() -> None:
    a, b = (values((6, 6), torch.float32, "cpu", seed=seed) for seed in (0, 1))
    for precision in ("tf32", "3xtf32"):
        expected = reference.matmul(a.numpy(), b.numpy(), precision=precision)
        assert np.array_equal(matmul(a, b, precision=precision).numpy(), expected)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset"])
def test_results_are_row_major_and_gradients_lie_as_their_inputs(layout: str, device: str) -> None:
    arguments = Arguments("linear", torch.float32, device, LAYOUTS[layout])
    y, z = arguments(return_preactivation=True)
    assert y.is_contiguous() and z.is_contiguous()
    for x, gradient in zip(arguments.tensors, torch.autograd.grad(y, arguments.tensors, torch.ones_like(y))):
        assert (gradient.shape, gradient.stride()) == (x.shape, x.stride())


@pytest.mark.parametrize("layout", ["stepped", "broadcast"])
def test_any_strides_give_the_same_numbers(layout: str, device: str) -> None:
    arguments = Arguments("tn", torch.float64, device, LAYOUTS[layout])
    torch.testing.assert_close(arguments(), arguments(*(x.contiguous() for x in arguments.tensors)))


def test_results_share_no_memory(device: str) -> None:
    arguments = Arguments("nn", torch.float32, device)
    kept = [x.detach().clone() for x in arguments.tensors]
    y = arguments()
    for gradient in torch.autograd.grad(y, arguments.tensors, torch.ones_like(y)):
        gradient.zero_()
    y.detach().zero_()
    equal([x.detach() for x in arguments.tensors], kept)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "tn", "tt"])
def test_gradcheck(name: str, device: str) -> None:
    """Of the result and the preactivation."""
    arguments = Arguments(name, torch.float64, device, transposed)
    call: Any = lambda *tensors: arguments(*tensors, return_preactivation=True)  # noqa: E731
    assert torch.autograd.gradcheck(call, arguments.tensors, fast_mode=True)


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


@pytest.mark.parametrize(("name", "layout"), [("linear", "contiguous"), ("tn", "transposed"), ("no terms", "offset")])
def test_opcheck(name: str, layout: str, device: str) -> None:
    arguments = Arguments(name, torch.float32, device, LAYOUTS[layout])
    a, b, bias = arguments.tensors
    options = (*arguments.options.values(), arguments.activation, None, True)
    torch.library.opcheck(FORWARD, (a, b, bias, *options))
    y, z = (x.detach() for x in FORWARD(a, b, bias, *options))
    given = tuple(x.detach() for x in (a, b, y, bias, z))
    torch.library.opcheck(BACKWARD, (*given, None, *options, True, False, True))


@pytest.mark.parametrize("name", ["nn", "linear", "tn"])
def test_compiled_is_eager(name: str, device: str) -> None:
    arguments = Arguments(name, torch.float32, device)
    y = arguments()
    dy = values(y.shape, torch.float32, device, seed=5)
    other = compiled(lambda *tensors: arguments(*tensors))(*arguments.tensors)
    equal(other, y)
    equal(torch.autograd.grad(other, arguments.tensors, dy), torch.autograd.grad(y, arguments.tensors, dy))


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


def _sum_of_squares(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    return call(*tensors).square().sum()


def test_func_grad(device: str) -> None:
    arguments = Arguments("linear", torch.float64, device)
    tensors = tuple(x.detach() for x in arguments.tensors)
    found, expected = (
        torch.func.grad(partial(_sum_of_squares, call), (0, 1, 2))(*tensors) for call in (arguments, arguments.expected)
    )
    torch.testing.assert_close(found, expected)


def test_vmap_is_refused(device: str) -> None:
    a = values((2, 3, 4), torch.float32, device)
    with pytest.raises(NotImplementedError, match="matmul: vmap is not implemented; put the mapped axis"):
        torch.vmap(lambda x: matmul(x, a[0].mT))(a)


@pytest.mark.parametrize("target", ["meta", "cuda"])
def test_fakes_need_no_device(target: str) -> None:
    with FakeTensorMode():
        a, b = (torch.empty(shape, dtype=torch.bfloat16, device=target) for shape in ((2, 3, 4), (5, 4)))
        y = matmul(a, b, transpose_b=True)
    assert (y.device.type, tuple(y.shape), y.dtype) == (target, (2, 3, 5), torch.bfloat16)


def test_flops_are_the_specs(device: str) -> None:
    arguments = Arguments("linear", torch.float32, device)
    with FlopCounterMode(display=False) as counter:
        arguments().sum().backward()
    one = 2 * 2 * 3 * 4 * 5
    counts = counter.get_flop_counts()["Global"]
    assert counts == {torch.ops.dualops.matmul: one, torch.ops.dualops.matmul_backward: 2 * one}


def test_autocast_lowers_the_matrices_and_leaves_the_bias(device: str) -> None:
    arguments = Arguments("linear", torch.float32, device)
    a, b, bias = arguments.tensors
    with torch.autocast(device, torch.bfloat16):
        y = arguments()
    expected = matmul(a.bfloat16(), b.bfloat16(), transpose_b=True, bias=bias, activation="gelu")
    equal(y.detach(), expected.detach())
    y.sum().backward()
    assert a.grad is not None and a.grad.dtype is torch.float32 and bias.grad is not None


# --- errors --------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a vector": (
        lambda: matmul(torch.ones(3), torch.ones(3, 4)),
        ValueError,
        "a has 1 axes (3,), expected at least 2: [..., M, K]",
    ),
    "terms": (lambda: matmul(torch.ones(2, 3), torch.ones(4, 5)), ValueError, "b has K=4, a has K=3"),
    "mixed": (
        lambda: matmul(torch.ones(2, 3), torch.ones(3, 4).double()),
        TypeError,
        "b has dtype float64, a has dtype float32, expected the same",
    ),
    "activation": (
        lambda: matmul(torch.ones(2, 3), torch.ones(3, 4), activation="tanh"),
        ValueError,
        "activation is 'tanh', expected one of None, 'relu', 'gelu', 'silu'",
    ),
    "an array": (
        lambda: matmul(torch.ones(2, 3), np.ones((3, 4))),  # pyright: ignore[reportArgumentType]
        TypeError,
        "b is a ndarray, expected a torch.Tensor",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_get_the_specs_words(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == f"matmul: {message}"
