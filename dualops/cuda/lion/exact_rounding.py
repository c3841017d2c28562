"""Arithmetic with exact bits: each operation is rounded separately. A compiler would fuse a * b + c."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..compiler.backend import Members, f64, members, noun
from ..ptx.arithmetic import add_rn, add_rn_f64, mul_rn, mul_rn_f64, sub_rn, sub_rn_f64


@cache
@noun
def rounded(number: Any) -> Members:
    """The verbs for f32 or f64. NumPy's operators of that type give the same bits."""
    if number is f64:
        return members({}, mul=mul_rn_f64, add=add_rn_f64, sub=sub_rn_f64)
    return members({}, mul=mul_rn, add=add_rn, sub=sub_rn)
