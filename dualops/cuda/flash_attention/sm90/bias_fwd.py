"""The bias's tiles beside K's and V's, in the forward and dq's kernel: [64, BLOCK_KV], of each warpgroup its own.

A warpgroup that has read its tile gives it back at once, whatever the others do, so that the next one has nearly a
whole round to come: one stage is enough. Filling i * consumers + w is of tile i, for warpgroup w.

Without a bias in boxes the verbs do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import Namespace, cuda, i32, tensor_map, types, u32, verb
from ...tile.boxes import prefetch_maps
from ...tile.pipeline import pipeline
from ...tile.products import anew_i32
from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from ..arguments import Variant
from ..bias_tiles import BiasPlace, bias_tile

WARPS = 4  # of a warpgroup


class BiasStages(Namespace):
    """The verbs. maps: the argument that has the bias's, where there is one."""

    maps_type: Any
    word: Callable[..., Any] | None  # as `fragment_scores` takes it
    barriers: Callable[..., Any]  # (): the shared arrays; once in a kernel, by all threads
    init: Callable[..., None]  # (barriers): by one thread, before a pipeline's `start`
    prefetch: Callable[..., None]  # (maps): by all threads
    bring: Callable[..., None]  # (smem, maps, barriers, options, task, n0, i): of all warpgroups, by one thread
    words: Callable[..., Any]  # () -> a local array for what is read; once in a kernel
    # (smem, barriers, words, i, warpgroup) -> what scores are changed by, once my tile is there
    wait: Callable[..., Any]
    release: Callable[..., None]  # (barriers, i, warpgroup): once they are


def bias_stages(variant: Variant, operand: Operand, at: int, stages: int, consumers: int) -> BiasStages:
    """For a kernel whose first stage begins at byte `at`; of no stages where there is no bias in boxes."""
    return _stages(variant, operand, at, stages, consumers) if stages else _nothing()


def _nothing() -> BiasStages:
    @verb
    def barriers():
        return i32(0)

    @verb
    def init(barriers):
        pass

    @verb
    def bring(smem, maps, barriers, options, task, n0, i):
        pass

    @verb
    def words():
        return cuda.local.array(1, u32)

    @verb
    def wait(smem, barriers, words, i, warpgroup):
        return words

    @verb
    def release(barriers, i, warpgroup):
        pass

    return BiasStages.from_locals(locals(), maps_type=types.Tuple([]), word=None, prefetch=init)


def _stages(variant: Variant, operand: Operand, at: int, stages: int, consumers: int) -> BiasStages:
    CONSUMERS, tile = consumers, bias_tile(variant.having, operand, at)
    pipe, LOADERS_WARP = pipeline(stages * consumers, tile.nbytes, WARPS), WARPS * consumers

    @verb
    def filling(i, warpgroup):
        return u32(u32(i) * u32(CONSUMERS) + u32(warpgroup))

    @verb
    def prefetch(maps):
        prefetch_maps(maps, LOADERS_WARP)

    @verb
    def bring(smem, maps, barriers, options, task, n0, i):
        for w in range(CONSUMERS):
            stage = pipe.acquire(barriers, filling(i, w))
            m0 = i32(anew_i32(i32(task.m0)) + ROWS * w)  # of which threads that load would keep one for each warpgroup
            tile.load(smem, stage, maps[0], options, BiasPlace(task.b, task.h, m0, n0), barriers.full)

    @verb
    def wait(smem, barriers, words, i, warpgroup):
        return tile.held(smem, pipe.wait(barriers, filling(i, warpgroup)), words)

    @verb
    def release(barriers, i, warpgroup):
        pipe.release(barriers, filling(i, warpgroup))

    return BiasStages.from_locals(
        locals(),
        maps_type=types.Tuple([tensor_map]),
        word=tile.word,
        barriers=pipe.barriers,
        init=pipe.init,
        words=tile.words,
    )
