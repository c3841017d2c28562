"""What references share: the door (`bound`) and the dtype that arithmetic is carried in (`arithmetic`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..spec import ArrayMeta, Problem, Spec


def bound(spec: Spec, arrays: Mapping[str, np.ndarray], *, backward: bool = False, **params: Any) -> Problem:
    """The problem that a call with NumPy arrays states, or the spec's error."""
    op = f"{spec.name}_backward" if backward else spec.name
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{op}: {name} is a {type(array).__name__}, expected a numpy.ndarray")
    metas = {name: ArrayMeta.of_numpy(abs_strides(array)) for name, array in arrays.items()}
    return spec.bind_backward(metas, params) if backward else spec.bind(metas, params)


def abs_strides(array: np.ndarray) -> np.ndarray:
    """`array`, or a copy where a stride is negative or no whole element: a reference reads any layout."""
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    return array.copy() if odd else array


def arithmetic(array: np.ndarray) -> np.ndarray:
    """`array` in the dtype that it is computed in: float64 as it is, everything narrower as float32."""
    return array if array.dtype == np.float64 else array.astype(np.float32)


def rows_last(array: np.ndarray, axis: int) -> np.ndarray:
    """`arithmetic(array)` with `axis` last and contiguous: NumPy then sums a row alike whatever lies beside it."""
    return np.ascontiguousarray(np.moveaxis(arithmetic(array), axis, -1))
