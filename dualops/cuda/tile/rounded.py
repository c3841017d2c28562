"""Arithmetic whose bits are promised: each operation is rounded by itself, where a compiler would fuse a * b + c."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, f64
from ..ptx.arithmetic import add_rn, add_rn_f64, mul_rn, mul_rn_f64, sub_rn, sub_rn_f64


class Rounded(Namespace):
    """The verbs for numbers of one type; NumPy's operators of that type give the same bits."""

    mul: Callable[..., Any]
    add: Callable[..., Any]
    sub: Callable[..., Any]


@cache
def rounded(number: Any) -> Rounded:
    """The verbs for f32 or f64."""
    if number is f64:
        return Rounded(mul=mul_rn_f64, add=add_rn_f64, sub=sub_rn_f64)
    return Rounded(mul=mul_rn, add=add_rn, sub=sub_rn)
