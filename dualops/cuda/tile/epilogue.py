"""From a warpgroup's accumulators to memory, through shared memory: as boxes, or row by row.

    out = box_output("bfloat16", columns, at=0, width=128, others=1)
    out.store(smem, y_map, acc, Corner(m0, n0, (batch,)))         acc [64, columns], of every warpgroup its own
    out.finish()

Numbers are packed in pairs, put into boxes of shared memory by stmatrix, swizzled so that no two lanes of a store meet
a bank, and copied from there while the warpgroup goes on. `width` columns at a time: the place of a part is written
again when the copy before has read it. What has more to be done to it than rounding goes through shared memory as
floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..backend import Namespace, cuda, f32, i32, i64, u32, verb
from ..ptx.arithmetic import opaque_i32
from ..ptx.async_copy import cp_async_bulk_commit_group, cp_async_bulk_wait_group_read
from ..ptx.convert import pack_bf16x2, pack_f16x2
from ..ptx.fences import fence_proxy_async, fence_proxy_tensormap
from ..ptx.memory import st_shared_f32, st_shared_v2_f32
from ..ptx.stmatrix import stmatrix
from ..ptx.tma import cp_async_bulk_tensor_store
from ..ptx.warp import bar_sync
from .numbers import numbers
from .warpgroup import ROWS, my_warpgroup

NEAR = 8  # neighbours of a row that a thread takes
SPAN = 128  # bytes of a box's line, at most
PAIRS = {"bfloat16": pack_bf16x2, "float16": pack_f16x2}


class Output(Namespace):
    """How a warpgroup's tile gets to memory."""

    nbytes: int  # of shared memory, for each warpgroup
    begin: Callable[..., None]  # (tensor_map): before it is used; by all threads of the warpgroup
    store: Callable[..., None]  # (smem, tensor_map, acc, corner)
    finish: Callable[..., None]  # (): nothing of shared memory is read any more


def output_box(columns: int, itemsize: int = 2) -> tuple[int, int]:
    """Lines and elements of a line of the boxes in which a tile of so many columns is stored."""
    return ROWS, min(columns, SPAN // itemsize)


@cache
def box_output(dtype: str, columns: int, at: int, width: int, others: int) -> Output:
    """For results of `columns` columns a warpgroup, `width` of them at a time; its memory begins at byte `at`.

    others: axes of the result beside rows and columns. Raises ValueError for a width that is no whole number of boxes.
    """
    itemsize = 4 if dtype == "float32" else 2
    _, along = output_box(columns, itemsize)
    if columns % width or width % along or along % 16:
        raise ValueError(f"{columns} columns, {width} at a time, expected whole boxes of {along} columns")
    span, parts, boxes = itemsize * along, columns // width, width // along
    box_bytes, nbytes = ROWS * span, ROWS * width * itemsize
    copy, put = _copy_out(others), _put_pairs(along) if dtype == "float32" else _put_matrices(dtype, along)

    @verb
    def begin(tensor_map):
        if cuda.threadIdx.x % 128 == 0:
            fence_proxy_tensormap(tensor_map)

    @verb
    def store(smem, tensor_map, acc, corner):
        tid = cuda.threadIdx.x % 128
        group = my_warpgroup()
        mine = at + group * nbytes
        for part in range(parts):
            if tid == 0:
                cp_async_bulk_wait_group_read(0)
            bar_sync(1 + group, 128)
            for box in range(boxes):
                put(smem, mine + box * box_bytes, acc, (part * boxes + box) * along // 2)
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


def _put_matrices(dtype: str, along: int) -> Callable[..., None]:
    """(smem, at, acc, first): a box of 16-bit results, of accumulators from `first` on."""
    pair, store, span, steps = PAIRS[dtype], stmatrix(4), 2 * along, along // 16

    @verb
    def put(smem, at, acc, first):
        tid = cuda.threadIdx.x % 128
        line = i32((tid // 32 * 16 + tid % 16) * span)  # of the row that this lane brings the address of
        flip = line >> 3 & span - 16
        words = cuda.local.array(4, u32)
        for step in range(steps):
            for e in range(4):
                words[e] = pair(acc[first + 8 * step + 2 * e], acc[first + 8 * step + 2 * e + 1])
            place = (32 * step + tid % 32 // 16 * 16) ^ flip
            store(smem, i32(at + line + place), words, 0)

    return put


def _put_pairs(along: int) -> Callable[..., None]:
    """The same of float32: each lane the two neighbours that it has of each row."""
    span, eights = 4 * along, along // 8

    @verb
    def put(smem, at, acc, first):
        tid = cuda.threadIdx.x % 128
        line = i32((tid // 32 * 16 + tid % 32 // 4) * span)
        flip = line >> 3 & span - 16  # eight rows further on it is the same
        for j in range(eights):
            place = (32 * j + 8 * (tid % 4)) ^ flip
            for half in range(2):
                e = first + 4 * j + 2 * half
                st_shared_v2_f32(smem, i32(at + line + 8 * half * span + place), acc[e], acc[e + 1])

    return put


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


class RowOutput(Namespace):
    """The same accumulators as neighbours of a row, which a verb of the operator takes on from there."""

    store: Callable[..., None]  # (smem, acc, corner, M, results): smem is a shared array of f32


@cache
def row_output(columns: int, at: int, width: int, finish: Callable[..., None]) -> RowOutput:
    """For `columns` columns a warpgroup, `width` of them at a time; shared memory begins at byte `at`, 256 * width for
    each warpgroup. finish(values, results, m, n): NEAR numbers of row m, from column n on. Rows from M on are left out;
    columns beyond the result's are the verb's concern.
    """
    num, pairs = numbers(f32), width // 8
    parts, items, groups = columns // width, ROWS * width // NEAR // 128, width // NEAR
    flips, first_at, size = min(width // 4, 8) - 1, at // 4, ROWS * width

    @verb
    def place(row, column):
        """Where a number is: fours of a row change places so that neighbouring rows meet different banks."""
        return row * width + (column ^ (row & flips) * 4)

    @verb
    def store(smem, acc, corner, M, results):
        tid = cuda.threadIdx.x % 128
        group = my_warpgroup()
        mine = i32(first_at + group * size)
        row, column = i32(tid // 32 * 16 + tid % 32 // 4), i32(2 * (tid % 4))
        values = cuda.local.array(NEAR, f32)
        part = i32(0)
        while part < parts:
            bar_sync(1 + group, 128)  # the part before has been read
            for p in range(parts):  # of registers, each is known by its number
                if p == part:
                    for j in range(pairs):
                        for half in range(2):
                            for e in range(2):
                                to = place(row + 8 * half, column + 8 * j + e)
                                st_shared_f32(smem, i32(mine + to), acc[(p * pairs + j) * 4 + 2 * half + e])
            bar_sync(1 + group, 128)
            item = i32(0)
            while item < items:
                number = item * 128 + tid
                m, n = i32(number // groups), i32(number % groups * NEAR)
                for c in range(0, NEAR, 4):
                    num.load_four(values, c, smem, mine + place(m, n + c))
                if corner.row + m < M:
                    finish(values, results, i64(corner.row + m), i64(corner.depth + part * width + n))
                item = opaque_i32(item + 1)
            part = opaque_i32(part + 1)

    return RowOutput(store=store)
