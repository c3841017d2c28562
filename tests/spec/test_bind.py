"""`bind` is the only validator: each kind of bad call, and the words that tell the caller what was wrong."""

import re
from typing import Any

import numpy as np
import pytest

from dualops.spec import ArrayMeta, Problem, flash_attention, softmax
from dualops.spec.meta import FLOATS
from tests.spec.calls import FLOAT_LIST, attention, meta, rows_of


def softmax_call(x: ArrayMeta, **params: Any) -> Problem:
    return softmax.bind({"x": x}, params)


def softmax_backward_call(y: ArrayMeta, dy: ArrayMeta, **params: Any) -> Problem:
    return softmax.bind_backward({"y": y, "dy": dy}, params)


SOFTMAX_ERRORS = {
    TypeError: [
        (meta(2, 3, dtype="int32"), {}, f"softmax: x has dtype int32, {FLOAT_LIST}"),
        (meta(2, 3, dtype="complex64"), {}, f"softmax: x has dtype complex64, {FLOAT_LIST}"),
        (meta(2, 3, dtype="float8_e4m3fn"), {}, f"softmax: x has dtype float8_e4m3fn, {FLOAT_LIST}"),
        (meta(2, 3), {"axis": 1.0}, "softmax: axis is 1.0, expected an integer"),
        (meta(2, 3), {"axis": True}, "softmax: axis is True, expected an integer"),
        (meta(2, 3), {"axis": np.True_}, "softmax: axis is np.True_, expected an integer"),
        (meta(2, 3), {"axis": None}, "softmax: axis is None, expected an integer"),
        (meta(2, 3), {"axis": "1"}, "softmax: axis is '1', expected an integer"),
        (meta(2, 3), {"axis": (0, 1)}, "softmax: axis is (0, 1), expected an integer"),
        (meta(2, 3), {"dim": 1}, "softmax: unknown parameter dim, expected axis"),
        (meta(2, 3), {"dim": 1, "axis": 0, "a": 2}, "softmax: unknown parameter a, dim, expected axis"),
    ],
    ValueError: [
        (meta(), {}, "softmax: x has no axes, expected at least one"),
        (meta(2, 3), {"axis": 2}, "softmax: axis is 2, expected -2 to 1 for x of shape (2, 3)"),
        (meta(2, 3), {"axis": -3}, "softmax: axis is -3, expected -2 to 1 for x of shape (2, 3)"),
    ],
    NotImplementedError: [
        (meta(2, 3, strides=(3, -1)), {}, "softmax: x has a negative stride in (3, -1)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "x", "params", "message"), rows_of(SOFTMAX_ERRORS))
def test_softmax_errors(kind, x, params, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        softmax_call(x, **params)


BACKWARD_ERRORS = {
    ValueError: [
        (meta(2, 3), meta(3, 2), {}, "softmax_backward: dy has shape (3, 2), y has shape (2, 3), expected the same"),
        (meta(2, 3), meta(2, 3, 1), {},
         "softmax_backward: dy has shape (2, 3, 1), y has shape (2, 3), expected the same"),
        (meta(2, 3, device="cuda:0"), meta(2, 3, device="cuda:1"), {},
         "softmax_backward: dy is on cuda:1, y on cuda:0, expected one device"),
        (meta(2, 3), meta(2, 3), {"axis": 5}, "softmax_backward: axis is 5, expected -2 to 1 for y of shape (2, 3)"),
    ],
    TypeError: [
        (meta(2, 3, dtype="bfloat16"), meta(2, 3), {},
         "softmax_backward: dy has dtype float32, y has dtype bfloat16, expected the same"),
        (meta(2, dtype="bool"), meta(2), {}, f"softmax_backward: y has dtype bool, {FLOAT_LIST}"),
        (meta(2, 3), meta(2, 3), {"dim": 0}, "softmax_backward: unknown parameter dim, expected axis"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "y", "dy", "params", "message"), rows_of(BACKWARD_ERRORS))
def test_softmax_backward_errors(kind, y, dy, params, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        softmax_backward_call(y, dy, **params)


def test_a_missing_array():
    with pytest.raises(TypeError, match=r"^softmax_backward: dy is missing, expected an array of float64, "):
        softmax.bind_backward({"y": meta(2, 3)})
    with pytest.raises(TypeError, match=r"^flash_attention: k is missing, expected an array of float64, "):
        flash_attention.bind({"q": meta(2, 6, 5, 16), "k": None, "v": meta(2, 3, 7, 24)})


def test_right_calls():
    problem = softmax_call(meta(2, 3, 4, 5), axis=np.int64(-3))
    assert (problem.M, problem.N, problem.axis, problem.dtype) == (40, 3, 1, "float32")
    for dtype in FLOATS:
        assert softmax_call(meta(7, dtype=dtype)).dtype == dtype
    problem = attention(causal=np.True_)
    sizes = [getattr(problem, name) for name in ("B", "H", "Hkv", "Sq", "Sk", "D", "Dv", "group")]
    assert sizes == [2, 6, 3, 5, 7, 16, 24, 2]
    assert problem.causal is True
    assert problem.scale == 0.25
    assert problem.return_lse is False
    assert attention(causal="top_left", scale=2).scale == 2.0
    with pytest.raises(AttributeError, match="flash_attention: a problem has no sink; it has"):
        _ = problem.sink


def test_a_last_axis_of_one_element_and_an_empty_array_may_have_any_stride():
    q, k = meta(2, 6, 5, 1, strides=(30, 5, 1, 9)), meta(2, 3, 7, 1)
    assert attention(q=q, k=k).D == 1
    assert attention(q=meta(2, 6, 0, 16, strides=(0, 0, 0, 3))).Sq == 0


def test_binding_leaves_the_callers_mappings_as_they_are():
    arrays, params = {"x": meta(2, 3)}, {"axis": -1}
    softmax.bind(arrays, params)
    assert arrays == {"x": meta(2, 3)}
    assert params == {"axis": -1}
    params = {"scale": None}
    assert attention(**params).scale == 0.25
    assert params == {"scale": None}


def test_results_have_the_shape_dtype_device_and_memory_order_of_the_call():
    # [B, Sq, H, D] memory seen as [B, H, Sq, D]
    q = meta(2, 6, 5, 16, dtype="bfloat16", strides=(480, 16, 96, 1), device="cuda:0")
    k = meta(2, 3, 7, 16, dtype="bfloat16", device="cuda:0")
    v = meta(2, 3, 7, 24, dtype="bfloat16", device="cuda:0")
    assert list(attention(q=q, k=k, v=v).outputs()) == ["o"]
    out = attention(q=q, k=k, v=v, return_lse=True).outputs()
    assert out["o"] == ArrayMeta((2, 6, 5, 24), "bfloat16", (720, 24, 144, 1), "cuda:0", 0)
    assert out["lse"] == ArrayMeta((2, 6, 5), "float32", (30, 5, 1), "cuda:0", 0)
    assert softmax_call(meta(2, 3, strides=(1, 2))).outputs()["y"].strides == (1, 2)
    problem = softmax_backward_call(meta(4, 5, strides=(1, 4)), meta(4, 5))
    assert problem.outputs(softmax.gradients)["dx"] == meta(4, 5, strides=(1, 4))._replace(pointer=0)


def bind_out(given: ArrayMeta) -> None:
    wanted = softmax_call(meta(4, 5)).outputs()
    softmax.bind_out("softmax", wanted, {"y": given})


OUT_ERRORS = {
    ValueError: [
        (meta(5, 4), "softmax: out y has shape (5, 4), expected (4, 5)"),
        (meta(20), "softmax: out y has shape (20,), expected (4, 5)"),
        (meta(4, 5, device="cuda:0"), "softmax: out y is on cuda:0, expected cpu"),
        (meta(4, 5, strides=(0, 1)), "softmax: out y has strides (0, 1): its elements overlap one another"),
        (meta(4, 5, strides=(1, 1)), "softmax: out y has strides (1, 1): its elements overlap one another"),
        (meta(4, 5, strides=(4, 1)), "softmax: out y has strides (4, 1): its elements overlap one another"),
    ],
    TypeError: [
        (meta(4, 5, dtype="float64"), "softmax: out y has dtype float64, expected float32"),
    ],
    NotImplementedError: [
        (meta(4, 5, strides=(-5, 1)), "softmax: out y has a negative stride in (-5, 1)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "given", "message"), rows_of(OUT_ERRORS))
def test_out_errors(kind, given, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        bind_out(given)


@pytest.mark.parametrize("strides", [(5, 1), (1, 4), (16, 3), (6, 1)])
def test_out_may_have_other_strides(strides):
    bind_out(meta(4, 5, strides=strides))
