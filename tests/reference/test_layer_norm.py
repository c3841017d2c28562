"""layer_norm in NumPy: what holds of every norm, and what of one that takes the mean away."""

import numpy as np
import pytest

from dualops.reference import layer_norm, layer_norm_backward

from .norms import NormTests


class TestLayerNorm(NormTests):
    name = "layer_norm"
    forward = staticmethod(layer_norm)
    backward = staticmethod(layer_norm_backward)
    vectors = ("w", "b")
    request = "return_stats"
    centred = True

    @pytest.mark.parametrize("shift", [-1000, 3, 2**20])
    def test_a_shift_of_a_row_changes_nothing(self, shift: int) -> None:
        x = np.random.default_rng(1).integers(-20, 20, (5, 64)).astype(np.float64)
        assert np.array_equal(self.forward(x + shift), self.forward(x))  # 64 integers: the mean is exact

    def test_a_mean_with_a_small_deviation(self) -> None:
        """The mean goes before the square: in float32 the difference of two means of squares would be noise."""
        x = (1000 + np.random.default_rng(2).standard_normal((4, 300))).astype(np.float32)
        exact = self.forward(x.astype(np.float64))
        assert np.abs(self.forward(x) - exact).max() <= 2e-4  # eps of 1000 is 6e-5

    def test_either_weight_may_be_alone(self) -> None:
        for weights in (("w",), ("b",)):
            self.hold_against_differences((3, 5), residual=True, weights=weights)
