"""Cache the launches of the kernels other than the broken one: with equal memory, their earlier results are used again.

A gradient's other kernels take longer than the mutant itself, and most of them do not read what it wrote.
"""

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
MOST = 16  # cached launches: the first ones, while the kernel is unchanged


@contextmanager
def remembered(kernel: str) -> Iterator[None]:
    """Inside the with statement, a launch of another kernel runs once per memory and numbers, in any order of threads.

    Its memory is that of its arguments, so this is only right for kernels that read no table of addresses.
    """
    launch = simulator.launch
    known: dict[tuple[Any, ...], list[np.ndarray]] = {}

    def once(function: FunctionType, grid: Sequence[int], block: Sequence[int], args: Any, **options: Any) -> None:
        if function.__name__ == kernel:
            launch(function, grid, block, args, **options)
            return
        arrays, rest = _split(args)
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


def _split(args: Any) -> tuple[list[np.ndarray], list[Any]]:
    """Return the memory of the arguments and of their tensor maps, and the other arguments."""
    arrays, rest = [], []
    for arg in leaves(args):
        if isinstance(arg, Pointer):
            arrays.append(arg.data)
        elif arg >= LEAST_ADDRESS:
            arrays.append(simulator.tensor_map_at(arg).array)
        else:
            rest.append(arg)
    return arrays, rest
