"""rms_norm in torch: what holds of every norm, and its offset."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualops.torch_bridge import nn, rms_norm
from dualops.torch_bridge.rms_norm import _operator

from .norms import NormTests, close


class TestRmsNorm(NormTests):
    function = staticmethod(rms_norm)
    operator = _operator
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
