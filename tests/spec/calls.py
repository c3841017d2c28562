"""Right calls on arrays that do not exist, to be bent."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dualops.spec import ArrayMeta, Problem, flash_attention, flash_attention_varlen
from dualops.spec.base import Input
from dualops.spec.meta import contiguous_strides

FLOAT_LIST = "expected one of float64, float32, float16, bfloat16"


def meta(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None, device: str = "cpu") -> ArrayMeta:
    return ArrayMeta(shape, dtype, contiguous_strides(shape) if strides is None else strides, device, 4096)


def metas_of(inputs: Sequence[Input], dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ArrayMeta | None]:
    """Metas of the inputs that have a shape. dtype: of the problem."""
    given = [entry for entry in inputs if entry.name in shapes]
    return {entry.name: meta(*shapes[entry.name], dtype=entry.dtype_for(dtype)) for entry in given}


def rows_of(errors: Mapping[type[Exception], Sequence[tuple[Any, ...]]]) -> list[Any]:
    """A row for each wrong call: the error's kind, what the call has, the message, which is also the test's id."""
    return [pytest.param(kind, *row, id=row[-1]) for kind, rows in errors.items() for row in rows]


def attention(**changed: Any) -> Problem:
    """Bind a right call with some of its arrays replaced, arrays and parameters added."""
    right = {"q": meta(2, 6, 5, 16), "k": meta(2, 3, 7, 16), "v": meta(2, 3, 7, 24)}
    arrays, params = _parted(changed)
    return flash_attention.bind(right | arrays, params)


def attention_backward(**changed: Any) -> Problem:
    right = {"q": meta(2, 6, 5, 16), "k": meta(2, 3, 7, 16), "v": meta(2, 3, 7, 24)}
    right |= {"o": meta(2, 6, 5, 24), "lse": meta(2, 6, 5), "do": meta(2, 6, 5, 24)}
    arrays, params = _parted(changed)
    return flash_attention.bind_backward(right | arrays, params)


def varlen(**changed: Any) -> Problem:
    """Bind a right call of three sequences, changed in the same way."""
    right = {"q": meta(20, 6, 16), "k": meta(30, 3, 16), "v": meta(30, 3, 24)}
    right |= {f"cu_seqlens_{side}": meta(4, dtype="int32") for side in "qk"}
    arrays, params = _parted(changed)
    return flash_attention_varlen.bind(right | arrays, {"max_seqlen_q": 9, "max_seqlen_k": 12, **params})


def _parted(changed: dict[str, Any]) -> tuple[dict[str, ArrayMeta | None], dict[str, Any]]:
    names = {entry.name for spec in (flash_attention, flash_attention_varlen) for entry in spec.gradient_inputs}
    arrays = {name: value for name, value in changed.items() if name in names}
    return arrays, {name: value for name, value in changed.items() if name not in arrays}
