"""What holds of rms_norm and of layer_norm in torch, functions and modules: test files derive a class each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dualops import reference, torch_bridge
from dualops.spec import ArrayMeta
from dualops.torch_bridge.arguments import as_numpy
from dualops.torch_bridge.interop import Direction

from .conftest import DTYPES, stepped, transposed, values

N = 6
SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "batch": lambda x: x.reshape(2, 2, N).transpose(0, 1),
    "broadcast": lambda x: x[:1].expand(3, N),
    "row": lambda x: x[0],
    "no rows": lambda x: x[:0],
}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_stride=True, equal_nan=True)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


class Recorder(TorchDispatchMode):
    """The calls of operators of this package: name, and arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dualops":
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((func._opname, dict(zip(names, args))))
        return func(*args, **(kwargs or {}))


class NormTests:
    """Tests of `function`, whose operator is `operator`, and of the module that takes the place of `theirs`."""

    function: ClassVar[Callable[..., Any]]
    operator: ClassVar[Direction]
    plain: ClassVar[Callable[..., torch.Tensor]]  # torch's: (x, shape, *weights, eps)
    vectors: ClassVar[tuple[str, ...]]
    request: ClassVar[str]  # the parameter that asks for statistics
    module: ClassVar[type[torch.nn.Module]]
    theirs: ClassVar[type[torch.nn.Module]]

    @property
    def name(self) -> str:
        return self.operator.name

    @property
    def asking(self) -> dict[str, Any]:
        return {self.request: True}

    @property
    def backward(self) -> Direction:
        assert self.operator.backward is not None
        return self.operator.backward

    def tensors(
        self,
        device: str,
        dtype: torch.dtype = torch.float64,
        *,
        weights: bool = True,
        residual: bool = True,
        shape: str = "batch",
        wide: bool = False,
    ) -> dict[str, Any]:
        """Leaves by name. wide: weights are float32."""
        x, added = (SHAPES[shape](values((4, N), dtype, device, seed=seed)) for seed in (0, 1))
        weight = torch.float32 if wide else dtype
        made = {"x": x} | ({"residual": added} if residual else {})
        if weights:
            made |= {name: values(x.shape[-1:], weight, device, seed=2 + i) for i, name in enumerate(self.vectors)}
        return {name: tensor.detach().requires_grad_() for name, tensor in made.items()}

    def gradients(self, function: Callable[..., Any], tensors: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Of a sum over y and summed that tells all of their elements apart."""
        results = function(**tensors)
        results = results if isinstance(results, tuple) else (results,)
        factors = [1 + torch.arange(y.numel(), device=y.device).reshape(y.shape).sin() for y in results]
        return torch.autograd.grad([(y * f).sum() for y, f in zip(results, factors)], tuple(tensors.values()))

    # --- values ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("residual", [False, True])
    @pytest.mark.parametrize("weights", [False, True])
    @pytest.mark.parametrize("shape", ["rows", "batch", "broadcast", "row", "no rows"])
    def test_is_torchs(self, shape: str, weights: bool, residual: bool, device: str) -> None:
        tensors = self.tensors(device, shape=shape, weights=weights, residual=residual)

        def theirs(x: torch.Tensor, residual: torch.Tensor | None = None, **given: torch.Tensor) -> Any:
            h = x if residual is None else x + residual
            y = self.plain(h, h.shape[-1:], *(given.get(name) for name in self.vectors), 0.01)
            return y if residual is None else (y, h)

        def ours(**given: Any) -> Any:
            return self.function(**given, eps=0.01)

        close(ours(**tensors), theirs(**tensors))
        close(self.gradients(ours, tensors), self.gradients(theirs, tensors))

    @pytest.mark.parametrize("wide", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_bridge_adds_no_rounding(self, dtype: torch.dtype, wide: bool) -> None:
        """CPU tensors get the reference's results, bit for bit."""
        tensors = {name: x.detach() for name, x in self.tensors("cpu", dtype, wide=wide).items()}
        arrays = {name: as_numpy(x) for name, x in tensors.items()}
        expected = getattr(reference, self.name)(**arrays, **self.asking)
        found = self.function(**tensors, **self.asking)
        assert len(found) == len(expected) == len(self.operator.outputs)
        for a, b in zip(found, expected):
            assert as_numpy(a).dtype == b.dtype
            assert as_numpy(a).tobytes() == b.tobytes()

    def test_results_are_those_that_were_asked_for(self, device: str) -> None:
        tensors = self.tensors(device)
        y, summed, *statistics = self.function(**tensors, **self.asking)
        assert (y.requires_grad, summed.requires_grad) == (True, True)
        assert not any(found.requires_grad for found in statistics)
        equal(self.function(**tensors), (y, summed))
        added = tensors.pop("residual")
        alone = self.function(**tensors)
        assert isinstance(alone, torch.Tensor)
        assert len(self.function(**tensors, **self.asking)) == 1 + len(statistics)
        equal(self.function(**tensors | {"x": tensors["x"] + added}), y)
        assert y.stride() == tensors["x"].contiguous().stride() or y.stride() == tensors["x"].stride()

    # --- gradients -------------------------------------------------------------------------------

    @pytest.mark.parametrize("shape", ["rows", "batch", "row", "no rows"])
    def test_gradcheck(self, shape: str, device: str) -> None:
        tensors = self.tensors(device, shape=shape)

        def call(*given: torch.Tensor) -> Any:
            return self.function(**dict(zip(tensors, given)))

        assert torch.autograd.gradcheck(call, tuple(tensors.values()), fast_mode=True)

    def test_gradients_of_x_and_residual_share_no_memory(self, device: str) -> None:
        tensors = self.tensors(device)
        y, summed = self.function(**tensors)
        (y.sum() + summed.square().sum()).backward()
        of_x, of_residual = tensors["x"].grad, tensors["residual"].grad
        assert of_x is not None
        assert of_residual is not None
        close(of_x, of_residual)
        of_x.zero_()
        assert of_residual.any()

    def test_gradients_are_computed_where_they_are_wanted(self, device: str) -> None:
        tensors = self.tensors(device)
        whole = dict(zip(tensors, self.gradients(self.function, tensors)))
        for name in tensors:
            some = {other: x if other == name else x.detach() for other, x in tensors.items()}
            with Recorder() as recorder:
                y, summed = self.function(**some)
                weight = 1 + torch.arange(y.numel(), device=device).reshape(y.shape).sin()
                (found,) = torch.autograd.grad((y * weight + summed * weight).sum(), some[name])
            close(found, whole[name])
            (_, given) = recorder.calls[-1]
            for other in self.vectors:
                assert given.get(f"{other}_gradient", True) == (other == name)

    def test_gradient_of_an_unused_result_is_not_read(self, device: str) -> None:
        tensors = self.tensors(device)
        with Recorder() as recorder:
            of_y = torch.autograd.grad(self.function(**tensors)[0].sum(), tensors["x"])[0]
            of_summed = torch.autograd.grad(self.function(**tensors)[1].sum(), tensors["x"])[0]
        given = [arguments for name, arguments in recorder.calls if name.endswith("_backward")]
        assert [each["dsummed"] is None for each in given] == [True, False]
        equal(of_summed, torch.ones_like(of_summed))
        y, summed = self.function(**tensors)
        close(torch.autograd.grad(y.sum() + summed.sum(), tensors["x"])[0], of_y + of_summed)

    def test_gradient_of_the_gradient_and_vmap_are_refused(self, device: str) -> None:
        tensors = self.tensors(device, residual=False)
        (dx,) = torch.autograd.grad(self.function(**tensors).square().sum(), tensors["x"], create_graph=True)
        with pytest.raises(NotImplementedError, match=f"{self.name}_backward: its gradient is not implemented"):
            dx.sum().backward()
        with pytest.raises(NotImplementedError, match=f"{self.name}: vmap is not implemented"):
            torch.vmap(self.function)(tensors["x"].detach())

    # --- what torch demands of an operator ---------------------------------------------------------

    @pytest.mark.parametrize(
        ("shape", "dtype", "weights", "residual"),
        [
            ("batch", torch.bfloat16, True, True),
            ("rows", torch.float32, False, True),
            ("row", torch.float16, True, False),
            ("no rows", torch.float32, True, True),
        ],
        ids=str,
    )
    def test_opcheck(self, shape: str, dtype: torch.dtype, weights: bool, residual: bool, device: str) -> None:
        tensors = self.tensors(device, dtype, shape=shape, weights=weights, residual=residual, wide=True)
        self.opcheck(self.operator, tensors)
        given = {name: x.detach() for name, x in tensors.items()}
        y, *rest = self.function(**given, **self.asking)
        names = [output.name for output in self.operator.outputs[1:]]
        given |= dict(zip(names if residual else names[1:], rest))
        given |= {"x": given.get("summed", given["x"]), "dy": y} | ({"dsummed": y.clone()} if residual else {})
        self.opcheck(self.backward, given)
        self.opcheck(self.backward, given | dict.fromkeys((f"{name}_gradient" for name in self.vectors), False))

    @staticmethod
    def opcheck(direction: Direction, named: dict[str, Any]) -> None:
        given = {param.name: param.default for param in direction.params} | named
        torch.library.opcheck(direction.overload, tuple(given.get(name) for name in direction.names))

    def test_flops_are_the_specs(self, device: str) -> None:
        tensors = self.tensors(device, shape="rows")
        with FlopCounterMode(display=False) as counter:
            torch.cat(self.function(**tensors)).sum().backward()
        metas = {name: ArrayMeta(tuple(x.shape), "float64", x.stride(), device, 0) for name, x in tensors.items()}
        forward = self.operator.spec.forward_cost.flops(self.operator.spec.bind(metas))
        found = counter.get_flop_counts()["Global"]
        assert found.pop(getattr(torch.ops.dualops, self.name)) == forward
        assert found.pop(getattr(torch.ops.dualops, f"{self.name}_backward")) > forward / 2

    # --- compilation, autocast -----------------------------------------------------------------------

    @pytest.mark.parametrize("residual", [False, True])
    def test_compiled_is_eager(self, residual: bool, device: str) -> None:
        tensors = self.tensors(device, torch.bfloat16, residual=residual, wide=True)

        def function(**given: Any) -> Any:
            return self.function(**given | {"x": given["x"] * 2}, eps=0.5)

        equal(compiled(function)(**tensors), function(**tensors))
        equal(self.gradients(compiled(function), tensors), self.gradients(function, tensors))

    def test_compiled_once_for_every_size(self, device: str) -> None:
        counter = CompileCounterWithBackend("aot_eager")
        torch._dynamo.reset()
        function = torch.compile(self.function, fullgraph=True, backend=counter, dynamic=True)
        counts = []
        for rows, columns in ((4, 3), (9, 7), (33, 5)):
            x, residual = (values((rows, columns), torch.float32, device, seed=seed) for seed in (0, 1))
            weights = {name: values((columns,), torch.float32, device, seed=2) for name in self.vectors}
            equal(function(x, **weights, residual=residual), self.function(x, **weights, residual=residual))
            counts.append(counter.frame_count)
        assert len(set(counts)) == 1  # Dynamo starts over once when it meets eps, a float

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_autocast_computes_in_float32(self, dtype: torch.dtype, device: str) -> None:
        tensors = self.tensors(device, dtype)
        wide = dtype if dtype is torch.float64 else torch.float32
        expected = self.function(**{name: x.detach().to(wide) for name, x in tensors.items()})
        with torch.autocast(device, torch.bfloat16):
            found = self.function(**tensors)
        equal(found, expected)
        assert [x.dtype for x in torch.autograd.grad(found[0].sum(), tuple(tensors.values()))] == [dtype] * len(tensors)

    # --- errors --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("grad", [False, True])
    def test_bad_calls_get_the_specs_words(self, grad: bool, device: str) -> None:
        x = torch.ones(2, 3, device=device, requires_grad=grad)
        bad: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"x": x, "w": torch.ones(4, device=device)}, ValueError, "w has N=4, x has N=3"),
            ({"x": x.t()}, ValueError, "x has stride 3 along its last axis, expected 1"),
            ({"x": x, "residual": x[0]}, ValueError, "residual has shape (3,), x has shape (2, 3), expected the same"),
            ({"x": x, "eps": -1.0}, ValueError, "eps is -1.0, expected 0 or more"),
            ({"x": x, "eps": "1"}, TypeError, "eps is '1', expected a number"),
            ({"x": x, "w": [1.0]}, TypeError, "w is a list, expected a torch.Tensor"),
            ({"x": x, self.request: 1}, TypeError, f"{self.request} is 1, expected True or False"),
        ]
        for given, error, message in bad:
            with pytest.raises(error) as caught:
                self.function(**given)
            assert str(caught.value) == f"{self.name}: {message}"

    # --- modules -------------------------------------------------------------------------------------

    def pair(self, shape: Any, device: str, **options: Any) -> tuple[Any, Any]:
        """Our module and torch's, with the same random parameters, by way of torch's state."""
        options = {"device": device, "dtype": torch.float64, **options}
        ours, theirs = self.module(shape, **options), self.theirs(shape, **options)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.copy_(values(parameter.shape, parameter.dtype, device, seed=3))
        assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
        assert theirs.load_state_dict(ours.state_dict()).unexpected_keys == []
        assert repr(ours) == repr(theirs)
        return ours, theirs

    @pytest.mark.parametrize(
        ("shape", "options"),
        [(N, {}), ((2, N), {"eps": 0.1}), ([N], {"elementwise_affine": False}), ((3, 2, N), {"eps": 1e-3})],
        ids=str,
    )
    def test_module_is_torchs(self, shape: Any, options: dict[str, Any], device: str) -> None:
        ours, theirs = self.pair(shape, device, **options)
        assert isinstance(ours, self.theirs)
        x = values((4, 3, 2, N), torch.float64, device).requires_grad_()
        inputs = (x, *ours.parameters()), (x, *theirs.parameters())
        found, expected = ours(x), theirs(x)
        close(found, expected)
        weight = values(x.shape, torch.float64, device, seed=1)
        for a, b in zip(*(torch.autograd.grad(y, given, weight) for y, given in zip((found, expected), inputs))):
            close(a, b)

    @pytest.mark.parametrize("shape", [N, (2, N)])
    @pytest.mark.parametrize("layout", [transposed, stepped, lambda x: x[..., :1].expand(x.shape)])
    def test_module_takes_any_strides(self, layout: Any, shape: Any, device: str) -> None:
        """As torch's does: input, residual, parameters, and the gradient that arrives."""
        ours, theirs = self.pair(shape, device)
        for module in (ours, theirs):
            for parameter in module.parameters():
                parameter.data = layout(parameter.data)
        x, residual = (layout(values((4, 2, N), torch.float64, device, seed=seed)) for seed in (0, 1))
        assert x.stride(-1) != 1
        leaves = [each.detach().requires_grad_() for each in (x, residual)]
        y, summed = ours(*leaves)
        close((y, summed), (theirs(x + residual), x + residual))
        close(ours(x), theirs(x))
        weight = layout(values(x.shape, torch.float64, device, seed=2))
        found = torch.autograd.grad(y, [*leaves, *ours.parameters()], weight)
        h = (x + residual).requires_grad_()
        expected = torch.autograd.grad(theirs(h), [h, *theirs.parameters()], weight)
        for one, two in zip(found, (expected[0], *expected), strict=True):
            close(one, two)
        equal(compiled(ours)(x, residual), (y, summed))

    @pytest.mark.parametrize("shape", [N, (2, N)])
    def test_module_with_a_residual(self, shape: Any, device: str) -> None:
        ours, theirs = self.pair(shape, device)
        x, residual = (values((3, 2, N), torch.float64, device, seed=seed) for seed in (0, 1))
        y, summed = ours(x, residual)
        close((y, summed), (theirs(x + residual), x + residual))
        equal(compiled(ours)(x, residual), (y, summed))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_modules_eps_is_torchs_default(self, dtype: torch.dtype, device: str) -> None:
        ours, theirs = self.pair(N, device, dtype=dtype)
        x = values((3, N), dtype, device) * 1e-3
        rtol = 2e-2 if dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(ours(x), theirs(x), rtol=rtol, atol=0.1 * rtol)

    def test_module_refuses_another_shape(self, device: str) -> None:
        module = self.module((2, N), device=device)
        name = self.module.__name__
        message = rf"^{name}: x has shape \(3, {N}\), expected its last axes to be \[2, {N}\]$"
        with pytest.raises(ValueError, match=message):
            module(torch.ones(3, N, device=device))
        assert getattr(torch_bridge.nn, name) is self.module
