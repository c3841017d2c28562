"""Tensor maps that kernels are launched with.

A rung says which it needs, `Choice(..., maps={"a_map": Mapped("a", ...)})`, and names them among its kernels' arguments
as it names arrays: such a parameter, a `backend.tensor_map`, gets the map's bytes. What they say depends on the array's
address and layout alone. They come with a launch, as its numbers do, and stay in a captured graph: nothing is written
on the device before the kernel, and nothing is kept there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .tensor_map import ROUNDED as ROUNDED, Boxes, Encoded, boxes_of


class Mapped(NamedTuple):
    """The boxes of an array that a kernel loads or stores, as `tensor_map.Boxes` has them."""

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
    """An array's memory as its map has it."""
    strides = [stride * array.itemsize for stride in boxes.strides]
    return np.lib.stride_tricks.as_strided(array, boxes.shape, strides)
