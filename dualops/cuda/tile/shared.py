"""Layout of a block's shared memory: the host allocates tiles, and kernels fill them.

    shared = Shared("bfloat16", threads)        numbers of float32 arithmetic
    q = shared.tile(BLOCK_Q, D)                 [BLOCK_Q, D]
    k = shared.tile(BLOCK_KV, D)
    v = shared.tile(BLOCK_KV, Dv, over=k)       in the same memory as k
    shared.nbytes                               bytes that the launch requests

A kernel's dynamic shared memory is one array of numbers, `smem`; places are indices of this array. Every tile begins at
a multiple of four numbers, since four are loaded at once. Rows have a multiple of four numbers and `PAD` numbers of
padding, so that lanes on neighbouring rows access different banks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..compiler.backend import Members, Noun, cuda, i32, members, noun, verb
from .numbers import numbers
from .storage import storage

PAD = 4  # numbers between rows


class Lines(NamedTuple):
    """`count` rows of an array in global memory: line r begins at data[first + r * step]."""

    data: Any
    first: Any
    step: Any
    count: Any


class Part(NamedTuple):
    """`Lines` with only `columns` columns. The load may multiply line r by smem[weights + r]."""

    data: Any
    first: Any
    step: Any
    count: Any
    columns: Any
    weights: Any


Tile = Noun  # what `Shared.tile` makes


class Shared:
    """Lays out the shared memory of a kernel that works on arrays of a dtype, with `threads` threads per block."""

    def __init__(self, dtype: str, threads: int):
        self.dtype, self.threads = dtype, threads
        self.count = 0  # numbers so far
        self._latest = 0  # where the latest of them begin

    @noun
    def tile(
        self, rows: int, width: int, multiple: int = 4, *, stages: int = 1, pad: int = PAD, over: Tile | None = None
    ) -> Members:
        """Allocate a tile of rows in shared memory; or `stages` such tiles, one after the other.

        Rows are padded with zeros to a multiple of `multiple`. over: use the memory of this tile, which must be the
        latest one. pad: numbers between rows, a multiple of four; 0 if conflicts are only possible within a row. Raises
        ValueError if `over` is not the latest tile.
        """
        if over is not None and over.at != self._latest:
            raise ValueError(f"a tile at {over.at} is not the latest, which is at {self._latest}")
        at = self.count if over is None else over.at
        filled = _align_up(_align_up(width, multiple), 4)
        row = filled + pad
        self._latest, self.count = at, max(self.count, at + stages * rows * row)

        @verb
        def place(r, c):
            """Return the index of number c of row r."""
            return at + r * row + c

        return members(
            locals(),
            at=at,  # index of the first number
            rows=rows,
            width=width,  # numbers of a row that belong to the array
            filled=filled,  # the same with the zeros after them
            row=row,  # numbers from a row to the next
            size=rows * row,  # numbers from a stage to the next
            # (smem, lines) -> 1 if this thread loaded a NaN or an infinity; by all threads of the block
            load=_load(self.dtype, self.threads, at, (rows, width, filled, row)),
        )

    def vector(self, count: int) -> int:
        """Allocate `count` numbers and return the index of the first."""
        self._latest = self.count
        self.count += _align_up(count, 4)
        return self._latest

    @property
    def nbytes(self) -> int:
        return self.count * storage(self.dtype).number.bitwidth // 8


def _align_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _load(dtype: str, threads: int, at: int, shape: tuple[int, int, int, int]) -> Callable[..., Any]:
    """Return a tile's verb `load`. shape: number of rows, their width, the width with zeros, and the row stride."""
    mem, num = storage(dtype), numbers(storage(dtype).number)
    rows, width, filled, row = shape
    count = rows * filled

    @verb
    def load(smem, lines):
        non_finite = i32(0)
        for index in range(cuda.threadIdx.x, count, threads):
            r, c = index // filled, index % filled
            value = num.zero
            if (r < lines.count) & (c < width):
                value = mem.load(lines.data, lines.first + r * lines.step + c)
            smem[at + r * row + c] = value
            non_finite |= i32(value * num.zero != num.zero)
        return non_finite

    return load
