"""rms_norm in NumPy: what holds of every norm, and its offset."""

import numpy as np
import pytest

from dualops.reference import rms_norm, rms_norm_backward

from .norms import NormTests


class TestRmsNorm(NormTests):
    name = "rms_norm"
    forward = staticmethod(rms_norm)
    backward = staticmethod(rms_norm_backward)
    vectors = ("w",)
    request = "return_rstd"
    centred = False

    def test_offset_is_added_to_the_weights(self) -> None:
        given = self.arrays((4, 9))
        shifted = given | {"w": given["w"] + 1.0}
        assert np.array_equal(self.forward(**given, offset=1.0), self.forward(**shifted))
        dy = self.arrays((4, 9), seed=1)["x"]
        for a, b in zip(self.gradients(given, dy, offset=1.0), self.gradients(shifted, dy), strict=True):
            assert np.array_equal(a, b)
        self.hold_against_differences((3, 4), residual=True, weights=("w",), offset=-0.5)

    def test_offset_is_added_in_float32(self) -> None:
        """Weights near 0 with an offset of 1 keep their bits: that is what they are kept so for."""
        x, w = np.ones((1, 8), np.float32), np.full(8, 2.0**-12).astype(np.float16)
        y = self.forward(x.astype(np.float16), w, eps=0.0, offset=-1.0 + 2.0**-12)
        assert (y == np.float16(-1 + 2.0**-11)).all()
        with pytest.raises(ValueError, match=r"^rms_norm: offset is 1.0, expected 0 without w$"):
            self.forward(x, offset=1.0)
