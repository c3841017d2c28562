"""torch tensors and Numba device arrays for the checker."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dualops.cuda.compiler.backend import cuda
from dualops.spec import Tag
from dualops.spec.meta import numpy_dtype
from tests.checks import Library, gradient_inputs
from tests.cuda.operators import Direction
from tests.problems import values

LATE = 1_000_000_000  # clock cycles, half a second: more than a host needs that others keep busy

_TORCH = {
    name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "bool")
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}


def tensor(array: np.ndarray) -> torch.Tensor:
    """A contiguous copy of a NumPy array on the GPU, bit for bit (bfloat16 is ml_dtypes' here and torch's there)."""
    bits = np.ascontiguousarray(array).view(_BITS[array.itemsize][0])
    return torch.from_numpy(bits.copy()).cuda().view(_TORCH[array.dtype.name]).reshape(array.shape)


def numpy(array: torch.Tensor) -> np.ndarray:
    """A contiguous copy of a tensor on the host, bit for bit."""
    bits = array.detach().contiguous().view(_BITS[array.element_size()][1]).cpu().numpy()
    return bits.view(numpy_dtype(_NAMES[array.dtype]))


def tensors(arrays: Mapping[str, np.ndarray]) -> list[torch.Tensor]:
    return [tensor(array) for array in arrays.values()]


def inputs_of(direction: Direction) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """A TEST case in bfloat16 that is not small, on the GPU, and its parameters."""
    cases = [
        c for c in direction.spec.tagged(Tag.TEST) if c.dtype == "bfloat16" and (c.backward or not direction.backward)
    ]
    sizes = [int(np.prod(next(iter(case.shapes.values())))) for case in cases]
    case = cases[next((i for i, size in enumerate(sizes) if size > 1000), int(np.argmax(sizes)))]
    arrays = gradient_inputs(direction.spec, case) if direction.backward else values(direction.spec, case)
    return {name: tensor(array) for name, array in arrays.items()}, case.params


def _torch_view(flat: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    return torch.as_strided(flat, tuple(shape), tuple(strides), offset)


TORCH = Library(tensor, numpy, _torch_view, lambda array: tuple(array.stride()))


def _numba_view(flat: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
    torch.cuda.synchronize()  # the copy to the GPU was torch's, on torch's stream
    return cuda.as_cuda_array(_torch_view(flat, shape, strides, offset))


def _numba_to_host(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):  # the flat buffer
        torch.cuda.synchronize()
        return numpy(array)
    return array.copy_to_host()


NUMBA = Library(
    tensor, _numba_to_host, _numba_view, lambda array: tuple(stride // array.dtype.itemsize for stride in array.strides)
)


class Foreign:
    """An array of a library that dualops has never heard of: `__cuda_array_interface__` and nothing else."""

    def __init__(self, array: torch.Tensor):
        self.array = array

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__cuda_array_interface__


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN included."""
    bits = _BITS[one.element_size()][1]
    return one.dtype == two.dtype and torch.equal(one.contiguous().view(bits), two.contiguous().view(bits))


def several(results: Any) -> tuple[Any, ...]:
    """What a call returned, as a tuple."""
    return results if isinstance(results, tuple) else (results,)


def as_returned(results: tuple[Any, ...]) -> Any:
    """One result alone, several as a tuple."""
    return results if len(results) > 1 else next(iter(results))
