"""How attention's sm90 rung stores o and lse: o through its own place in shared memory. Results of splits, and o in
float32, go from registers to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...compiler.backend import Members, Namespace, cuda, f32, i32, i64, members, noun, types, u16, u32, verb
from ...launch.views import start
from ...tile.boxes import Corner
from ...tile.epilogue import NEAR, box_output, line_output, st_global_kept_v4_b32
from ...tile.numbers import numbers
from ...tile.unrolled import nothing
from ..arguments import Variant, array_type, statistic_type
from ..fragment_scores import LANES, my_row, store_lse
from ..nan_repair import nan_repair, nan_repair_keys
from ..options import chain_of
from ..score_gradients import rows_of_queries
from ..tile_scheduler import ROWS_OF_A_HEAD, key_rows_of
from .arguments import OutputTo, map_type
from .config import BOX, Sm90Config, padded
from .loads import KvLoads
from .split_kv import PARTS_TYPE, part_start, serial_of
from .visible_tiles import Queries

_nothing = nothing(0)
STORED = ("boxes", "vectors", "elements")  # how o gets to memory: the first that its layout allows


class Output(Namespace):
    """The verbs, by all consumer warpgroups."""

    # (smem, o_map, o, acc, task, row, column): stores acc [64, a slice of Dv], which begins at this row and column
    store: Callable[..., None]
    # (lse, task, row, value, rest): for one row, by one of the lanes that share it. rest: what rounding took from value
    store_lse: Callable[..., None]
    free: Callable[..., None]  # (): after the lanes synchronize, copies may overwrite o in Q's place
    finish: Callable[..., None]  # (): nothing of shared memory is read any more


class ItemRows(NamedTuple):
    """The rows of a warpgroup in a work item."""

    task: Any
    row: Any  # its first
    column: Any  # the first of V's


@noun
def results_of(config: Sm90Config, variant: Variant, load: KvLoads, with_lse: bool, stored: str) -> Members:
    """The verbs of forward's results. stored: one of STORED, unless keys are split."""
    chain, queries = chain_of(variant.having, variant.dtype), load.queries
    output, serial = output_of(config, variant, queries, stored), serial_of(config, variant, chain, queries, with_lse)
    size = config.columns(variant.Dv) // 2
    nan_rows = nan_repair(chain, variant, queries, load.visits.keys, size, passes=variant.varlen)
    STORES_LSE, SERIAL = with_lse and not config.serial, config.serial
    arrays = [PARTS_TYPE] * 2 if config.split and not SERIAL else [array_type(variant), statistic_type(variant)]

    @verb
    def store(smem, to, acc, rows, found, x, work):
        """Store o and lse of `ItemRows`. found: `FoundLse`."""
        task, row, column = rows
        if STORES_LSE and column == 0:
            output.store_lse(to.lse, task, i32(row + my_row()), found.lse[0], found.rest[0])
            output.store_lse(to.lse, task, i32(row + my_row() + 8), found.lse[1], found.rest[1])
        nan_rows.repair(acc, found.lse, x, task, row, column, work)
        if SERIAL:
            serial.add(to, acc, found, task, row, column, work.options)
        else:
            output.store(smem, to.o_map, to.o, acc, task, row, column)

    return members(
        locals(),
        to_type=types.NamedTuple((map_type(stored), *arrays, serial.kept_type), OutputTo),
        free=output.free if config.o_over_q else _nothing,  # (): after the lanes synchronize, Q may be loaded over o
        finish=_nothing if config.o_over_q else output.finish,  # (): nothing of shared memory is read any more
    )


@noun
def dq_results(
    variant: Variant, keys: Callable[..., Any], size: int, at: int = 0, stored: str = "", over: int = 0
) -> Members:
    """The verbs of dq, for `size` accumulators of a thread. keys: as in `nan_repair`. at, over: as in `rows_output`.
    stored: how dq gets to memory; "" from registers.
    """
    rows, D = rows_of_queries(size), padded(variant.D)
    output = rows_output(stored, variant.dtype, variant.D, D, at, over)
    chain = chain_of(variant.having, variant.dtype, gradient=True)
    nan_rows = nan_repair(chain, variant, ROWS_OF_A_HEAD, keys, size, passes=variant.varlen, gradient=True)

    @verb
    def store(smem, to, acc, task, row, x, work):
        """Store the rows of a warpgroup, from `row` on."""
        lse = rows.pair()
        rows.read(lse, x.lse, task, row)
        nan_rows.repair(acc, (lse[0], lse[1]), x, task, row, i32(0), work)
        rows.scale(acc, work.scale, lse)
        output.store(smem, to.dq_map, to.dq, acc, task, row, i32(0))

    return members(locals(), free=output.free, finish=output.finish)


@noun
def results_of_keys(
    variant: Variant, sizes: tuple[int, int], at: tuple[int, int], stored: tuple[str, str], over: int
) -> Members:
    """The verbs of dk and dv, whose accumulators have these sizes, 0 if they are another warpgroup's.

    at: bytes of shared memory where K and V begin, which they overwrite, each of `over` warpgroups its own rows.
    stored: how they get to memory; "" from registers.
    """
    (DK_SIZE, DV_SIZE), widths, num = sizes, (variant.D, variant.Dv), numbers(f32)
    dk_output, dv_output = (
        rows_output(how, variant.dtype, width, padded(width), place, over)
        for how, width, place in zip(stored, widths, at)
    )
    last = dv_output if DV_SIZE and (not DK_SIZE or stored[1] == "boxes") else dk_output  # copies form one group
    chain = chain_of(variant.having, variant.dtype, gradient=True)
    nan_rows = nan_repair_keys(chain, variant, DK_SIZE, DV_SIZE)

    @verb
    def clear(dk_acc, dv_acc):
        """Make both zeros."""
        for e in range(DK_SIZE):
            dk_acc[e] = num.zero
        for e in range(DV_SIZE):
            dv_acc[e] = num.zero

    @verb
    def store(smem, to, accs, task, row, x, work):
        """Store rows of a `KeysTask`, dk after scaling. accs: of dk and dv. row: the warpgroup's first."""
        dk_acc, dv_acc = accs
        nan_rows.repair(dk_acc, dv_acc, x, task, row, work)
        for e in range(DK_SIZE):
            dk_acc[e] *= work.scale
        rows = key_rows_of(task)
        if DK_SIZE:
            dk_output.store(smem, to.dk_map, to.dk, dk_acc, rows, row, i32(0))
        if DV_SIZE:
            dv_output.store(smem, to.dv_map, to.dv, dv_acc, rows, row, i32(0))
        last.finish()

    return locals()


class Head(NamedTuple):
    """The array, batch, head and slice whose rows are stored."""

    o: Any
    b: Any
    h: Any
    column: Any  # the first of the slice


def output_of(config: Sm90Config, variant: Variant, queries: Queries, stored: str) -> Output:
    """The verbs of forward's kernel. stored: one of STORED, unless keys are split."""
    Dv = config.columns(variant.Dv)
    if config.split:
        return _parts(variant, queries, Dv)
    at, stored = config.tiles(padded(variant.D), variant.Dv).o_at, "" if config.thirds else stored
    return rows_output(stored, variant.dtype, variant.Dv, Dv, at, config.consumers if config.o_over_q else 0)


def rows_output(stored: str, dtype: str, width: int, columns: int, at: int, over_q: int) -> Output:
    """The verbs for results with rows of this width; acc has `columns`, whole boxes. Their place in shared memory
    begins at byte `at`.

    stored: one of STORED; "" for float32, from registers. over_q: if the place is Q's, each warpgroup over its own
    rows, the number of warpgroups; otherwise 0.
    """
    if not stored:
        return _from_registers(width, columns)
    if stored == "boxes":
        return _boxes(dtype, columns, at, over_q)
    return _rows(dtype, width, columns, at, over_q, stored == "vectors")


def _boxes(dtype: str, columns: int, at: int, over_q: int) -> Output:
    boxes = box_output(dtype, columns, at, columns // BOX, 2, over_q)

    @verb
    def store(smem, o_map, o, acc, task, row, column):
        boxes.store_all(smem, o_map, acc, Corner(i32(task.m0 + row), column, (task.h, task.b)))

    return Output(store=store, store_lse=_store_whole, free=boxes.finish, finish=boxes.finish)


@verb
def _store_whole(lse, task, row, value, rest):
    store_lse(lse, task, row, value)


def _rows(dtype: str, width: int, columns: int, at: int, over_q: int, vectors: bool) -> Output:
    @verb
    def finish(words, head, m, n):
        n = n + head.column
        place = start(head.o, head.b, head.h, m) + n
        if vectors:
            st_global_kept_v4_b32(head.o.data, place, i32(n < width), words[0], words[1], words[2], words[3])
        else:
            for c in range(NEAR):
                if n + c < width:
                    head.o.data[place + c] = u16(words[c // 2] >> u32(16 * (c % 2)))

    lines = line_output(dtype, columns, at, finish, over_q)

    @verb
    def store(smem, o_map, o, acc, task, row, column):
        first = task.q_first + i64(task.m0 + row)
        lines.store(smem, acc, first, task.q_first + task.Sq, Head(o, task.b, task.h, column))

    return Output(store=store, store_lse=_store_whole, free=lines.leave, finish=_nothing)


def _parts(variant: Variant, queries: Queries, Dv: int) -> Output:
    put = _row_from_registers(variant.Dv, Dv)

    @verb
    def store(smem, o_map, o, acc, task, row, column):
        for h in range(2):
            mine = i32(row + my_row() + 8 * h)
            if queries.there(task, mine):
                token = task.q_first + queries.query(task, mine)
                put(o, part_start(o, task.split, task.b, queries.head(task, mine), token), acc, h, column)

    @verb
    def store_part(lse, task, row, value, rest):
        if queries.there(task, row) and cuda.threadIdx.x % LANES == 0:
            token = task.q_first + queries.query(task, row)
            at = part_start(lse, task.split, task.b, queries.head(task, row), token)
            lse.data[at], lse.data[at + 1] = value, rest

    return Output(store=store, store_lse=store_part, free=_nothing, finish=_nothing)


def _from_registers(width: int, columns: int) -> Output:
    """The verbs for results in float32 with rows of this width; acc has `columns`. Four lanes fill 32 bytes of
    a row.
    """
    put = _row_from_registers(width, columns)

    @verb
    def store(smem, o_map, o, acc, task, row, column):
        for h in range(2):
            m = i32(task.m0 + row + my_row() + 8 * h)
            if m < task.Sq:
                put(o, start(o, task.b, task.h, task.q_first + m), acc, h, column)

    return Output(store=store, store_lse=_store_whole, free=_nothing, finish=_nothing)


def _row_from_registers(width: int, columns: int) -> Callable[..., None]:
    """Return the verb (o, at, acc, h, column) that stores my numbers of the upper or lower row, which begins
    at `at`.
    """
    QUADS = columns // 8

    @verb
    def put(o, at, acc, h, column):
        near = i32(2 * (cuda.threadIdx.x % LANES))
        for j in range(QUADS):
            for e in range(2):
                if column + (8 * j + near + e) < width:
                    o.data[at + column + near + (8 * j + e)] = acc[4 * j + 2 * h + e]

    return put
