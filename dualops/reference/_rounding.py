"""Shared by the references: argument checks (`bound`), the dtype of arithmetic (`arithmetic`), rounded factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_dtypes import finfo

from ..spec import ArrayMeta, Problem, Spec
from ..spec.meta import check_plain, number_meta
from ..spec.named import with_options


def bound(spec: Spec, given: Mapping[str, Any], *, backward: bool = False) -> tuple[Problem, dict[str, Any]]:
    """Return the problem of a call and its arrays by name, or raise the spec's error.

    given: arrays and parameters by name, None for an optional array; other names are ignored. Its `options`, if
    present, are further arguments by name; those left out have their defaults.
    """
    if "options" in given:
        given = with_options(spec, given, given["options"], backward=backward)
    op = f"{spec.name}_backward" if backward else spec.name
    arrays: dict[str, Any] = {}
    metas: dict[str, ArrayMeta] = {}
    for wanted in spec.gradient_inputs if backward else spec.inputs:
        array = given[wanted.name]
        if array is None and wanted.optional:
            continue
        if isinstance(array, np.ndarray):
            check_plain(array, op, wanted.name)
            meta = ArrayMeta.of_numpy(abs_strides(array))
            metas[wanted.name] = meta._replace(read_only=not array.flags.writeable)
        elif wanted.host:
            metas[wanted.name] = number_meta(array, op, wanted.name, wanted.dtypes)
        else:
            raise TypeError(f"{op}: {wanted.name} is a {type(array).__name__}, expected a numpy.ndarray")
        arrays[wanted.name] = array
    accepted = (*spec.params, *spec.gradient_params) if backward else spec.params
    params = {param.name: given[param.name] for param in accepted}
    problem = spec.bind_backward(metas, params) if backward else spec.bind(metas, params)
    if spec.values:
        spec.values(op, arrays, problem)
    return problem, arrays


def abs_strides(array: np.ndarray) -> np.ndarray:
    """Return `array`, or a copy if a stride is negative or not a multiple of the item size."""
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    return array.copy() if odd else array


def arithmetic(array: np.ndarray) -> np.ndarray:
    """Return `array` in the dtype of arithmetic: float64 stays, narrower dtypes become float32."""
    return array if array.dtype == np.float64 else array.astype(np.float32)


def to_digits(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round `array` to as many binary digits as `dtype` has, without its limits of range."""
    digits = int(finfo(dtype).nmant) + 1
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.rint(np.ldexp(mantissa, digits)), exponent - digits)


def rows_last(array: np.ndarray, axis: int) -> np.ndarray:
    """Return `arithmetic(array)` with `axis` last and contiguous: NumPy's sum of a row then ignores the other rows."""
    return np.ascontiguousarray(np.moveaxis(arithmetic(array), axis, -1))
