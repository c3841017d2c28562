"""`bind` is the only validator: each kind of bad call, and the words that tell the caller what was wrong."""

import re
from typing import Any

import numpy as np
import pytest

from dualops.spec import OPERATORS, ArrayMeta, Problem, flash_attention, softmax
from dualops.spec.meta import FLOATS
from tests.spec.calls import FLOAT_LIST, attention, attention_backward, meta, rows_of, varlen


def softmax_call(x: ArrayMeta, **params: Any) -> Problem:
    return softmax.bind({"x": x}, params)


def softmax_backward_call(y: ArrayMeta, dy: ArrayMeta, **params: Any) -> Problem:
    return softmax.bind_backward({"y": y, "dy": dy}, params)


SOFTMAX_ERRORS = {
    TypeError: [
        (meta(2, 3, dtype="int32"), {}, f"softmax: x has dtype int32, {FLOAT_LIST}"),
        (meta(2, 3, dtype="float8_e4m3fn"), {}, f"softmax: x has dtype float8_e4m3fn, {FLOAT_LIST}"),
        (meta(2, 3), {"axis": 1.0}, "softmax: axis is 1.0, expected an integer"),
        (meta(2, 3), {"axis": np.True_}, "softmax: axis is np.True_, expected an integer"),
        (meta(2, 3), {"axis": (0, 1)}, "softmax: axis is (0, 1), expected an integer"),
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
        (meta(2, 3, device="cuda:0"), meta(2, 3, device="cuda:1"), {},
         "softmax_backward: dy is on cuda:1, y on cuda:0, expected one device"),
        (meta(2, 3), meta(2, 3), {"axis": 5}, "softmax_backward: axis is 5, expected -2 to 1 for y of shape (2, 3)"),
    ],
    TypeError: [
        (meta(2, 3, dtype="bfloat16"), meta(2, 3), {},
         "softmax_backward: dy has dtype float32, y has dtype bfloat16, expected the same"),
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
        (meta(4, 5, device="cuda:0"), "softmax: out y is on cuda:0, expected cpu"),
        (meta(4, 5, strides=(0, 1)), "softmax: out y has strides (0, 1): its elements overlap one another"),
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


ATTENTION_ERRORS = {
    ValueError: [
        ({"q": meta(6, 5, 16)}, "q has 3 axes (6, 5, 16), expected 4: [B, H, Sq, D]"),
        ({"v": meta(2, 3, 7, 24, 1)}, "v has 5 axes (2, 3, 7, 24, 1), expected 4: [B, Hkv, Sk, Dv]"),
        ({"k": meta(1, 3, 7, 16)}, "k has B=1, q has B=2"),
        ({"k": meta(2, 3, 7, 15)}, "k has D=15, q has D=16"),
        ({"v": meta(2, 3, 8, 24)}, "v has Sk=8, k has Sk=7"),
        ({"v": meta(2, 6, 7, 24)}, "v has Hkv=6, k has Hkv=3"),
        ({"q": meta(2, 7, 5, 16)}, "q has H=7, k has Hkv=3, expected H to be a multiple of Hkv, neither of them 0"),
        ({"k": meta(2, 0, 7, 16), "v": meta(2, 0, 7, 24)},
         "q has H=6, k has Hkv=0, expected H to be a multiple of Hkv, neither of them 0"),
        ({"q": meta(2, 0, 5, 16)}, "q has H=0, k has Hkv=3, expected H to be a multiple of Hkv, neither of them 0"),
        ({"q": meta(2, 6, 5, 513), "k": meta(2, 3, 7, 513)}, "q has D=513, expected 1 to 512"),
        ({"q": meta(2, 6, 5, 0), "k": meta(2, 3, 7, 0)}, "q has D=0, expected 1 to 512"),
        ({"v": meta(2, 3, 7, 1024)}, "v has Dv=1024, expected 1 to 512"),
        ({"k": meta(2, 3, 7, 16, device="cuda:0")}, "k is on cuda:0, q on cpu, expected one device"),
        ({"k": meta(2, 3, 7, 16, strides=(672, 224, 32, 2))}, "k has stride 2 along its last axis D, expected 1"),
        ({"v": meta(2, 3, 7, 24, strides=(21, 7, 1, 0))}, "v has stride 0 along its last axis Dv, expected 1"),
        ({"causal": 1}, "causal is 1, expected False, True or 'top_left'"),
        ({"causal": "bottom_right"}, "causal is 'bottom_right', expected False, True or 'top_left'"),
        ({"scale": float("nan")}, "scale is nan, expected a finite number"),
        ({"scale": 10**400}, f"scale is {str(10**400)[:200]}..., expected a finite number"),
        ({"window": (-1, 0)}, "window is (-1, 0), expected left and right to be None (unbounded) or at least 0"),
        ({"softcap": 0}, "softcap is 0, expected a number above 0, or None"),
        ({"softcap": float("inf")}, "softcap is inf, expected a finite number"),
        ({"bias": meta(5, 8)}, "bias has shape (5, 8), expected one that broadcasts to [B, H, Sq, Sk] = (2, 6, 5, 7)"),
        ({"bias": meta(1, 1, 1, 1, 1)},
         "bias has shape (1, 1, 1, 1, 1), expected one that broadcasts to [B, H, Sq, Sk] = (2, 6, 5, 7)"),
        ({"bias": meta(0, 7)}, "bias has shape (0, 7), expected one that broadcasts to [B, H, Sq, Sk] = (2, 6, 5, 7)"),
        ({"alibi_slopes": meta(3)}, "alibi_slopes has H=3, q has H=6"),
        ({"alibi_slopes": meta(2, 6)}, "alibi_slopes has 2 axes (2, 6), expected 1: [H]"),
        ({"sinks": meta(7)}, "sinks has H=7, q has H=6"),
        ({"sinks": meta(6, 1)}, "sinks has 2 axes (6, 1), expected 1: [H]"),
        ({"key_padding_mask": meta(2, 5, dtype="bool")}, "key_padding_mask has Sk=5, k has Sk=7"),
        ({"key_padding_mask": meta(7, dtype="bool")}, "key_padding_mask has 1 axes (7,), expected 2: [B, Sk]"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0, expected a probability from 0 to below 1"),
        ({"dropout_p": -0.1}, "dropout_p is -0.1, expected a probability from 0 to below 1"),
        ({"dropout_p": 0.5}, "seed is None, expected an integer where dropout_p is 0.5"),
        ({"seed": meta(1, dtype="int64")}, "seed has 1 axes (1,), expected 0: []"),
        ({"seed": meta(dtype="int64", device="cuda:0")}, "seed is on cuda:0, q on cpu, expected one device"),
    ],
    TypeError: [
        ({"q": meta(2, 6, 5, 16, dtype="int64")}, f"q has dtype int64, {FLOAT_LIST}"),
        ({"v": meta(2, 3, 7, 24, dtype="float16")}, "v has dtype float16, q has dtype float32, expected the same"),
        ({"scale": "0.5"}, "scale is '0.5', expected a number"),
        ({"scale": True}, "scale is True, expected a number"),
        ({"return_lse": 1}, "return_lse is 1, expected True or False"),
        ({"window": 3}, "window is 3, expected None or a pair (left, right)"),
        ({"window": (1, 2, 3)}, "window is (1, 2, 3), expected None or a pair (left, right)"),
        ({"softcap": True}, "softcap is True, expected a number"),
        ({"bias": meta(5, 7, dtype="float64")}, "bias has dtype float64, q has dtype float32, expected the same"),
        ({"alibi_slopes": meta(6, dtype="int32")}, f"alibi_slopes has dtype int32, {FLOAT_LIST}"),
        ({"alibi_slopes": meta(6, dtype="float16")},
         "alibi_slopes has dtype float16, q has dtype float32, expected float32"),
        ({"sinks": meta(6, dtype="float64")}, "sinks has dtype float64, q has dtype float32, expected float32"),
        ({"key_padding_mask": meta(2, 7)}, "key_padding_mask has dtype float32, expected bool"),
        ({"dropout_p": True}, "dropout_p is True, expected a number"),
        ({"seed": meta(dtype="int32")}, "seed has dtype int32, expected int64"),
        ({"dropout": 0.1},
         "unknown parameter dropout, expected scale, softcap, score_mod, causal, window, mask_mod, dropout_p, "
         "return_lse"),
        ({"bias_gradient": False},
         "unknown parameter bias_gradient, expected scale, softcap, score_mod, causal, window, mask_mod, dropout_p, "
         "return_lse"),
    ],
    NotImplementedError: [
        ({"q": meta(2, 6, 5, 16, strides=(480, 80, -16, 1))}, "q has a negative stride in (480, 80, -16, 1)"),
    ],
}  # fmt: skip


ATTENTION_BACKWARD_ERRORS = {
    ValueError: [
        ({"lse": meta(2, 6, 7)}, "lse has Sq=7, q has Sq=5"),
        ({"o": meta(2, 6, 5, 16)}, "o has Dv=16, v has Dv=24"),
        ({"do": meta(2, 6, 5, 24, strides=(0, 0, 0, 0))}, "do has stride 0 along its last axis Dv, expected 1"),
        ({"dlse": meta(2, 6, 5, 1)}, "dlse has 4 axes (2, 6, 5, 1), expected 3: [B, H, Sq]"),
    ],
    TypeError: [
        ({"lse": meta(2, 6, 5, dtype="bfloat16")}, "lse has dtype bfloat16, q has dtype float32, expected float32"),
        ({"lse": None}, f"lse is missing, expected an array of {FLOAT_LIST[16:]}"),
        ({"do": meta(2, 6, 5, 24, dtype="float64")}, "do has dtype float64, q has dtype float32, expected the same"),
        ({"window": 3}, "window is 3, expected None or a pair (left, right)"),
        ({"bias_gradient": 1}, "bias_gradient is 1, expected True or False"),
    ],
}  # fmt: skip


RANGES: dict[str, Any] = {
    "cu_seqlens_k": None, "k_starts": meta(3, dtype="int32"), "k_lengths": meta(3, dtype="int32"),
}  # fmt: skip
VARLEN_ERRORS = {
    ValueError: [
        ({"q": meta(2, 6, 5, 16)}, "q has 4 axes (2, 6, 5, 16), expected 3: [total_q, H, D]"),
        ({"v": meta(29, 3, 24)}, "v has total_k=29, k has total_k=30"),
        ({"k": meta(30, 3, 8)}, "k has D=8, q has D=16"),
        ({"q": meta(20, 7, 16)}, "q has H=7, k has Hkv=3, expected H to be a multiple of Hkv, neither of them 0"),
        ({"cu_seqlens_q": meta(4, 1, dtype="int32")}, "cu_seqlens_q has 2 axes (4, 1), expected 1: [B+1]"),
        ({"cu_seqlens_k": meta(5, dtype="int32")}, "cu_seqlens_k has B+1=5, cu_seqlens_q has B+1=4"),
        ({f"cu_seqlens_{side}": meta(0, dtype="int32") for side in "qk"},
         "cu_seqlens_q has no elements, expected B+1 of them"),
        ({"cu_seqlens_k": None} | dict.fromkeys(("k_starts", "k_lengths"), meta(4, dtype="int32")),
         "k_starts has B=4, cu_seqlens_q has B+1=4, expected B=3"),
        (RANGES | {"k_lengths": meta(4, dtype="int32")}, "k_lengths has B=4, k_starts has B=3"),
        ({"total_k_lengths": 30}, "total_k_lengths is 30, expected None without k_lengths"),
        (RANGES | {"total_k_lengths": -1}, "total_k_lengths is -1, expected 0 or more"),
        ({"max_seqlen_q": -1}, "max_seqlen_q is -1, expected 0 or more"),
        ({"alibi_slopes": meta(3)}, "alibi_slopes has H=3, q has H=6"),
        ({"dropout_p": 0.5}, "seed is None, expected an integer where dropout_p is 0.5"),
    ],
    TypeError: [
        ({"cu_seqlens_q": meta(4, dtype="int64")}, "cu_seqlens_q has dtype int64, expected int32"),
        ({"cu_seqlens_k": meta(4)}, "cu_seqlens_k has dtype float32, expected int32"),
        ({"cu_seqlens_k": None},
         "the keys are given by nothing, expected cu_seqlens_k alone, or k_starts and k_lengths"),
        (RANGES | {"cu_seqlens_k": meta(4, dtype="int32")},
         "the keys are given by cu_seqlens_k and k_starts and k_lengths, expected cu_seqlens_k alone, or k_starts and "
         "k_lengths"),
        (RANGES | {"k_lengths": None},
         "the keys are given by k_starts, expected cu_seqlens_k alone, or k_starts and k_lengths"),
        (RANGES | {"k_lengths": meta(3, dtype="int64")}, "k_lengths has dtype int64, expected int32"),
        (RANGES | {"total_k_lengths": 3.0}, "total_k_lengths is 3.0, expected an integer"),
        ({"max_seqlen_k": 12.0}, "max_seqlen_k is 12.0, expected an integer"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("bind", "op", "kind", "changed", "message"),
    [
        pytest.param(bind, op, *row.values, id=f"{op}-{row.id}")
        for bind, op, errors in (
            (attention, "flash_attention", ATTENTION_ERRORS),
            (attention_backward, "flash_attention_backward", ATTENTION_BACKWARD_ERRORS),
            (varlen, "flash_attention_varlen", VARLEN_ERRORS),
        )
        for row in rows_of(errors)
    ],
)
def test_attention_errors(bind, op, kind, changed, message):
    with pytest.raises(kind, match=f"^{re.escape(f'{op}: {message}')}$"):
        bind(**changed)


def test_what_all_key_ranges_may_have_together():
    assert varlen().packed_k == 30
    assert varlen(**RANGES).packed_k == 3 * 12
    assert varlen(**RANGES, max_seqlen_k=None).packed_k == 3 * 30
    assert varlen(**RANGES, total_k_lengths=17).packed_k == 17
    assert varlen(**RANGES, total_k_lengths=1000).packed_k == 3 * 12


def test_memory_for_the_gradient_of_key_ranges():
    """Rows of dk and dv of each sequence, Hkv = 3, D = 16, Dv = 24, and delta."""
    cost = OPERATORS["flash_attention_varlen"].backward_cost
    assert cost is not None
    asked = varlen(return_lse=True)
    ranges = varlen(**RANGES, total_k_lengths=17, return_lse=True)
    assert cost.extra_memory(ranges) - cost.extra_memory(asked) == 17 * 3 * (16 + 24) * 4
