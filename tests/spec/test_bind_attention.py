"""Errors of wrong calls of attention: operator, argument, what was expected and what was given."""

import re
from functools import partial
from typing import Any

import pytest

from dualops.spec import OPERATORS
from tests.spec.calls import FLOAT_LIST, attention, attention_backward, meta, rows_of, varlen

ATTENTION_ERRORS = {
    ValueError: [
        ({"q": meta(6, 5, 16)}, "q has 3 axes (6, 5, 16), expected 4: [B, H, Sq, D]"),
        ({"v": meta(2, 3, 7, 24, 1)}, "v has 5 axes (2, 3, 7, 24, 1), expected 4: [B, Hkv, Sk, Dv]"),
        ({"k": meta(1, 3, 7, 16)}, "k has B=1, q has B=2"),
        ({"v": meta(3, 3, 7, 24)}, "v has B=3, q has B=2"),
        ({"k": meta(2, 3, 7, 15)}, "k has D=15, q has D=16"),
        ({"v": meta(2, 3, 8, 24)}, "v has Sk=8, k has Sk=7"),
        ({"v": meta(2, 6, 7, 24)}, "v has Hkv=6, k has Hkv=3"),
        ({"q": meta(2, 7, 5, 16)}, "q has H=7, k has Hkv=3, expected H to be a multiple of Hkv, neither of them 0"),
        ({"q": meta(2, 2, 5, 16)}, "q has H=2, k has Hkv=3, expected H to be a multiple of Hkv, neither of them 0"),
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
        ({"causal": None}, "causal is None, expected False, True or 'top_left'"),
        ({"causal": "bottom_right"}, "causal is 'bottom_right', expected False, True or 'top_left'"),
        ({"scale": float("nan")}, "scale is nan, expected a finite number"),
        ({"scale": float("inf")}, "scale is inf, expected a finite number"),
        ({"scale": 10**400}, f"scale is {str(10**400)[:200]}..., expected a finite number"),
        ({"window": (-1, 0)}, "window is (-1, 0), expected left and right to be None (unbounded) or at least 0"),
        ({"window": (None, -2)}, "window is (None, -2), expected left and right to be None (unbounded) or at least 0"),
        ({"softcap": 0}, "softcap is 0, expected a number above 0, or None"),
        ({"softcap": -1.0}, "softcap is -1.0, expected a number above 0, or None"),
        ({"softcap": float("inf")}, "softcap is inf, expected a finite number"),
        ({"bias": meta(5, 8)}, "bias has shape (5, 8), expected one that broadcasts to [B, H, Sq, Sk] = (2, 6, 5, 7)"),
        ({"bias": meta(3, 5, 7)},
         "bias has shape (3, 5, 7), expected one that broadcasts to [B, H, Sq, Sk] = (2, 6, 5, 7)"),
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
        ({"dropout_p": float("nan")}, "dropout_p is nan, expected a finite number"),
        ({"dropout_p": 0.5}, "seed is None, expected an integer where dropout_p is 0.5"),
        ({"seed": meta(1, dtype="int64")}, "seed has 1 axes (1,), expected 0: []"),
        ({"seed": meta(dtype="int64", device="cuda:0")}, "seed is on cuda:0, q on cpu, expected one device"),
    ],
    TypeError: [
        ({"q": meta(2, 6, 5, 16, dtype="int64")}, f"q has dtype int64, {FLOAT_LIST}"),
        ({"v": meta(2, 3, 7, 24, dtype="float16")}, "v has dtype float16, q has dtype float32, expected the same"),
        ({"scale": "big"}, "scale is 'big', expected a number"),
        ({"scale": "0.5"}, "scale is '0.5', expected a number"),
        ({"scale": True}, "scale is True, expected a number"),
        ({"return_lse": 1}, "return_lse is 1, expected True or False"),
        ({"return_lse": None}, "return_lse is None, expected True or False"),
        ({"window": 3}, "window is 3, expected None or a pair (left, right)"),
        ({"window": (1, 2, 3)}, "window is (1, 2, 3), expected None or a pair (left, right)"),
        ({"window": "ab"}, "window is 'ab', expected None or a pair (left, right)"),
        ({"softcap": True}, "softcap is True, expected a number"),
        ({"bias": meta(5, 7, dtype="float64")}, "bias has dtype float64, q has dtype float32, expected the same"),
        ({"bias": meta(5, 7, dtype="bool")}, f"bias has dtype bool, {FLOAT_LIST}"),
        ({"alibi_slopes": meta(6, dtype="int32")}, f"alibi_slopes has dtype int32, {FLOAT_LIST}"),
        ({"alibi_slopes": meta(6, dtype="float16")},
         "alibi_slopes has dtype float16, q has dtype float32, expected float32"),
        ({"sinks": meta(6, dtype="float64")}, "sinks has dtype float64, q has dtype float32, expected float32"),
        ({"key_padding_mask": meta(2, 7)}, "key_padding_mask has dtype float32, expected bool"),
        ({"key_padding_mask": meta(2, 7, dtype="uint8")}, "key_padding_mask has dtype uint8, expected bool"),
        ({"dropout_p": True}, "dropout_p is True, expected a number"),
        ({"seed": meta(dtype="int32")}, "seed has dtype int32, expected int64"),
        ({"seed": meta(dtype="float32")}, "seed has dtype float32, expected int64"),
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


BACKWARD_ERRORS = {
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


every_error = partial(pytest.mark.parametrize, ("kind", "changed", "message"))


@every_error(rows_of(ATTENTION_ERRORS))
def test_attention_errors(kind, changed, message):
    with pytest.raises(kind, match=f"^{re.escape(f'flash_attention: {message}')}$"):
        attention(**changed)


@every_error(rows_of(BACKWARD_ERRORS))
def test_attention_backward_errors(kind, changed, message):
    with pytest.raises(kind, match=f"^{re.escape(f'flash_attention_backward: {message}')}$"):
        attention_backward(**changed)


@every_error(rows_of(VARLEN_ERRORS))
def test_varlen_errors(kind, changed, message):
    with pytest.raises(kind, match=f"^{re.escape(f'flash_attention_varlen: {message}')}$"):
        varlen(**changed)


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
