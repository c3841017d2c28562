"""From a warpgroup's accumulators to memory: through shared memory as boxes, or element by element.

    out = box_output("bfloat16", columns, at=0, width=128, others=1)
    out.store(smem, y_map, acc, Corner(m0, n0, (batch,)))         acc [64, columns], of every warpgroup its own
    out.finish()

Numbers are packed in pairs, put into boxes of shared memory by stmatrix, swizzled so that no two lanes of a store meet a
bank, and copied from there while the warpgroup goes on. `width` columns at a time: the place of a part is written again
when the copy before has read it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, i32, i64, u32, verb
from ..ptx.async_copy import cp_async_bulk_commit_group, cp_async_bulk_wait_group_read
from ..ptx.convert import pack_bf16x2, pack_f16x2
from ..ptx.fences import fence_proxy_async, fence_proxy_tensormap
from ..ptx.stmatrix import stmatrix
from ..ptx.tma import cp_async_bulk_tensor_store
from ..ptx.warp import bar_sync
from .storage import storage
from .warpgroup import ROWS, my_warpgroup

SPAN = 128  # bytes of a box's line, at most
PAIRS = {"bfloat16": pack_bf16x2, "float16": pack_f16x2}


class Output(Namespace):
    """How a warpgroup's tile gets to memory."""

    nbytes: int  # of shared memory, for each warpgroup
    begin: Callable[..., None]  # (tensor_map): before it is used; by all threads of the warpgroup
    store: Callable[..., None]  # (smem, tensor_map, acc, corner)
    finish: Callable[..., None]  # (): nothing of shared memory is read any more


def output_box(columns: int) -> tuple[int, int]:
    """Lines and elements of a line of the boxes in which a tile of so many columns of 16 bits is stored."""
    return ROWS, min(columns, SPAN // 2)


@cache
def box_output(dtype: str, columns: int, at: int, width: int, others: int) -> Output:
    """For 16-bit results of `columns` columns a warpgroup, `width` of them at a time; shared memory begins at byte `at`.

    others: axes of the result beside rows and columns. Raises ValueError for a width that is no whole number of boxes.
    """
    _, along = output_box(columns)
    if columns % width or width % along or along % 16:
        raise ValueError(f"{columns} columns, {width} at a time, expected whole boxes of {along} columns")
    pair, put = PAIRS[dtype], stmatrix(4)
    span, parts, boxes, steps = 2 * along, columns // width, width // along, along // 16
    box_bytes, nbytes = ROWS * span, ROWS * width * 2
    copy = _copy_out(others)

    @verb
    def begin(tensor_map):
        if cuda.threadIdx.x % 128 == 0:
            fence_proxy_tensormap(tensor_map)

    @verb
    def store(smem, tensor_map, acc, corner):
        tid = cuda.threadIdx.x % 128
        group = my_warpgroup()
        mine = at + group * nbytes
        line = i32((tid // 32 * 16 + tid % 16) * span)  # of the row that this lane brings the address of
        flip = line >> 3 & span - 16
        words = cuda.local.array(4, u32)
        for part in range(parts):
            if tid == 0:
                cp_async_bulk_wait_group_read(0)
            bar_sync(1 + group, 128)
            for box in range(boxes):
                for step in range(steps):
                    for e in range(4):
                        first = ((part * boxes + box) * steps + step) * 8 + 2 * e
                        words[e] = pair(acc[first], acc[first + 1])
                    place = (32 * step + tid % 32 // 16 * 16) ^ flip
                    put(smem, i32(mine + box * box_bytes + line + place), words, 0)
            fence_proxy_async()
            bar_sync(1 + group, 128)
            if tid == 0:
                for box in range(boxes):
                    column = corner.depth + (part * boxes + box) * along
                    copy(tensor_map, i32(column), i32(corner.row), corner.others, smem, i32(mine + box * box_bytes))
                cp_async_bulk_commit_group()

    @verb
    def finish():
        if cuda.threadIdx.x % 128 == 0:
            cp_async_bulk_wait_group_read(0)

    return Output(nbytes=nbytes, begin=begin, store=store, finish=finish)


def _copy_out(others: int) -> Callable[..., None]:
    """(tensor_map, c0, c1, others, smem, at): start to store a box."""
    copy = cp_async_bulk_tensor_store(2 + others)

    @verb
    def one(tensor_map, c0, c1, others, smem, at):
        copy(tensor_map, c0, c1, others[0], smem, at)

    @verb
    def two(tensor_map, c0, c1, others, smem, at):
        copy(tensor_map, c0, c1, others[0], others[1], smem, at)

    return {1: one, 2: two}[others]


class Places(Namespace):
    """The same accumulators one by one, in an array of any strides."""

    store: Callable[..., None]  # (data, strides, acc, corner, M, N): strides of rows, columns, and two other axes
    row: Callable[..., Any]  # () -> the first of this thread's rows of its warpgroup's tile; the other is 8 further
    column: Callable[..., Any]  # (j) -> the first of two columns, of block j of 8


@cache
def places(dtype: str, columns: int) -> Places:
    """For a tile of 64 rows."""
    mem, blocks = storage(dtype), columns // 8

    @verb
    def row():
        tid = cuda.threadIdx.x % 128
        return i32(tid // 32 * 16 + tid % 32 // 4)

    @verb
    def column(j):
        return i32(8 * j + 2 * (cuda.threadIdx.x % 4))

    @verb
    def store(data, strides, acc, corner, M, N):
        at = i64(0)
        for axis in range(len(corner.others)):
            at += corner.others[axis] * strides[2 + axis]
        for half in range(2):
            m = corner.row + row() + 8 * half
            if m < M:
                start = at + m * strides[0]
                for j in range(blocks):
                    for e in range(2):
                        n = corner.depth + column(j) + e
                        if n < N:
                            mem.store(data, start + n * strides[1], acc[4 * j + 2 * half + e])

    return Places(store=store, row=row, column=column)
