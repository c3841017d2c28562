"""Layout of a block's shared memory. The host lays out tiles; kernels get places from them and fill them.

    shared = Shared("bfloat16", threads)        numbers of float32 arithmetic
    q = shared.tile(BLOCK_Q, D)                 [BLOCK_Q, D]
    k = shared.tile(BLOCK_KV, D)
    v = shared.tile(BLOCK_KV, Dv, over=k)       takes turns with k
    shared.nbytes                               bytes that the launch requests

A kernel's dynamic shared memory is one array of numbers, `smem`; places are indices of it. Everything begins at a
multiple of four numbers, which are loaded at once. Rows are a multiple of four long and `PAD` apart, so that lanes on
neighbouring rows meet different banks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..compiler.backend import Members, Noun, cuda, i32, members, noun, verb
from .numbers import numbers
from .storage import storage

PAD = 4  # numbers between rows


class Lines(NamedTuple):
    """Rows of an array in global memory: line r begins at data[first + r * step], and there are `count`."""

    data: Any
    first: Any
    step: Any
    count: Any


class Part(NamedTuple):
    """`Lines` of which only `columns` columns exist. Line r may have to be multiplied by smem[weights + r]."""

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
        """Rows of numbers in shared memory; or several such tiles, stages, one after the other.

        Makes room for a tile whose rows are filled with zeros to a multiple, `stages` times; or over the latest one.
        pad: numbers between rows, a multiple of four; 0 where lanes meet within a row alone. Raises ValueError for a
        place that something else lies behind already.
        """
        if over is not None and over.at != self._latest:
            raise ValueError(f"a tile at {over.at} is not the latest, which is at {self._latest}")
        at = self.count if over is None else over.at
        filled = _align_up(_align_up(width, multiple), 4)
        row = filled + pad
        self._latest, self.count = at, max(self.count, at + stages * rows * row)

        @verb
        def place(r, c):
            """Return where number c of row r lies."""
            return at + r * row + c

        return members(
            locals(),
            at=at,  # where it begins
            rows=rows,
            width=width,  # numbers of a row that are of the array
            filled=filled,  # and with the zeros behind them
            row=row,  # numbers from a row to the next
            size=rows * row,  # numbers from a stage to the next
            # (smem, lines) -> 1 if this thread met a NaN or an infinity; by all threads of the block
            load=_load(self.dtype, self.threads, at, (rows, width, filled, row)),
        )

    def vector(self, count: int) -> int:
        """Reserve room for `count` numbers and return where they begin."""
        self._latest = self.count
        self.count += _align_up(count, 4)
        return self._latest

    @property
    def nbytes(self) -> int:
        return self.count * storage(self.dtype).number.bitwidth // 8


def _align_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _load(dtype: str, threads: int, at: int, shape: tuple[int, int, int, int]) -> Callable[..., Any]:
    """A tile's `load`. shape: its rows, their width, how far they are filled, and from one to the next."""
    mem, num = storage(dtype), numbers(storage(dtype).number)
    rows, width, filled, row = shape
    count = rows * filled

    @verb
    def load(smem, lines):
        strange = i32(0)
        for index in range(cuda.threadIdx.x, count, threads):
            r, c = index // filled, index % filled
            value = num.zero
            if (r < lines.count) & (c < width):
                value = mem.load(lines.data, lines.first + r * lines.step + c)
            smem[at + r * row + c] = value
            strange |= i32(value * num.zero != num.zero)
        return strange

    return load
