"""rms_norm and layer_norm in torch, functions and modules: what holds of both, and what is special about one."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from dualops import torch_bridge
from dualops.torch_bridge import layer_norm, nn, rms_norm

from .conftest import DTYPES, stepped, transposed, values
from .operators import compiled, equal

N = 6


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


class NormTests:
    """Tests of `function`, and of the module that takes the place of `theirs`."""

    function: ClassVar[Callable[..., Any]]
    vectors: ClassVar[tuple[str, ...]]
    module: ClassVar[type[torch.nn.Module]]
    theirs: ClassVar[type[torch.nn.Module]]

    def tensors(self, device: str) -> dict[str, Any]:
        """Leaves by name: two batches, the first axis the inner one in memory."""
        x, residual = (values((2, 2, N), torch.float64, device, seed=seed).transpose(0, 1) for seed in (0, 1))
        made = {"x": x, "residual": residual}
        made |= {name: values((N,), torch.float64, device, seed=2 + i) for i, name in enumerate(self.vectors)}
        return {name: tensor.detach().requires_grad_() for name, tensor in made.items()}

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

    def pair(self, shape: Any, device: str, **options: Any) -> tuple[Any, Any]:
        """Our module and torch's, with the same random parameters, through torch's state."""
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
        ("shape", "options"), [(N, {}), ((2, N), {"eps": 0.1}), ([N], {"elementwise_affine": False})], ids=str
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
    @pytest.mark.parametrize("layout", [torch.clone, transposed, stepped, lambda x: x[..., :1].expand(x.shape)])
    def test_module_takes_any_strides(self, layout: Any, shape: Any, device: str) -> None:
        """As torch's does: input, residual, parameters, and the gradient that arrives."""
        ours, theirs = self.pair(shape, device)
        for module in (ours, theirs):
            for parameter in module.parameters():
                parameter.data = layout(parameter.data)
        x, residual = (layout(values((4, 2, N), torch.float64, device, seed=seed)) for seed in (0, 1))
        assert (x.stride(-1) == 1) == (layout is torch.clone)
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

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_modules_eps_is_torchs_default(self, dtype: torch.dtype) -> None:
        ours, theirs = self.pair(N, "cpu", dtype=dtype)
        x = values((3, N), dtype, "cpu") * 1e-3
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
    vectors = ("w",)
    module = nn.RMSNorm
    theirs = torch.nn.RMSNorm


class TestLayerNorm(NormTests):
    function = staticmethod(layer_norm)
    vectors = ("w", "b")
    module = nn.LayerNorm
    theirs = torch.nn.LayerNorm

    def test_module_without_bias(self, device: str) -> None:
        ours, theirs = self.pair(N, device, bias=False)
        assert ours.bias is None
        x = values((3, N), torch.float64, device)
        close(ours(x), theirs(x))
