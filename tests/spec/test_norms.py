"""The specs of rms_norm and layer_norm: costs by hand, results and their strides, what is asked for."""

from typing import Any

import pytest

from dualops.spec import OPERATORS, ArrayMeta, Problem
from dualops.spec.meta import contiguous_strides

RMS, LAYER = OPERATORS["rms_norm"], OPERATORS["layer_norm"]
BOTH = pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])


def meta(shape: tuple[int, ...], dtype: str = "float16", strides: tuple[int, ...] | None = None) -> ArrayMeta:
    return ArrayMeta(shape, dtype, strides or contiguous_strides(shape), "cpu", 0)


def bind(name: str, backward: bool = False, params: dict[str, Any] | None = None, **arrays: Any) -> Problem:
    spec = OPERATORS[name]
    return (spec.bind_backward if backward else spec.bind)(arrays, params or {})


def test_costs_by_hand():
    # 3 rows of 4 elements of 2 bytes, weights of 4 bytes
    x, w, statistic = meta((3, 4)), meta((4,), "float32"), meta((3,), "float32")
    cost = RMS.forward_cost
    problem = bind("rms_norm", x=x, w=w, residual=x, params={"return_rstd": True})
    # square, add, times rstd; times w; plus residual
    assert (cost.flops(problem), cost.bytes_read(problem), cost.bytes_written(problem)) == (
        5 * 12,
        2 * 24 + 16,
        48 + 12,
    )
    cost = LAYER.backward_cost
    assert cost is not None
    given: dict[str, Any] = {"x": x, "mean": statistic, "rstd": statistic, "dy": x, "w": w, "b": w, "dsummed": x}
    problem = bind("layer_norm", True, **given)
    # b is not read; partial sums of three rows
    assert cost.bytes_read(problem) == 3 * 24 + 2 * 12 + 16
    assert (cost.bytes_written(problem), cost.extra_memory(problem)) == (24 + 16 + 16, 2 * 3 * 16)
    problem = bind("layer_norm", True, params={"w_gradient": False, "b_gradient": False}, **given)
    assert (cost.bytes_written(problem), cost.extra_memory(problem)) == (24, 0)


@BOTH
def test_results_in_order(name):
    request = {"rms_norm": "return_rstd", "layer_norm": "return_stats"}[name]
    statistics = ["mean", "rstd"] if name == "layer_norm" else ["rstd"]
    assert OPERATORS[name].requests == {request: True}
    x = meta((2, 3, 4))
    choices: list[dict[str, Any]] = [{}, {"residual": x}]
    for residual in choices:
        for asked in (False, True):
            found = bind(name, x=x, **residual, params={request: asked}).outputs()
            assert list(found) == ["y", *(["summed"] if residual else []), *(statistics if asked else [])]
            assert [found[each].shape for each in statistics if asked] == [(2, 3)] * (len(statistics) if asked else 0)
    assert OPERATORS["flash_attention"].requests == {"return_lse": True}
    assert OPERATORS["softmax"].requests == {}


@BOTH
def test_results_lie_as_x_with_a_contiguous_last_axis(name):
    for shape, strides, expected in (
        ((2, 3, 4), (4, 8, 1), (4, 8, 1)),
        ((5, 3, 4), (12, 40, 1), (4, 20, 1)),
        ((3, 4), (1, 1), (4, 1)),  # windows that slide
        ((5, 4), (1, 1), (4, 1)),
        ((5, 1), (1, 7), (1, 7)),  # the stride of an axis of one element means nothing
    ):
        assert bind(name, x=meta(shape, strides=strides)).outputs()["y"].strides == expected
    with pytest.raises(ValueError, match=rf"^{name}: x has stride 2 along its last axis, expected 1$"):
        bind(name, x=meta((3, 4), strides=(8, 2)))
    with pytest.raises(ValueError, match=rf"^{name}: w has stride 2 along its last axis N, expected 1$"):
        bind(name, x=meta((3, 4)), w=meta((4,), strides=(2,)))
