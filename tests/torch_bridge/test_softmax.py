"""softmax in torch: axes and layouts, compilation, torch.func, other kinds of tensor."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dualops.torch_bridge import softmax
from tests.processes import printed, python

from .conftest import values
from .operators import compiled, equal

FORWARD, BACKWARD = torch.ops.dualops.softmax.default, torch.ops.dualops.softmax_backward.default


@pytest.mark.parametrize("axis", [(), (-1,), (1,)])
def test_opcheck_of_an_empty_tensor(axis: tuple[int, ...], device: str) -> None:
    torch.library.opcheck(FORWARD, (values((0, 4), torch.float32, device).requires_grad_(), *axis))


def test_lazily_negated_memory(device: str) -> None:
    """The imaginary part of a conjugate is a view of memory with the other sign."""
    number = torch.complex(*(values((3, 5), torch.float32, device, seed=seed) for seed in (0, 1)))
    x = number.conj().imag
    assert x.is_neg()
    torch.testing.assert_close(softmax(x), softmax((-number.imag).contiguous()), rtol=0, atol=0)


def test_saved_result_changed_in_place(device: str) -> None:
    x = values((3, 5), torch.float32, device).requires_grad_()
    y = softmax(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
def test_vmap_is_a_loop(in_dim: int, device: str) -> None:
    x = values((2, 3, 4), torch.float32, device)
    for axis in (0, 1, -1, -2):
        mapped = torch.vmap(lambda t, axis=axis: softmax(t, axis), in_dims=in_dim)
        expected = torch.stack([softmax(one, axis) for one in x.unbind(in_dim)])
        functions = [mapped, torch.vmap(lambda t, axis=axis: FORWARD(t, axis), in_dims=in_dim)]
        if axis == 0:
            functions.append(compiled(mapped))
        for function in functions:
            torch.testing.assert_close(function(x), expected, rtol=0, atol=0)


def test_nested_vmap(device: str) -> None:
    x = values((2, 3, 4, 5), torch.float32, device)
    nested = torch.vmap(torch.vmap(softmax, in_dims=1), in_dims=1)
    torch.testing.assert_close(nested(x), softmax(x.permute(1, 2, 0, 3)), rtol=0, atol=0)


def test_vmap_of_backward_with_one_unmapped_argument(device: str) -> None:
    y = softmax(values((3, 5), torch.float32, device))
    dys = values((4, 3, 5), torch.float32, device, seed=1)
    expected = torch.stack([BACKWARD(y, dy, -1) for dy in dys])
    close: dict[str, Any] = {} if device == "cuda" else {"rtol": 0, "atol": 0}  # by two kernels: strides are others
    torch.testing.assert_close(torch.vmap(lambda dy: BACKWARD(y, dy, -1))(dys), expected, **close)


def test_func_gradients(device: str) -> None:
    x = values((4, 3), torch.float64, device)

    def first(t: torch.Tensor) -> torch.Tensor:
        return softmax(t).square().sum()

    def plain(t: torch.Tensor) -> torch.Tensor:
        return torch.softmax(t, -1).square().sum()

    torch.testing.assert_close(torch.vmap(torch.func.grad(first))(x), torch.vmap(torch.func.grad(plain))(x))
    over_vmap = torch.func.grad(lambda t: torch.vmap(softmax)(t).square().sum())
    torch.testing.assert_close(over_vmap(x), torch.func.grad(plain)(x))
    jacobian = torch.func.jacrev(softmax)(x)
    torch.testing.assert_close(jacobian, torch.func.jacrev(lambda t: torch.softmax(t, -1))(x))


def test_vmap_under_autocast(device: str) -> None:
    x = values((3, 5), torch.bfloat16, device)
    with torch.autocast(device, torch.bfloat16):
        equal(torch.vmap(softmax)(x), softmax(x.float()))


class Labelled(torch.Tensor):
    """A subclass that says so: torch's default __torch_function__ gives results its type."""


class Recorder(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_subclass_and_mode_are_asked(device: str) -> None:
    x = values((3, 5), torch.float32, device)
    y = softmax(x.as_subclass(Labelled))
    assert type(y) is Labelled
    equal(y.as_subclass(torch.Tensor), softmax(x))
    with Recorder() as recorder:
        softmax(x)
    assert recorder.seen == [FORWARD]


def test_bad_calls_of_fakes_and_meta_tensors() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match="softmax: axis is 2, expected -2 to 1 for x of shape"):
        softmax(torch.ones(3, 4), 2)
    with pytest.raises(TypeError, match="softmax: x has dtype int64"):
        softmax(torch.ones(3, 4, dtype=torch.int64, device="meta"))
    with pytest.raises(Exception, match="softmax: axis is 2, expected -2 to 1 for x of shape"):
        torch.compile(lambda t: softmax(t, 2), fullgraph=True, backend="aot_eager")(torch.ones(3, 4))


def test_bad_axis_under_vmap() -> None:
    """-2 is an axis of the whole tensor, but not of the part that the function sees."""
    with pytest.raises(ValueError, match=r"softmax: axis is -2, expected -1 to 0 for x of shape \(4,\)"):
        torch.vmap(lambda t: softmax(t, -2))(torch.ones(3, 4))


def test_import_and_calls_load_neither_numba_nor_dynamo_nor_dtensors() -> None:
    program = (
        "import sys, torch, dualops.torch_bridge as bridge; x = torch.ones(2, 3);"
        "bridge.softmax(x); bridge.lion(x, x.clone(), x.clone(), 0.1);"
        "slow = ('numba', 'llvmlite'), ('dualops.cuda', 'torch._dynamo', 'torch.distributed.tensor');"
        "print(sorted(n for n in sys.modules if n.split('.')[0] in slow[0] or n in slow[1]))"
    )
    assert printed("-c", program).strip() == "[]"


def test_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import dualops.torch_bridge"
    message = "ImportError: dualops.torch_bridge needs PyTorch 2.11 or newer: pip install torch"
    assert message in python("-c", program).stderr
