"""Launches of the kernels beside the one that is broken: what they made of the same memory before, they make again.

A gradient's other kernels take longer than the mutant itself, and mostly see nothing that it wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np

from dualops.cuda import simulator
from dualops.cuda.launch.step import leaves
from dualops.cuda.simulator import Pointer

LEAST_ADDRESS = 1 << 32  # of a record's address; a kernel's own numbers are smaller
MOST = 16  # launches that are remembered: the first ones, beside the kernel as it is


@contextmanager
def remembered(kernel: str) -> Iterator[None]:
    """Inside the with statement all launches but this kernel's are done once for the same memory and numbers, whatever
    the order of threads.

    Their memory is that of their arguments: for kernels that read no table of addresses.
    """
    launch = simulator.launch
    known: dict[tuple[Any, ...], list[np.ndarray]] = {}

    def once(function: FunctionType, grid: Sequence[int], block: Sequence[int], args: Any, **options: Any) -> None:
        if function.__name__ == kernel:
            launch(function, grid, block, args, **options)
            return
        arrays, rest = _told_apart(args)
        call = function, tuple(grid), *rest, *(array.tobytes() for array in arrays)
        if call not in known:
            launch(function, grid, block, args, **options)
            if len(known) < MOST:
                known[call] = [array.copy() for array in arrays]
        else:
            for array, after in zip(arrays, known[call]):
                array[...] = after

    with mock.patch.object(simulator, "launch", once):
        yield


def _told_apart(args: Any) -> tuple[list[np.ndarray], list[Any]]:
    """The memory among arguments, and behind their tensor maps; what is left."""
    arrays, rest = [], []
    for arg in leaves(args):
        if isinstance(arg, Pointer):
            arrays.append(arg.data)
        elif arg >= LEAST_ADDRESS:
            arrays.append(simulator.tensor_map_at(arg).array)
        else:
            rest.append(arg)
    return arrays, rest
