"""Store a warpgroup's accumulators to global memory, through shared memory: as boxes, or row by row.

    boxes = box_output("bfloat16", columns, at=0, places=2, others=1)      acc [64, columns] of each warpgroup
    part = i32(0)
    while part < boxes.parts:
        boxes.acquire()
        boxes.take(values, acc, part) values [64, boxes.columns] may then be changed
        boxes.store(smem, y_map, values, Corner(m0, n0, (batch,)), part, part)
        part = boxes.next(part)

The warpgroup writes a part to a box in shared memory (16 bits packed in pairs, by stmatrix), swizzled to avoid bank
conflicts. TMA copies the box while the warpgroup continues. There are `places` boxes. Results that can't be stored as
boxes go through shared memory as floats (`row_output`), or as 16 bits if nothing is added to them (`line_output`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ..compiler.backend import Members, Noun, cuda, f32, i32, i64, kept_noun, members, u32, verb
from ..ptx.arithmetic import opaque_f32 as opaque_f32, opaque_i32, recomputed_i32
from ..ptx.async_copy import cp_async_bulk_commit_group, cp_async_bulk_wait_group_read, fence_proxy_async
from ..ptx.matrices import stmatrix
from ..ptx.memory import (
    ld_shared_v4_b32,
    st_global_kept_v4_b32 as st_global_kept_v4_b32,
    st_shared_f32,
    st_shared_v2_f32,
)
from ..ptx.tma import cp_async_bulk_tensor_store
from ..ptx.warp import bar_sync
from .numbers import numbers
from .softmax_rows import PAIRS
from .unrolled import local_array, one_after_another
from .warpgroup import ROWS, my_warpgroup

NEAR = 8  # neighbours of a row that a thread processes at once
SPAN = 128  # most bytes of a box's line


BoxOutput = Noun  # what `box_output` makes


def output_box(columns: int, itemsize: int = 2) -> tuple[int, int]:
    """Return the lines of a box and the elements of a line, for boxes that store a tile of `columns` columns."""
    return ROWS, min(columns, SPAN // itemsize)


@kept_noun
def box_output(
    dtype: str, columns: int, at: int, places: int, others: int, adjacent: int = 0, *, recompute: bool = False
) -> Members:
    """Store a warpgroup's tile to memory as boxes, one part of columns after the other.

    Results have `columns` columns per warpgroup, of 16 bits or float32. Shared memory begins at byte `at`.

    others: axes of the result in addition to rows and columns. A tile makes a multiple of `places` stores. `adjacent`:
    the number of warpgroups whose places with the same number are adjacent, as in boxes with the rows of all of them;
    0: all places of a warpgroup are adjacent. With `adjacent` only `store_all` stores. Then no thread acquires a place,
    and all stores before `finish` are one group of copies. `recompute`: for 16 bits, see `put_matrices`.

    Raises ValueError if columns are not a whole number of boxes.
    """
    itemsize = 4 if dtype == "float32" else 2
    _, along = output_box(columns, itemsize)
    if columns % along or along % 16:
        raise ValueError(f"{columns} columns, expected whole boxes of {along} columns")
    put_pairs = (
        partial(_put_pairs, along) if dtype == "float32" else partial(put_matrices, dtype, along, recompute=recompute)
    )
    put, copy = put_pairs(), _copy_out(others)
    span, parts, size = itemsize * along, columns // along, along // 2
    box_bytes, most_pending = ROWS * span, places - 1
    of_group, of_place = (1, adjacent) if adjacent else (places, 1)

    @verb
    def take(values, acc, part):
        """Copy a part of the accumulators into values."""
        for p in range(parts):  # of registers, each is known by its number
            if p == part:
                for e in range(size):
                    values[e] = opaque_f32(acc[p * size + e])  # else the compiler would compute all parts at once

    @verb
    def acquire():
        """Wait until a place is free and the warpgroup's writes to shared memory are visible."""
        if u32(cuda.threadIdx.x) % u32(128) == u32(0):
            cp_async_bulk_wait_group_read(most_pending)
        bar_sync(1 + my_warpgroup(), 128)

    @verb
    def store(smem, tensor_map, values, corner, part, number):
        """Store the values, through place number % places."""
        tid, group = i32(u32(cuda.threadIdx.x) % u32(128)), my_warpgroup()
        place = i32(at + (group * of_group + i32(u32(number) % u32(places)) * of_place) * box_bytes)
        put(smem, place, values)
        fence_proxy_async()
        bar_sync(1 + group, 128)
        if tid == 0:
            copy(tensor_map, i32(corner.depth + part * along), i32(corner.row), corner.others, smem, place)
            cp_async_bulk_commit_group()

    @verb
    def next(part):
        """Return part + 1. The compiler does not unroll a loop that counts like this."""
        return opaque_i32(part + 1)

    def put_part(part: int) -> Callable[..., None]:
        put_its = put_pairs(part * size)

        @verb
        def put_one(smem, place, acc, _):
            put_its(smem, i32(place + part * of_place * box_bytes), acc)

        return put_one

    put_all = one_after_another([put_part(part) for part in range(parts)])

    @verb
    def store_all(smem, tensor_map, acc, corner):
        """Store all parts unchanged, if each has a place; instead of the verbs above."""
        tid, group = i32(u32(cuda.threadIdx.x) % u32(128)), my_warpgroup()
        place = i32(at + group * of_group * box_bytes)
        if not adjacent:
            if tid == 0:
                cp_async_bulk_wait_group_read(0)
            bar_sync(1 + group, 128)
        put_all(smem, place, acc, 0)
        fence_proxy_async()
        bar_sync(1 + group, 128)
        if tid == 0:
            for part in range(parts):
                column = i32(corner.depth + part * along)
                copy(tensor_map, column, i32(corner.row), corner.others, smem, i32(place + part * of_place * box_bytes))
            if not adjacent:
                cp_async_bulk_commit_group()

    @verb
    def finish():
        """Wait until all stores have read shared memory."""
        if u32(cuda.threadIdx.x) % u32(128) == u32(0):
            if adjacent:
                cp_async_bulk_commit_group()
            cp_async_bulk_wait_group_read(0)

    return members(
        locals(),
        parts=parts,
        columns=along,  # per part
        size=size,  # a thread's numbers per part
        fragment=local_array(size, f32),  # () -> values, for a part
    )


def put_matrices(dtype: str, along: int, first: int = 0, *, recompute: bool = False) -> Callable[..., None]:
    """Return the verb (smem, at, values), which writes a part of 16-bit results to a box, from value `first` on.

    `recompute`: a thread recomputes its places each time, because it has no registers for them.
    """
    pair, put, span, steps = PAIRS[dtype], stmatrix(4), 2 * along, along // 16

    @verb
    def put_matrices(smem, at, values):
        tid = recomputed_i32(i32(u32(cuda.threadIdx.x) % u32(128))) if recompute else cuda.threadIdx.x % 128
        line = i32((tid // 32 * 16 + tid % 16) * span)  # the row whose address this lane passes
        flip = line >> 3 & span - 16
        words = cuda.local.array(4, u32)
        for step in range(steps):
            for e in range(4):
                words[e] = pair(values[first + 8 * step + 2 * e], values[first + 8 * step + 2 * e + 1])
            put(smem, i32(at + line + ((32 * step + tid % 32 // 16 * 16) ^ flip)), words, 0)

    return put_matrices


def _put_pairs(along: int, first: int = 0) -> Callable[..., None]:
    """Return the verb of `put_matrices` for float32: each lane writes its two neighbours of each row."""
    span, eights = 4 * along, along // 8

    @verb
    def put_pairs(smem, at, values):
        tid = cuda.threadIdx.x % 128
        line = i32((tid // 32 * 16 + tid % 32 // 4) * span)
        flip = line >> 3 & span - 16  # the same eight rows further down
        for j in range(eights):
            place = (32 * j + 8 * (tid % 4)) ^ flip
            for half in range(2):
                e = first + 4 * j + 2 * half
                st_shared_v2_f32(smem, i32(at + line + 8 * half * span + place), values[e], values[e + 1])

    return put_pairs


def _copy_out(others: int) -> Callable[..., None]:
    """Return the verb (tensor_map, c0, c1, others, smem, at), which starts to store a box."""
    copy = cp_async_bulk_tensor_store(2 + others)

    @verb
    def one(tensor_map, c0, c1, others, smem, at):
        copy(tensor_map, c0, c1, others[0], smem, at)

    @verb
    def two(tensor_map, c0, c1, others, smem, at):
        copy(tensor_map, c0, c1, others[0], others[1], smem, at)

    return {1: one, 2: two}[others]


@cache
def place_of(width: int) -> Callable[..., Any]:
    """Return the verb (row, column) -> place of a float of a tile of this width in shared memory.

    Groups of four of a row are permuted so that neighbouring rows are in different banks.
    """
    flips = min(width // 4, 8) - 1

    @verb
    def place(row, column):
        return row * width + (column ^ (row & flips) * 4)

    return place


@kept_noun
def row_output(columns: int, at: int, width: int, finish: Callable[..., None]) -> Members:
    """The verbs that give each thread neighbours of a row of the accumulators, and pass them to a verb of the operator.

    They handle `columns` columns per warpgroup, `width` at a time. Shared memory begins at byte `at`, 256 * width bytes
    for each warpgroup. finish(values, results, m, n) is called with NEAR numbers of row m, from column n on, for rows
    below M. It must skip columns outside of the result.
    """
    num, pairs, place = numbers(f32), width // 8, place_of(width)
    parts, items, groups = columns // width, ROWS * width // NEAR // 128, width // NEAR
    first_at, size = at // 4, ROWS * width

    @verb
    def store(smem, acc, corner, M, results):
        """Store the accumulators by `finish`. smem: a shared array of f32."""
        tid = cuda.threadIdx.x % 128
        group = my_warpgroup()
        mine = i32(first_at + group * size)
        row, column = i32(tid // 32 * 16 + tid % 32 // 4), i32(2 * (tid % 4))
        values = cuda.local.array(NEAR, f32)
        part = i32(0)
        while part < parts:
            bar_sync(1 + group, 128)  # all threads have read the previous part
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

    return locals()


@kept_noun
def line_output(dtype: str, columns: int, at: int, finish: Callable[..., None], adjacent: int = 0) -> Members:
    """The verbs that round accumulators to 16 bits, in words of NEAR neighbours of a row, four words of 16 bytes.

    They handle `columns` columns per warpgroup, whole boxes. Shared memory begins at byte `at`, 128 * columns bytes for
    each warpgroup. Boxes have the layout of `box_output` with `adjacent`; then the caller makes sure that the previous
    tile has been read. finish(words, results, m, n) is called for row m, from column n on, for rows below M.
    """
    boxes = box_output(dtype, columns, at, columns * 2 // SPAN, 1)
    put, box_bytes = put_matrices(dtype, boxes.columns), ROWS * SPAN
    group_bytes, step_bytes = (box_bytes, adjacent * box_bytes) if adjacent else (ROWS * 2 * columns, box_bytes)
    parts, groups, of_box = boxes.parts, columns // NEAR, boxes.columns // NEAR
    items = ROWS * groups // 128

    @verb
    def store(smem, acc, first, M, results):
        """Store rows from `first` on."""
        tid, group = i32(u32(cuda.threadIdx.x) % u32(128)), my_warpgroup()
        mine = i32(at + group * group_bytes)
        values = boxes.fragment()
        if not adjacent:
            bar_sync(1 + group, 128)  # all threads have read the previous tile
        part = i32(0)
        while part < parts:
            boxes.take(values, acc, part)
            put(smem, i32(mine + part * step_bytes), values)
            part = boxes.next(part)
        bar_sync(1 + group, 128)
        item = i32(0)
        while item < items:
            number = item * 128 + tid
            m, near = i32(number // groups), i32(number % groups)
            place = mine + near // of_box * step_bytes + m * SPAN + ((near % of_box ^ m & 7) << 4)
            words = ld_shared_v4_b32(smem, i32(place))
            if first + m < M:
                finish(words, results, i64(first + m), i32(near * NEAR))
            item = opaque_i32(item + 1)

    @verb
    def leave():
        """Let copies overwrite memory that my warp wrote and read, after its lanes have synchronized."""
        fence_proxy_async()

    return locals()
