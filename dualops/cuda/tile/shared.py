"""What lies where in a block's shared memory. The host lays tiles out; kernels ask them for places, rows and bytes.

    shared = Shared("bfloat16")                 numbers of float32 arithmetic
    q = shared.tile(BLOCK_Q, D)                 [BLOCK_Q, D]
    k = shared.tile(BLOCK_KV, D)
    v = shared.tile(BLOCK_KV, Dv, over=k)       takes turns with k
    shared.nbytes                               what the launch asks for

A kernel's dynamic shared memory is one array of numbers, `smem`; places count numbers. Rows lie a multiple of four
numbers and four more apart, so that lanes on neighbouring rows meet different banks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..backend import Namespace, cuda, i32, verb
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
    """The same, of which only so many columns are there; line r is to be multiplied by smem[weights + r]."""

    data: Any
    first: Any
    step: Any
    count: Any
    columns: Any
    weights: Any


class Tile(Namespace):
    """Rows of numbers in shared memory, or several such tiles one after the other."""

    at: int  # of the first number
    rows: int
    width: int  # numbers of a row that are of the array
    padded: int  # and with the zeros behind them
    row: int  # numbers from a row to the next
    size: int  # numbers of a tile
    place: Callable[..., Any]  # (row, column) -> where that number lies
    load: Callable[..., Any]  # (smem, lines) -> 1 if this thread met a NaN or an infinity; by all threads of the block


class Shared:
    """Lays out the shared memory of a kernel that works on arrays of a dtype, with `threads` threads a block."""

    def __init__(self, dtype: str, threads: int = 0):
        self.dtype, self.threads = dtype, threads
        self.count = 0  # numbers so far
        self._latest = 0

    def tile(self, rows: int, width: int, multiple: int = 4, *, stages: int = 1, over: Tile | None = None) -> Tile:
        """Room for a tile whose rows are filled with zeros to a multiple, `stages` times; or over the latest one.

        Raises ValueError for a place that something else lies behind already.
        """
        if over is not None and over.at != self._latest:
            raise ValueError(f"a tile at {over.at} is not the latest, which is at {self._latest}")
        padded = -(-width // multiple) * multiple
        row = -(-padded // 4) * 4 + PAD
        self._latest = self.count if over is None else over.at
        self.count = max(self.count, self._latest + stages * rows * row)
        load = _load(self.dtype, self.threads, self._latest, rows, width, row)
        at = self._latest

        @verb
        def place(r, c):
            return at + r * row + c

        return Tile(at=at, rows=rows, width=width, padded=padded, row=row, size=rows * row, place=place, load=load)

    def vector(self, count: int) -> int:
        """Room for so many numbers: where they begin."""
        self._latest = self.count
        self.count += count
        return self._latest

    @property
    def nbytes(self) -> int:
        return self.count * storage(self.dtype).number.bitwidth // 8


def _load(dtype: str, threads: int, at: int, rows: int, width: int, row: int) -> Callable[..., Any]:
    mem, num = storage(dtype), numbers(storage(dtype).number)
    AT, COUNT, WIDTH, ROW, LINE, THREADS = at, rows * (row - PAD), width, row, row - PAD, threads

    @verb
    def load(smem, lines):
        strange = i32(0)
        for place in range(cuda.threadIdx.x, COUNT, THREADS):
            r, c = place // LINE, place % LINE
            value = num.zero
            if (r < lines.count) & (c < WIDTH):
                value = mem.load(lines.data, lines.first + r * lines.step + c)
            smem[AT + r * ROW + c] = value
            strange |= i32(value * num.zero != num.zero)
        return strange

    return load
