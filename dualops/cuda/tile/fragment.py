"""Fragment ownership: the row and column of each matrix element that a thread holds in registers.

Plain integer arithmetic, for masks, epilogues, pictures and kernels. Elements are numbered in the order in which a
thread holds them. Two elements of 16 bits share a register: element e is in register e // 2, in the lower half if e is
even.
The layouts are those of the PTX ISA 9.0, sections 9.7.14.5.7 and 9.7.14.5.8 (mma), and 9.7.15.5.1 (wgmma).
"""

from __future__ import annotations


def accumulator(thread: int, element: int) -> tuple[int, int]:
    """Return (row, column) in C and D, float32: [16, 8 * n] of n products m16n8 along N, four elements each, in a warp.

    For a warpgroup's product m64nN, 128 threads have [64, N].
    """
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (element // 2 % 2)
    return row, 8 * (element // 4) + 2 * (thread % 4) + element % 2


def left_16bit(lane: int, element: int) -> tuple[int, int]:
    """Return (row, column) in a 16-bit A [16, 16 * n], for n products m16n8k16 along K, eight elements each."""
    row = lane // 4 + 8 * (element // 2 % 2)
    return row, 8 * (element // 4) + 2 * (lane % 4) + element % 2


def right_16bit(lane: int, element: int) -> tuple[int, int]:
    """Return (row, column) in a 16-bit B [16 * n, 8], for n products m16n8k16 along K, four elements each."""
    return 8 * (element // 2) + 2 * (lane % 4) + element % 2, lane // 4


def left_tf32(lane: int, element: int) -> tuple[int, int]:
    """Return (row, column) in a tf32 A [16, 8 * n], for n products m16n8k8 along K, four elements each."""
    return lane // 4 + 8 * (element % 2), 4 * (element // 2) + lane % 4


def right_tf32(lane: int, element: int) -> tuple[int, int]:
    """Return (row, column) in a tf32 B [8 * n, 8], for n products m16n8k8 along K, two elements each."""
    return 4 * element + lane % 4, lane // 4
