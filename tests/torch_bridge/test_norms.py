"""rms_norm and layer_norm in torch, functions and modules: what holds of both, and what is special about one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dualops import torch_bridge
from dualops.torch_bridge import layer_norm, nn, rms_norm
from dualops.torch_bridge.interop import Direction
from dualops.torch_bridge.layer_norm import _operator as _layer_norm
from dualops.torch_bridge.rms_norm import _operator as _rms_norm

from .conftest import DTYPES, stepped, transposed, values
from .operators import Recorder, compiled, equal

N = 6
SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "batch": lambda x: x.reshape(2, 2, N).transpose(0, 1),
    "broadcast": lambda x: x[:1].expand(3, N),
    "row": lambda x: x[0],
    "no rows": lambda x: x[:0],
}


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


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

    # --- compilation, autocast -----------------------------------------------------------------------

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


class TestRmsNorm(NormTests):
    function = staticmethod(rms_norm)
    operator = _rms_norm
    plain = staticmethod(torch.nn.functional.rms_norm)
    vectors = ("w",)
    request = "return_rstd"
    module = nn.RMSNorm
    theirs = torch.nn.RMSNorm

    def test_offset(self, device: str) -> None:
        tensors = self.tensors(device)

        def offset(**given: Any) -> Any:
            return rms_norm(**given, offset=1.0)

        def shifted(w: torch.Tensor, **given: Any) -> Any:
            return rms_norm(w=w + 1, **given)

        close(offset(**tensors), shifted(**tensors))
        close(self.gradients(offset, tensors), self.gradients(shifted, tensors))
        with pytest.raises(ValueError, match=r"^rms_norm: offset is 1.0, expected 0 without w$"):
            rms_norm(tensors["x"], offset=1.0)


class TestLayerNorm(NormTests):
    function = staticmethod(layer_norm)
    operator = _layer_norm
    plain = staticmethod(torch.nn.functional.layer_norm)
    vectors = ("w", "b")
    request = "return_stats"
    module = nn.LayerNorm
    theirs = torch.nn.LayerNorm

    @pytest.mark.parametrize("alone", ["w", "b"])
    def test_either_weight_may_be_alone(self, alone: str, device: str) -> None:
        tensors = self.tensors(device, residual=False)
        tensors = {name: tensors[name] for name in ("x", alone)}
        neutral = {"w": torch.ones, "b": torch.zeros}
        both: dict[str, Any] = {
            name: make(N, dtype=torch.float64, device=device) for name, make in neutral.items()
        } | tensors
        close(layer_norm(**tensors), layer_norm(**both))
        of_both = self.gradients(lambda **given: layer_norm(**both | given), tensors)
        close(self.gradients(layer_norm, tensors), of_both)

    def test_module_without_bias(self, device: str) -> None:
        ours, theirs = self.pair(N, device, bias=False)
        assert ours.bias is None
        x = values((3, N), torch.float64, device)
        close(ours(x), theirs(x))
