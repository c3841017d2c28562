"""What wrong calls of attention are told: operator, argument, what was expected and what was given."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dualops.spec import OPERATORS
from tests.spec.calls import FLOAT_LIST, attention, attention_backward, meta, varlen

ATTENTION_ERRORS = {
    "q rank": (
        {"q": meta(6, 5, 16)}, ValueError, "q has 3 axes (6, 5, 16), expected 4: [B, H, Sq, D]",
    ),
    "v rank": (
        {"v": meta(2, 3, 7, 24, 1)}, ValueError,
        "v has 5 axes (2, 3, 7, 24, 1), expected 4: [B, Hkv, Sk, Dv]",
    ),
    "B of k": ({"k": meta(1, 3, 7, 16)}, ValueError, "k has B=1, q has B=2"),
    "B of v": ({"v": meta(3, 3, 7, 24)}, ValueError, "v has B=3, q has B=2"),
    "D of k": ({"k": meta(2, 3, 7, 15)}, ValueError, "k has D=15, q has D=16"),
    "Sk of v": ({"v": meta(2, 3, 8, 24)}, ValueError, "v has Sk=8, k has Sk=7"),
    "Hkv of v": ({"v": meta(2, 6, 7, 24)}, ValueError, "v has Hkv=6, k has Hkv=3"),
    "H not a multiple": (
        {"q": meta(2, 7, 5, 16)}, ValueError,
        "q has H=7, k has Hkv=3, expected H to be a multiple of Hkv, neither of them 0",
    ),
    "H less than Hkv": (
        {"q": meta(2, 2, 5, 16)}, ValueError,
        "q has H=2, k has Hkv=3, expected H to be a multiple of Hkv, neither of them 0",
    ),
    "Hkv zero": (
        {"k": meta(2, 0, 7, 16), "v": meta(2, 0, 7, 24)}, ValueError,
        "q has H=6, k has Hkv=0, expected H to be a multiple of Hkv, neither of them 0",
    ),
    "H zero": (
        {"q": meta(2, 0, 5, 16)}, ValueError,
        "q has H=0, k has Hkv=3, expected H to be a multiple of Hkv, neither of them 0",
    ),
    "D too large": (
        {"q": meta(2, 6, 5, 513), "k": meta(2, 3, 7, 513)}, ValueError,
        "q has D=513, expected 1 to 512",
    ),
    "D zero": (
        {"q": meta(2, 6, 5, 0), "k": meta(2, 3, 7, 0)}, ValueError, "q has D=0, expected 1 to 512",
    ),
    "Dv too large": ({"v": meta(2, 3, 7, 1024)}, ValueError, "v has Dv=1024, expected 1 to 512"),
    "dtype": ({"q": meta(2, 6, 5, 16, dtype="int64")}, TypeError, f"q has dtype int64, {FLOAT_LIST}"),
    "mixed dtypes": (
        {"v": meta(2, 3, 7, 24, dtype="float16")}, TypeError,
        "v has dtype float16, q has dtype float32, expected the same",
    ),
    "mixed devices": (
        {"k": meta(2, 3, 7, 16, device="cuda:0")}, ValueError,
        "k is on cuda:0, q on cpu, expected one device",
    ),
    "last axis strided": (
        {"k": meta(2, 3, 7, 16, strides=(672, 224, 32, 2))}, ValueError,
        "k has stride 2 along its last axis D, expected 1",
    ),
    "last axis broadcast": (
        {"v": meta(2, 3, 7, 24, strides=(21, 7, 1, 0))}, ValueError,
        "v has stride 0 along its last axis Dv, expected 1",
    ),
    "negative stride": (
        {"q": meta(2, 6, 5, 16, strides=(480, 80, -16, 1))}, NotImplementedError,
        "q has a negative stride in (480, 80, -16, 1)",
    ),
    "causal a number": ({"causal": 1}, ValueError, "causal is 1, expected False, True or 'top_left'"),
    "causal None": (
        {"causal": None}, ValueError, "causal is None, expected False, True or 'top_left'",
    ),
    "causal another word": (
        {"causal": "bottom_right"}, ValueError,
        "causal is 'bottom_right', expected False, True or 'top_left'",
    ),
    "scale a word": ({"scale": "big"}, TypeError, "scale is 'big', expected a number"),
    "scale a numeral": ({"scale": "0.5"}, TypeError, "scale is '0.5', expected a number"),
    "scale a bool": ({"scale": True}, TypeError, "scale is True, expected a number"),
    "scale NaN": (
        {"scale": float("nan")}, ValueError, "scale is nan, expected a finite number",
    ),
    "scale infinite": (
        {"scale": float("inf")}, ValueError, "scale is inf, expected a finite number",
    ),
    "scale too large to be a float": (
        {"scale": 10**400}, ValueError, f"scale is {str(10**400)[:200]}..., expected a finite number",
    ),
    "return_lse a number": ({"return_lse": 1}, TypeError, "return_lse is 1, expected True or False"),
    "return_lse None": ({"return_lse": None}, TypeError, "return_lse is None, expected True or False"),
    # options
    "window one number": ({"window": 3}, TypeError, "window is 3, expected None or a pair (left, right)"),
    "window three numbers": (
        {"window": (1, 2, 3)}, TypeError, "window is (1, 2, 3), expected None or a pair (left, right)",
    ),
    "window a word": ({"window": "ab"}, TypeError, "window is 'ab', expected None or a pair (left, right)"),
    "window negative to the left": (
        {"window": (-1, 0)}, ValueError,
        "window is (-1, 0), expected left and right to be None (unbounded) or at least 0",
    ),
    "window negative to the right": (
        {"window": (None, -2)}, ValueError,
        "window is (None, -2), expected left and right to be None (unbounded) or at least 0",
    ),
    "softcap zero": ({"softcap": 0}, ValueError, "softcap is 0, expected a number above 0, or None"),
    "softcap negative": ({"softcap": -1.0}, ValueError, "softcap is -1.0, expected a number above 0, or None"),
    "softcap infinite": ({"softcap": float("inf")}, ValueError, "softcap is inf, expected a finite number"),
    "softcap a bool": ({"softcap": True}, TypeError, "softcap is True, expected a number"),
    "bias that does not broadcast": (
        {"bias": meta(5, 8)}, ValueError,
        "bias has shape (5, 8), expected one that broadcasts to [B, H, Sq, Sk] = (2, 6, 5, 7)",
    ),
    "bias over key heads": (
        {"bias": meta(3, 5, 7)}, ValueError,
        "bias has shape (3, 5, 7), expected one that broadcasts to [B, H, Sq, Sk] = (2, 6, 5, 7)",
    ),
    "bias of five axes": (
        {"bias": meta(1, 1, 1, 1, 1)}, ValueError,
        "bias has shape (1, 1, 1, 1, 1), expected one that broadcasts to [B, H, Sq, Sk] = (2, 6, 5, 7)",
    ),
    "bias empty": (
        {"bias": meta(0, 7)}, ValueError,
        "bias has shape (0, 7), expected one that broadcasts to [B, H, Sq, Sk] = (2, 6, 5, 7)",
    ),
    "bias wider than q": (
        {"bias": meta(5, 7, dtype="float64")}, TypeError,
        "bias has dtype float64, q has dtype float32, expected the same",
    ),
    "bias of bool": ({"bias": meta(5, 7, dtype="bool")}, TypeError, f"bias has dtype bool, {FLOAT_LIST}"),
    "slopes too few": ({"alibi_slopes": meta(3)}, ValueError, "alibi_slopes has H=3, q has H=6"),
    "slopes of batches": (
        {"alibi_slopes": meta(2, 6)}, ValueError, "alibi_slopes has 2 axes (2, 6), expected 1: [H]",
    ),
    "slopes of integers": (
        {"alibi_slopes": meta(6, dtype="int32")}, TypeError, f"alibi_slopes has dtype int32, {FLOAT_LIST}",
    ),
    "slopes narrower than q": (
        {"alibi_slopes": meta(6, dtype="float16")}, TypeError,
        "alibi_slopes has dtype float16, q has dtype float32, expected float32",
    ),
    "sinks too many": ({"sinks": meta(7)}, ValueError, "sinks has H=7, q has H=6"),
    "sinks of another rank": ({"sinks": meta(6, 1)}, ValueError, "sinks has 2 axes (6, 1), expected 1: [H]"),
    "sinks wider than arithmetic": (
        {"sinks": meta(6, dtype="float64")}, TypeError,
        "sinks has dtype float64, q has dtype float32, expected float32",
    ),
    "mask of floats": (
        {"key_padding_mask": meta(2, 7)}, TypeError, "key_padding_mask has dtype float32, expected bool",
    ),
    "mask of bytes": (
        {"key_padding_mask": meta(2, 7, dtype="uint8")}, TypeError,
        "key_padding_mask has dtype uint8, expected bool",
    ),
    "mask of queries": (
        {"key_padding_mask": meta(2, 5, dtype="bool")}, ValueError, "key_padding_mask has Sk=5, k has Sk=7",
    ),
    "mask of one batch": (
        {"key_padding_mask": meta(7, dtype="bool")}, ValueError,
        "key_padding_mask has 1 axes (7,), expected 2: [B, Sk]",
    ),
    "dropout of everything": (
        {"dropout_p": 1.0}, ValueError, "dropout_p is 1.0, expected a probability from 0 to below 1",
    ),
    "dropout negative": (
        {"dropout_p": -0.1}, ValueError, "dropout_p is -0.1, expected a probability from 0 to below 1",
    ),
    "dropout NaN": ({"dropout_p": float("nan")}, ValueError, "dropout_p is nan, expected a finite number"),
    "dropout a bool": ({"dropout_p": True}, TypeError, "dropout_p is True, expected a number"),
    "dropout without a seed": (
        {"dropout_p": 0.5}, ValueError, "seed is None, expected an integer where dropout_p is 0.5",
    ),
    "seed of 32 bits": ({"seed": meta(dtype="int32")}, TypeError, "seed has dtype int32, expected int64"),
    "seed of a float": ({"seed": meta(dtype="float32")}, TypeError, "seed has dtype float32, expected int64"),
    "seed with an axis": ({"seed": meta(1, dtype="int64")}, ValueError, "seed has 1 axes (1,), expected 0: []"),
    "seed on another device": (
        {"seed": meta(dtype="int64", device="cuda:0")}, ValueError, "seed is on cuda:0, q on cpu, expected one device",
    ),
    "unknown parameter": (
        {"dropout": 0.1}, TypeError,
        "unknown parameter dropout, expected scale, softcap, score_mod, causal, window, mask_mod, dropout_p, "
        "return_lse",
    ),
    "a parameter of backward": (
        {"bias_gradient": False}, TypeError,
        "unknown parameter bias_gradient, expected scale, softcap, score_mod, causal, window, mask_mod, dropout_p, "
        "return_lse",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION_ERRORS)
def test_attention_errors(name):
    changed, kind, message = ATTENTION_ERRORS[name]
    with pytest.raises(kind, match=f"^{re.escape(f'flash_attention: {message}')}$"):
        attention(**changed)


BACKWARD_ERRORS = {
    "lse of another length": ({"lse": meta(2, 6, 7)}, ValueError, "lse has Sq=7, q has Sq=5"),
    "lse in half precision": (
        {"lse": meta(2, 6, 5, dtype="bfloat16")}, TypeError,
        "lse has dtype bfloat16, q has dtype float32, expected float32",
    ),
    "lse missing": ({"lse": None}, TypeError, f"lse is missing, expected an array of {FLOAT_LIST[16:]}"),
    "o of another width": ({"o": meta(2, 6, 5, 16)}, ValueError, "o has Dv=16, v has Dv=24"),
    "do of another dtype": (
        {"do": meta(2, 6, 5, 24, dtype="float64")}, TypeError,
        "do has dtype float64, q has dtype float32, expected the same",
    ),
    "do strided": (
        {"do": meta(2, 6, 5, 24, strides=(0, 0, 0, 0))}, ValueError,
        "do has stride 0 along its last axis Dv, expected 1",
    ),
    "dlse of another rank": (
        {"dlse": meta(2, 6, 5, 1)}, ValueError, "dlse has 4 axes (2, 6, 5, 1), expected 3: [B, H, Sq]",
    ),
    "window": ({"window": 3}, TypeError, "window is 3, expected None or a pair (left, right)"),
    "bias_gradient": ({"bias_gradient": 1}, TypeError, "bias_gradient is 1, expected True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD_ERRORS)
def test_attention_backward_errors(name):
    changed, kind, message = BACKWARD_ERRORS[name]
    with pytest.raises(kind, match=f"^{re.escape(f'flash_attention_backward: {message}')}$"):
        attention_backward(**changed)


RANGES: dict[str, Any] = {
    "cu_seqlens_k": None, "k_starts": meta(3, dtype="int32"), "k_lengths": meta(3, dtype="int32"),
}  # fmt: skip
VARLEN_ERRORS = {
    "q rank": ({"q": meta(2, 6, 5, 16)}, ValueError, "q has 4 axes (2, 6, 5, 16), expected 3: [total_q, H, D]"),
    "tokens of v": ({"v": meta(29, 3, 24)}, ValueError, "v has total_k=29, k has total_k=30"),
    "D of k": ({"k": meta(30, 3, 8)}, ValueError, "k has D=8, q has D=16"),
    "H not a multiple": (
        {"q": meta(20, 7, 16)}, ValueError,
        "q has H=7, k has Hkv=3, expected H to be a multiple of Hkv, neither of them 0",
    ),
    "ends of 64 bits": (
        {"cu_seqlens_q": meta(4, dtype="int64")}, TypeError, "cu_seqlens_q has dtype int64, expected int32",
    ),
    "ends of floats": ({"cu_seqlens_k": meta(4)}, TypeError, "cu_seqlens_k has dtype float32, expected int32"),
    "ends of two axes": (
        {"cu_seqlens_q": meta(4, 1, dtype="int32")}, ValueError, "cu_seqlens_q has 2 axes (4, 1), expected 1: [B+1]",
    ),
    "as many ends": (
        {"cu_seqlens_k": meta(5, dtype="int32")}, ValueError, "cu_seqlens_k has B+1=5, cu_seqlens_q has B+1=4",
    ),
    "no ends": (
        {f"cu_seqlens_{side}": meta(0, dtype="int32") for side in "qk"}, ValueError,
        "cu_seqlens_q has no elements, expected B+1 of them",
    ),
    "ends missing": (
        {"cu_seqlens_k": None}, TypeError,
        "the keys are given by nothing, expected cu_seqlens_k alone, or k_starts and k_lengths",
    ),
    "ends and ranges": (
        RANGES | {"cu_seqlens_k": meta(4, dtype="int32")}, TypeError,
        "the keys are given by cu_seqlens_k and k_starts and k_lengths, expected cu_seqlens_k alone, or k_starts and "
        "k_lengths",
    ),
    "ranges without lengths": (
        RANGES | {"k_lengths": None}, TypeError,
        "the keys are given by k_starts, expected cu_seqlens_k alone, or k_starts and k_lengths",
    ),
    "ranges of 64 bits": (
        RANGES | {"k_lengths": meta(3, dtype="int64")}, TypeError, "k_lengths has dtype int64, expected int32",
    ),
    "as many starts": (
        {"cu_seqlens_k": None} | dict.fromkeys(("k_starts", "k_lengths"), meta(4, dtype="int32")), ValueError,
        "k_starts has B=4, cu_seqlens_q has B+1=4, expected B=3",
    ),
    "as many lengths": (
        RANGES | {"k_lengths": meta(4, dtype="int32")}, ValueError, "k_lengths has B=4, k_starts has B=3",
    ),
    "sum without ranges": (
        {"total_k_lengths": 30}, ValueError, "total_k_lengths is 30, expected None without k_lengths",
    ),
    "sum a float": (
        RANGES | {"total_k_lengths": 3.0}, TypeError, "total_k_lengths is 3.0, expected an integer",
    ),
    "sum negative": (
        RANGES | {"total_k_lengths": -1}, ValueError, "total_k_lengths is -1, expected 0 or more",
    ),
    "longest a float": ({"max_seqlen_k": 12.0}, TypeError, "max_seqlen_k is 12.0, expected an integer"),
    "longest negative": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1, expected 0 or more"),
    "slopes too few": ({"alibi_slopes": meta(3)}, ValueError, "alibi_slopes has H=3, q has H=6"),
    "dropout without a seed": (
        {"dropout_p": 0.5}, ValueError, "seed is None, expected an integer where dropout_p is 0.5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARLEN_ERRORS)
def test_varlen_errors(name):
    changed, kind, message = VARLEN_ERRORS[name]
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
