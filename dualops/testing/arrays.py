"""Convert arrays of any library to NumPy's."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..spec.meta import numpy_dtype


def to_numpy(array: Any) -> np.ndarray:
    """Return an array on the host, bit for bit: of NumPy, torch, JAX, CuPy, Numba, or anything that `np.asarray` takes.

    It is copied only if necessary; a tensor becomes row-major. bfloat16 becomes that of ml_dtypes, which JAX uses too.
    Raises TypeError for anything but an array of numbers.
    """
    if isinstance(array, np.ndarray):
        return array
    if _is_torch(array):
        torch = sys.modules["torch"]
        tensor = array.detach().contiguous().cpu()
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
        return tensor.numpy()
    for download in ("copy_to_host", "get"):  # Numba's and CuPy's; np.asarray refuses to download implicitly
        if hasattr(array, "__cuda_array_interface__") and hasattr(array, download):
            return getattr(array, download)()
    found = np.asarray(None if isinstance(array, (list, tuple)) else array)
    if found.dtype.hasobject or found.dtype.kind in "US":
        raise TypeError(f"a {type(array).__module__}.{type(array).__qualname__} is no array of numbers")
    return found


def _is_torch(array: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(array).__mro__)
