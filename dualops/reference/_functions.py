"""Call users' functions of numbers on arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..spec.attention.function import UserFunction


def elementwise(user: UserFunction, number: Callable[[Any], np.ndarray]) -> Callable[..., np.ndarray]:
    """Call a user's function on arrays that broadcast together: a score of `number`'s dtype, and integers.

    Returns an array of the common shape: scores of that dtype, or truth values for a function without a score. A
    function that works on arrays as on their elements is called once. Any other, which branches or calls `math`, is
    called once per element with NumPy scalars. Its exceptions, such as math.exp's OverflowError, propagate.
    """
    function = user.function
    dtype = number(0).dtype if user.parameters[0] == "score" else np.dtype(bool)

    def on_arrays(*arrays: Any) -> np.ndarray:
        with np.errstate(all="ignore"):  # as on a GPU; np.where also computes the branch that it drops
            result = np.asarray(function(*arrays)).astype(dtype)
        return np.broadcast_to(result, np.broadcast_shapes(*map(np.shape, arrays)))

    def on_elements(*arrays: Any) -> np.ndarray:
        spread = np.broadcast_arrays(*arrays)
        with np.errstate(all="ignore"):
            results = [function(*row) for row in zip(*(array.flat for array in spread), strict=True)]
        return np.array(results, dtype).reshape(spread[0].shape)

    return on_arrays if _takes_arrays(user, on_arrays, on_elements) else on_elements


def _takes_arrays(user: UserFunction, on_arrays: Callable[..., Any], on_elements: Callable[..., Any]) -> bool:
    """Whether a function gives the same on arrays as on their elements.

    It is tested with two elements: a branch on an array then fails. Without branches, all elements take the same path.
    """
    samples = {"score": np.array([0.5, -0.75]), "i": np.array([0, 1]), "j": np.array([1, 0])}
    arrays = [samples.get(name, np.array([0, 0])) for name in user.parameters]
    try:
        return np.allclose(on_arrays(*arrays), on_elements(*arrays), rtol=1e-5, equal_nan=True)
    except Exception:
        return False
