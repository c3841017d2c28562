"""block_mask: which tiles of keys a mask_mod shows to a tile of queries. Dong et al. 2024, arXiv:2412.05496.

    states, a warp a tile                             lists, a thread a tile of queries
    1  ask about all pairs of TILE queries and keys   3  for each tile of keys that is not empty, in order:
    2  none, some or all of them are seen                append 2 * tile + whether all are seen; then the count

A state is written where the tile's place would be if all were listed, so that nothing grows with Sq * Sk but the
lists, 4 bytes for TILE * TILE pairs. What was not yet read is never overwritten: of so many states so many at most are
listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ...spec import ArrayMeta, Problem
from ...spec.attention import SPEC_BLOCKS as SPEC, BlockMask, UserFunction, as_they_are
from ...spec.attention.blocks import EMPTY, FULL, MIXED, TILE, kept, sizes_of
from ..compiler.backend import SIMULATED, Kernel, builds, cuda, f32, i32, i64, kernel
from ..launch.arrays import adapter_of, cdiv
from ..launch.device import Device
from ..launch.operation import Operation
from ..launch.plans import Choice, stream_of
from ..launch.step import Step
from ..launch.views import strided, whole
from ..tile.rows import lane_reductions
from ..user_functions import typed

THREADS = 256
WARPS = THREADS // 32
LISTS_TYPE = strided("int32", 4)


def block_mask(
    mask_mod: Any, B: int | None, H: int | None, Sq: int, Sk: int, *, like: Any, stream: Any = None
) -> BlockMask:
    """Which tiles of 128 x 128 (query, key) a mask_mod hides, cuts and shows; Dong et al. 2024, arXiv:2412.05496.

    mask_mod: (b, h, i, j) -> whether query i sees key j, as `flash_attention` takes it. B, H: batches and heads that
    it tells apart; None or 1 where it is the same for all of them, which are then asked about as number 0. Sq, Sk:
    queries and keys. like: an array (q), of whose library and on whose device the mask is wanted; only that is looked
    at. stream: as for `flash_attention`; those who use the mask on another stream wait for this one.
    Returns a BlockMask, which `flash_attention` takes beside the function: its `lists` [B, H, tiles of queries,
    1 + tiles of keys] of int32 say how many tiles of keys are to be visited, and which. Memory is 4 bytes for each tile
    of pairs, and nothing beside. It is made once: a call with a function that does the same, the same sizes, device and
    stream returns the same object, as long as somebody has it.
    Raises TypeError and ValueError for a wrong call.
    """
    _, mask_mod = as_they_are(None, mask_mod)
    sizes = sizes_of(B, H, Sq, Sk)
    adapter = adapter_of(like, SPEC.name, "like")
    handle = adapter.stream((like,)) if stream is None and not SIMULATED else stream_of(SPEC.name, stream or 0)
    place = (type(adapter), adapter.meta(like).device, handle)
    return kept(mask_mod, sizes, place, lambda: forward((like,), (mask_mod, *sizes), None, None, stream))


@builds
def build_states(mask_mod: UserFunction) -> Kernel:
    """block_mask_states(lists, tiles, H, Sq, Sk, q_tiles, kv_tiles): the states of so many tiles."""
    sees, lanes = typed(mask_mod, f32), lane_reductions(f32, 32)

    @kernel(LISTS_TYPE, i64, *[i64] * 5, threads=THREADS)
    def block_mask_states(lists, tiles, H, Sq, Sk, q_tiles, kv_tiles):
        lane, number = i64(cuda.threadIdx.x % 32), i64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
        if number < tiles:
            n, row = number % kv_tiles, number // kv_tiles
            m, head = row % q_tiles, row // q_tiles
            b, h = head // H, head % H
            rows, columns = min(Sq - m * TILE, TILE), min(Sk - n * TILE, TILE)
            seen = i32(0)
            for pair in range(lane, rows * columns, 32):
                if sees(b, h, m * TILE + pair // columns, n * TILE + pair % columns):
                    seen += i32(1)
            total = i32(lanes.sum(f32(seen)))  # up to TILE * TILE, which float32 counts
            if lane == 0:
                state = i32(EMPTY if total == 0 else FULL if total == rows * columns else MIXED)
                steps = lists.strides
                lists.data[b * steps[0] + h * steps[1] + m * steps[2] + (n + 1) * steps[3]] = state

    return block_mask_states


@builds
def build_lists() -> Kernel:
    """block_mask_lists(lists, rows, H, q_tiles, kv_tiles): the lists of so many tiles of queries, from their states."""

    @kernel(LISTS_TYPE, i64, *[i64] * 3, threads=THREADS)
    def block_mask_lists(lists, rows, H, q_tiles, kv_tiles):
        row = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if row < rows:
            m, head, steps = row % q_tiles, row // q_tiles, lists.strides
            start = head // H * steps[0] + head % H * steps[1] + m * steps[2]
            count = i64(0)
            for n in range(kv_tiles):
                state = lists.data[start + (n + 1) * steps[3]]
                if state != EMPTY:
                    count += 1
                    lists.data[start + count * steps[3]] = i32(2 * n + (state == FULL))
            lists.data[start] = i32(count)
            for n in range(count, kv_tiles):
                lists.data[start + (n + 1) * steps[3]] = i32(0)

    return block_mask_lists


def _choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    yield Choice("simt", None, "a warp a tile", partial(_steps, problem, results))


def _steps(problem: Problem, results: Mapping[str, ArrayMeta]) -> list[Step]:
    p, lists, rows = problem, whole(results, "lists", 4), problem.B * problem.H * problem.q_tiles
    steps = [Step(build_lists(), (cdiv(rows, THREADS),), (lists, rows, p.H, p.q_tiles, p.kv_tiles))]
    if p.kv_tiles:
        tiles = rows * p.kv_tiles
        args = (lists, tiles, p.H, p.Sq, p.Sk, p.q_tiles, p.kv_tiles)
        steps.insert(0, Step(build_states(p.mask_mod), (cdiv(tiles, WARPS),), args))
    return steps


forward = Operation(SPEC, rungs=(_choices,))
