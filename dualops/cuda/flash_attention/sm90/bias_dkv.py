"""The bias's tiles beside those of queries, whose stages they share: [BLOCK_Q, keys], where rows of scores are keys.

They come with dO, on the same mbarrier, and go when the queries do. Without a bias in boxes the verbs do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import Namespace, cuda, tensor_map, types, u32, verb
from ...tile.boxes import prefetch_maps
from ...tile.swizzle import Operand
from ..arguments import Variant
from ..bias_tiles import BiasPlace, bias_tile


class BiasDkv(Namespace):
    """The verbs. maps: the argument that has the bias's, where there is one."""

    maps_type: Any
    nbytes: int  # of a stage
    word: Callable[..., Any] | None  # as `fragment_scores` takes it
    prefetch: Callable[..., None]  # (maps): by all threads
    bring: Callable[..., None]  # (smem, stage, maps, options, task, h, m0, full): by one thread
    words: Callable[..., Any]  # () -> a local array for what is read; once in a kernel
    held: Callable[..., Any]  # (smem, stage, words) -> what scores go through, once the tile is there


def bias_dkv(variant: Variant, operand: Operand | None, at: int, loaders_warp: int) -> BiasDkv:
    """operand: a tile, of which the first stage begins at byte `at`; None: there is no bias in boxes."""
    if operand is None:
        return _nothing()
    tile = bias_tile(variant.having, operand, at, transposed=True)

    @verb
    def prefetch(maps):
        prefetch_maps(maps, loaders_warp)

    @verb
    def bring(smem, stage, maps, options, task, h, m0, full):
        tile.load(smem, stage, maps[0], options, BiasPlace(task.b, h, m0, task.n0), full)

    return BiasDkv(
        maps_type=types.Tuple([tensor_map]),
        nbytes=tile.nbytes,
        word=tile.word,
        prefetch=prefetch,
        bring=bring,
        words=tile.words,
        held=tile.held,
    )


def _nothing() -> BiasDkv:
    @verb
    def prefetch(maps):
        pass

    @verb
    def bring(smem, stage, maps, options, task, h, m0, full):
        pass

    @verb
    def words():
        return cuda.local.array(1, u32)

    @verb
    def held(smem, stage, words):
        return words

    return BiasDkv.from_locals(locals(), maps_type=types.Tuple([]), nbytes=0, word=None)
