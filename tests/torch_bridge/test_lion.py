"""Lion on torch tensors: the reference's bits, in place, on each way through torch; what it refuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import profile

from dualops import reference
from dualops.torch_bridge import lion
from dualops.torch_bridge.arguments import as_numpy

from .conftest import DTYPES, LAYOUTS, values

Tensors = list[torch.Tensor]
SHAPES = [(3, 5), (), (0, 4), (70,), (6, 7, 2)]


def lists(device: str, dtype: torch.dtype, momenta: torch.dtype | None = None) -> list[Tensors]:
    """Params, grads and momenta, the last in a dtype of their own."""
    dtypes = (dtype, dtype, momenta or dtype)
    return [
        [values(shape, own, device, seed=10 * j + i) for i, shape in enumerate(SHAPES)] for j, own in enumerate(dtypes)
    ]


def expected(given: list[Tensors], lr: float, **options: Any) -> list[Any]:
    """The reference's results, flat."""
    arrays = [[as_numpy(x.detach().cpu()).copy() for x in each] for each in given]
    master = options.pop("master", None)
    if master is not None:
        options["master"] = [as_numpy(x.cpu()).copy() for x in master]
    results = reference.lion(arrays[0], arrays[1], arrays[2], lr, **options)
    return [x for each in results for x in each]


def assert_same(tensors: Tensors, arrays: list[Any]) -> None:
    for tensor, array in zip(tensors, arrays, strict=True):
        assert as_numpy(tensor.detach().cpu()).tobytes() == array.tobytes()


def direct(*args: Any, **options: Any) -> None:
    lion(*args, **options)


def profiled(*args: Any, **options: Any) -> None:
    with profile() as seen:
        lion(*args, **options)
    assert "dualops::lion_" in {event.key for event in seen.key_averages()}


def compiled(*args: Any, **options: Any) -> None:
    torch._dynamo.reset()
    torch.compile(lion, fullgraph=True, backend="aot_eager")(*args, **options)


WAYS: list[Callable[..., None]] = [direct, profiled, compiled]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("momenta", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lists(dtype: torch.dtype, momenta: torch.dtype | None, way: Callable[..., None], device: str) -> None:
    given = lists(device, dtype, {torch.float64: torch.float64}.get(dtype, momenta))
    wanted = expected(given, 0.01, betas=(0.8, 0.9), weight_decay=0.1)
    grads = [x.clone() for x in given[1]]
    way(*given, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    assert_same([*given[0], *given[2]], wanted)
    assert all(map(torch.equal, given[1], grads))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_and_lr_as_a_tensor(dtype: torch.dtype, way: Callable[..., None], device: str) -> None:
    given, master = lists(device, dtype), [values(shape, torch.float32, device, seed=40) for shape in SHAPES]
    lr = torch.tensor(0.02, device=device)
    wanted = expected(given, lr.item(), master=master)
    way(*given, lr, master=master)
    assert_same([*given[0], *given[2], *master], wanted)


def test_one_tensor_and_gradients_in_float32(device: str) -> None:
    p, g, m = (
        values((9,), torch.bfloat16, device),
        values((9,), torch.float32, device, 1),
        values((9,), torch.float16, device, 2),
    )
    wanted = expected([[p], [g], [m]], 0.1)
    assert lion(p, g, m, 0.1) is None
    assert_same([p, m], wanted)
    lion([], [], [], 0.1)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "broadcast"])
@pytest.mark.parametrize("other", ["contiguous", "transposed", "broadcast"])
def test_layouts(layout: str, other: str, device: str) -> None:
    shape = (6, 10)
    p, g, m = (values(shape, torch.bfloat16, device, seed=i) for i in range(3))
    wanted = expected([[p], [LAYOUTS[other](g)], [m]], 0.1)
    p, m = LAYOUTS[layout](p), LAYOUTS[layout](m)
    lion(p, LAYOUTS[other](g), m, 0.1)
    assert_same([p.contiguous(), m.contiguous()], wanted)


def test_parameters_that_require_a_gradient(device: str) -> None:
    p = torch.nn.Parameter(values((4,), torch.float32, device))
    before = p._version
    loss = (p * p).sum()
    lion(p, torch.ones_like(p), torch.zeros_like(p), 0.1)
    assert p.requires_grad and p.is_leaf and p._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_made_under_inference_mode() -> None:
    with torch.inference_mode():
        p, m = torch.ones(3), torch.zeros(3)
        lion([p], [torch.ones(3)], [m], 0.5)
    assert p.tolist() == [0.5] * 3


def test_opcheck() -> None:
    given = [each[:2] for each in lists("cpu", torch.float32)]
    masters = [x.clone() for x in given[0]]
    overload = torch.ops.dualops.lion_.default
    assert str(overload._schema) == (
        "dualops::lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momenta, Tensor(c!)[] master, "
        "Tensor? lr_array, float lr, float beta1, float beta2, float weight_decay) -> ()"
    )
    torch.library.opcheck(overload, (*given, [], None, 0.1, 0.9, 0.99, 0.0))
    torch.library.opcheck(overload, (*given, masters, torch.tensor(0.1), 0.0, 0.9, 0.99, 0.1))


def test_compiled_with_what_comes_before_and_after() -> None:
    """The compiler knows what is written: a value read before stays, one read after is new."""

    def function(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = p * 2
        lion(p, g + 1, m, 0.5)
        return before, p * 2

    torch._dynamo.reset()
    p, g, m = torch.ones(3), torch.tensor([0.0, -3.0, 1.0]), torch.zeros(3)
    before, after = torch.compile(function, fullgraph=True, backend="aot_eager")(p, g, m)
    assert before.tolist() == [2.0] * 3
    assert after.tolist() == [1.0, 3.0, 1.0] and p.tolist() == [0.5, 1.5, 0.5]


P = [torch.ones(3), torch.ones(2)]
SPARSE = [torch.ones(3).to_sparse(), torch.ones(2)]
ERRORS: dict[type[Exception], list[tuple[tuple[Any, ...], dict[str, Any], str]]] = {
    ValueError: [
        ((P, P[:1], P, 0.1), {}, "lion: grads has 1 tensors, params has 2, expected the same"),
        ((P, P, P, 0.1), {"master": P[:1]}, "lion: master has 1 tensors, params has 2, expected the same"),
        ((P, P, [torch.zeros(3), torch.zeros(2)], 0.1), {}, "overlaps grads["),
        ((P, P, P, torch.ones(1)), {}, "lion: lr has 1 axes (1,), expected 0: []"),
        ((torch.ones(2).expand(3, 2), torch.ones(3, 2), torch.ones(3, 2), 0.1), {},
         "lion: params[0] has strides (0, 1): its elements overlap one another"),
        ((P, [P[0], torch.ones(2, device="meta")], P, 0.1), {},
         "lion: grads[1] is on meta, params[1] on cpu, expected one device"),
    ],
    TypeError: [
        ((P, SPARSE, P, 0.1), {}, "grads[0] has layout torch.sparse_coo, expected torch.strided"),
        ((P, [P[0], [1.0]], P, 0.1), {}, "lion: grads[1] is a list, expected a torch.Tensor"),
        ((P, P, 3, 0.1), {}, "lion: momenta is a int, expected a tensor or a list of tensors"),
        ((P, P, P, "0.1"), {}, "lion: lr is a str, expected a number, or an array without axes"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "args", "options", "message"), [(error, *row) for error in ERRORS for row in ERRORS[error]]
)
def test_errors(error: type[Exception], args: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        lion(*args, **options)


def test_errors_of_a_compiled_call() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"lion: grads\[0\] has shape \(2,\), params\[0\] has shape \(3,\)"):
        torch.compile(lion, fullgraph=True, backend="aot_eager")(P, P[::-1], P, 0.1)
