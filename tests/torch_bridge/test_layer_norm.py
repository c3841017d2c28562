"""layer_norm in torch: what holds of every norm, and either weight alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualops.torch_bridge import layer_norm, nn
from dualops.torch_bridge.layer_norm import _operator

from .conftest import values
from .norms import N, NormTests, close


class TestLayerNorm(NormTests):
    function = staticmethod(layer_norm)
    operator = _operator
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
