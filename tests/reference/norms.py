"""What holds of the references of rms_norm and of layer_norm: test files derive a class each."""

from collections.abc import Callable
from math import fsum, sqrt
from typing import Any, ClassVar

import numpy as np
import pytest

from dualops.spec import OPERATORS, Spec
from dualops.spec.meta import FLOATS, compute_dtype, numpy_dtype

EPS = np.finfo(np.float64).eps


def tuple_of(results: Any) -> tuple[np.ndarray, ...]:
    return results if isinstance(results, tuple) else (results,)


class NormTests:
    """Tests of `forward` and `backward`, a norm over the last axis."""

    name: ClassVar[str]
    forward: ClassVar[Callable[..., Any]]
    backward: ClassVar[Callable[..., Any]]
    vectors: ClassVar[tuple[str, ...]]  # weights and shifts
    request: ClassVar[str]  # the parameter that asks for statistics
    centred: ClassVar[bool]

    @property
    def spec(self) -> Spec:
        return OPERATORS[self.name]

    @property
    def asking(self) -> dict[str, Any]:
        return {self.request: True}

    def arrays(self, shape: tuple[int, ...], seed: int = 0, residual: bool = False) -> dict[str, np.ndarray]:
        """x, all weights and, if wanted, a residual in float64; rows are neither centred nor of one size."""
        rng = np.random.default_rng(seed)
        made = {"x": rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1))) + 0.5}
        made |= {name: rng.standard_normal(shape[-1]) for name in self.vectors}
        return made | ({"residual": rng.standard_normal(shape)} if residual else {})

    def gradients(self, given: dict[str, np.ndarray], dy: np.ndarray, dsummed: Any = None, **params: Any) -> list[Any]:
        """What backward gives of forward's own results."""
        results = list(tuple_of(self.forward(**given, **params, **self.asking)))
        x = results[1] if "residual" in given else given["x"]
        statistics = results[2 if "residual" in given else 1 :]
        weights = {name: given[name] for name in self.vectors if name in given}
        return list(tuple_of(self.backward(x, *statistics, dy, **weights, dsummed=dsummed, **params)))

    # --- values ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
    def test_float64_against_loops(self, eps: float) -> None:
        given = self.arrays((3, 37), residual=True)
        y, summed, *statistics = self.forward(**given, eps=eps, **self.asking)
        for i in range(3):
            h = [float(a) + float(b) for a, b in zip(given["x"][i], given["residual"][i])]
            mean = fsum(h) / 37 if self.centred else 0.0
            rstd = 1 / sqrt(fsum((v - mean) ** 2 for v in h) / 37 + eps)
            assert summed[i].tolist() == h
            for found, expected in zip(reversed(statistics), (rstd, mean)):
                assert abs(found[i] - expected) <= 16 * EPS * max(abs(expected), 1)
            shift = given["b"] if "b" in given else np.zeros(37)
            for j in range(37):
                expected = (h[j] - mean) * rstd * given["w"][j] + shift[j]
                assert abs(y[i, j] - expected) <= 32 * EPS * max(abs(expected), 1)

    def test_weights_that_are_not_there_are_one_and_zero(self) -> None:
        given = self.arrays((4, 9))
        neutral = {"w": np.ones(9), "b": np.zeros(9)}
        neutral = {name: neutral[name] for name in self.vectors}
        alone = self.forward(given["x"])
        assert np.array_equal(alone, self.forward(given["x"], **neutral))
        for name in self.vectors:
            assert np.array_equal(alone, self.forward(given["x"], **{name: neutral[name]}))
        dy = self.arrays((4, 9), seed=1)["x"]
        (dx,) = self.gradients({"x": given["x"]}, dy)
        assert np.array_equal(dx, self.gradients({"x": given["x"], **neutral}, dy)[0])

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision_rounds_once(self, dtype: str) -> None:
        made = self.arrays((50, 300), residual=True)
        given = {name: array.astype(numpy_dtype(dtype)) for name, array in made.items()}
        y, summed = self.forward(**given)
        exact = given["x"].astype(np.float64) + given["residual"].astype(np.float64)
        assert np.array_equal(summed, exact.astype(summed.dtype))
        # the rounded sum is what is normalised
        wide = {name: given[name].astype(np.float64) for name in self.vectors}
        expected = self.forward(summed.astype(np.float64), **wide).astype(y.dtype)
        assert y.dtype == given["x"].dtype
        assert np.mean(y != expected) < 0.01  # float32 arithmetic moves a result across a tie now and then

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_weights_may_have_the_dtype_of_x(self, dtype: str) -> None:
        made = self.arrays((4, 3, 33), residual=True)
        given = {name: array.astype(numpy_dtype(dtype)) for name, array in made.items()}
        y, summed, *statistics = self.forward(**given, **self.asking)
        assert (y.dtype, summed.dtype) == (numpy_dtype(dtype),) * 2
        for found in statistics:
            assert (found.dtype, found.shape) == (numpy_dtype(compute_dtype(dtype)), (4, 3))
        dx, *rest = self.gradients(given, y)
        assert (dx.dtype, dx.shape) == (numpy_dtype(dtype), (4, 3, 33))
        assert [(d.dtype, d.shape) for d in rest] == [(numpy_dtype(dtype), (33,))] * len(self.vectors)

    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3), (7,), (0,)])
    def test_nothing_and_a_single_row(self, shape: tuple[int, ...]) -> None:
        given = self.arrays(shape, residual=True)
        y, _, *statistics = self.forward(**given, **self.asking)
        assert y.shape == shape
        for found in statistics:
            assert found.shape == shape[:-1]
            assert np.isnan(found).all() == (shape[-1] == 0 or 0 in shape)
        dx, *rest = self.gradients(given, y, y)
        assert dx.shape == shape
        for d in rest:
            assert d.shape == shape[-1:]
            assert d.any() == (0 not in shape)  # no rows: 0

    # --- gradients -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("residual", [False, True])
    @pytest.mark.parametrize("weights", [False, True])
    @pytest.mark.parametrize(("shape", "eps"), [((5,), 1e-6), ((3, 4), 0.1), ((2, 3, 5), 0.0), ((4, 1), 0.5)])
    def test_gradients_against_finite_differences(
        self, shape: tuple[int, ...], eps: float, weights: bool, residual: bool
    ) -> None:
        """Of a sum over y and, where there is one, summed, by every element of every input."""
        self.hold_against_differences(shape, residual, self.vectors if weights else (), eps=eps)

    def hold_against_differences(
        self, shape: tuple[int, ...], residual: bool, weights: tuple[str, ...], **params: Any
    ) -> None:
        made = self.arrays(shape, seed=3, residual=residual)
        given = {name: array for name, array in made.items() if name not in self.vectors or name in weights}
        factors = self.arrays(shape, seed=4, residual=True)
        dy, dsummed = factors["x"], factors["residual"] if residual else None
        found = self.gradients(given, dy, dsummed, **params)

        def loss() -> float:
            results = tuple_of(self.forward(**given, **params))
            return float(sum((a * b).sum() for a, b in zip(results, (dy, dsummed))))

        by_name = dict(zip(("x", *weights), found, strict=True))
        by_name |= {"residual": by_name["x"]} if residual else {}
        step = 1e-5
        for name, gradient in by_name.items():
            for place in np.ndindex(*gradient.shape):
                kept = given[name][place]
                given[name][place] = kept + step
                up = loss()
                given[name][place] = kept - step
                down = loss()
                given[name][place] = kept
                expected = (up - down) / (2 * step)
                # third derivatives times step^2 / 6, and eps / step times the loss
                assert abs(gradient[place] - expected) <= 1e-7 * max(1.0, np.abs(gradient).max()), (name, place)

    def test_gradient_of_summed_is_added(self) -> None:
        given = self.arrays((3, 8), residual=True)
        dy, dsummed = self.arrays((3, 8), seed=1)["x"], self.arrays((3, 8), seed=2)["x"]
        without, both = self.gradients(given, dy), self.gradients(given, dy, dsummed)
        assert np.array_equal(both[0], without[0] + dsummed)
        for a, b in zip(without[1:], both[1:], strict=True):
            assert np.array_equal(a, b)

    def test_what_is_not_wanted_is_left_out(self) -> None:
        given = self.arrays((3, 8))
        dy = self.arrays((3, 8), seed=1)["x"]
        whole = dict(zip(("x", *self.vectors), self.gradients(given, dy)))
        for left_out in self.vectors:
            rest = {name: d for name, d in whole.items() if name != left_out}
            results = list(tuple_of(self.forward(**given, **self.asking)))[1:]
            weights = {name: given[name] for name in self.vectors}
            found = self.backward(given["x"], *results, dy, **weights, **{f"{left_out}_gradient": False})
            for a, b in zip(tuple_of(found), rest.values(), strict=True):
                assert np.array_equal(a, b)

    def test_gradient_is_orthogonal_to_what_changes_nothing(self) -> None:
        """A larger row has the same result, and so, if the mean is taken away, has a shifted one."""
        given = {"x": self.arrays((4, 50))["x"]}
        (dx,) = self.gradients(given, self.arrays((4, 50), seed=1)["x"], eps=0.0)
        size = np.abs(dx).sum(axis=-1) * np.abs(given["x"]).max(axis=-1)
        direction = given["x"] - given["x"].mean(axis=-1, keepdims=True) if self.centred else given["x"]
        assert (np.abs((dx * direction).sum(axis=-1)) <= 32 * EPS * size).all()
        if self.centred:
            assert (np.abs(dx.sum(axis=-1)) <= 32 * EPS * size).all()

    # --- invariants ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("factor", [2.0**-40, 0.25, 2.0**30])
    def test_scale_changes_nothing_without_eps(self, factor: float) -> None:
        x = self.arrays((5, 40))["x"]
        assert np.array_equal(self.forward(x * factor, eps=0.0), self.forward(x, eps=0.0))

    def test_a_row_does_not_depend_on_the_batch_it_is_in(self) -> None:
        given = {name: array.astype(np.float32) for name, array in self.arrays((6, 7, 43), residual=True).items()}
        dy = self.arrays((6, 7, 43), seed=1)["x"].astype(np.float32)
        whole, dx = self.forward(**given, **self.asking), self.gradients(given, dy)[0]
        for place in ((0, 0), (3, 5), (5, 6)):
            one = given | {name: given[name][place] for name in ("x", "residual")}
            for a, b in zip(self.forward(**one, **self.asking), whole, strict=True):
                assert np.array_equal(a, b[place])
            assert np.array_equal(self.gradients(one, dy[place])[0], dx[place])

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
    def test_nan_and_infinities_stay_in_their_row(self, special: float, dtype: str) -> None:
        given = {name: array.astype(numpy_dtype(dtype)) for name, array in self.arrays((4, 60)).items()}
        dy = self.arrays((4, 60), seed=1)["x"].astype(numpy_dtype(dtype))
        plain, (dx, *_) = self.forward(**given), self.gradients(given, dy)
        given["x"][2, 33] = special
        y, (found, dw, *others) = self.forward(**given), self.gradients(given, dy)
        rest = [0, 1, 3]
        assert np.array_equal(y[rest], plain[rest])
        assert np.array_equal(found[rest], dx[rest])
        assert np.isnan(y[2].astype(np.float32)).sum() in (1, 60)
        assert np.isnan(found[2].astype(np.float32)).all()
        assert np.isnan(dw.astype(np.float32)).sum() in (1, 60)
        for d in others:
            assert np.isfinite(d.astype(np.float32)).all()

    def test_a_row_of_zeros_without_eps_is_what_ieee_gives(self) -> None:
        x = np.zeros((2, 5))
        x[1] = [1, -1, 2, -2, 3]
        y, *_, rstd = self.forward(x, eps=0.0, **self.asking)
        assert rstd[0] == np.inf
        assert np.isnan(y[0]).all()
        assert np.isfinite(y[1]).all()
        assert not self.forward(x[:1]).any()

    # --- errors --------------------------------------------------------------------------------------

    def test_errors_are_the_specs(self) -> None:
        x = np.zeros((2, 3))
        for given, params, error, message in (
            ({"x": [1.0]}, {}, TypeError, "x is a list, expected a numpy.ndarray"),
            ({"x": np.zeros(())}, {}, ValueError, "x has no axes, expected at least one"),
            ({"x": x.astype(int)}, {}, TypeError, "x has dtype int64, expected one of float64,"),
            ({"x": np.zeros((2, 6))[:, ::2]}, {}, ValueError, "x has stride 2 along its last axis, expected 1"),
            ({"x": x, "w": np.zeros(4)}, {}, ValueError, "w has N=4, x has N=3"),
            ({"x": x, "w": np.zeros((1, 3))}, {}, ValueError, "w has 2 axes (1, 3), expected 1: [N]"),
            ({"x": x, "w": np.zeros(3, np.float32)}, {}, TypeError, "w has dtype float32, x has dtype float64"),
            ({"x": x, "residual": x[0]}, {}, ValueError, "residual has shape (3,), x has shape (2, 3), expected the"),
            ({"x": x}, {"eps": -1e-6}, ValueError, "eps is -1e-06, expected 0 or more"),
            ({"x": x}, {"eps": np.inf}, ValueError, "eps is inf, expected a finite number"),
            ({"x": x}, {self.request: 1}, TypeError, f"{self.request} is 1, expected"),
        ):
            with pytest.raises(error) as caught:
                self.forward(**given, **params)
            assert str(caught.value).startswith(f"{self.name}: {message}")
        statistics = [np.ones(2)] * (1 + self.centred)
        with pytest.raises(ValueError, match=rf"^{self.name}_backward: rstd has shape \(3,\), expected \(2,\)"):
            self.backward(x, *statistics[1:], np.ones(3), x)
        with pytest.raises(ValueError, match=rf"^{self.name}_backward: dy has shape \(3,\), x has shape \(2, 3\)"):
            self.backward(x, *statistics, x[0])
