"""Tensor maps as arguments of launches.

A rung declares the maps that it needs, `Choice(..., maps={"a_map": Mapped("a", ...)})`, and names them among its
kernels' arguments like arrays. Such a parameter, a `backend.tensor_map`, gets the map's bytes, which depend only on the
array's address and layout. A launch passes them by value, like numbers, and a captured graph keeps them: nothing is
written to the device before the kernel, and nothing is kept there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .tensor_map import ROUNDED as ROUNDED, Boxes, Encoded, boxes_of


class Mapped(NamedTuple):
    """The boxes of an array that a kernel loads or stores, see `tensor_map.Boxes`."""

    array: str  # its name in the call
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    span: int = 128

    @property
    def boxes(self) -> Boxes:
        return boxes_of(self.dtype, self.shape, self.strides, self.box, self.span)


class Maps:
    """The tensor maps of one plan's launches."""

    def __init__(self, wanted: Sequence[Mapped], names: Sequence[str | None]):
        """names: of the call's arrays, in the order of their addresses."""
        self.wanted = [(each.boxes, names.index(each.array)) for each in wanted]

    def encoded(self, addresses: Sequence[int]) -> list[Encoded]:
        """Return the maps of arrays at these addresses. The caller keeps them until the launch is done."""
        return [boxes.encoded(addresses[which]) for boxes, which in self.wanted]

    def simulated(self, arrays: Sequence[Any]) -> list[Any]:
        """Return records of the maps, for the simulator. Their `address` is valid as long as the caller keeps them."""
        return [boxes.simulated(_view(arrays[which], boxes)) for boxes, which in self.wanted]


def _view(array: np.ndarray, boxes: Boxes) -> np.ndarray:
    """Return an array's memory with the shape and strides of its map."""
    strides = [stride * array.itemsize for stride in boxes.strides]
    return np.lib.stride_tricks.as_strided(array, boxes.shape, strides)
