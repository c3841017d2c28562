"""The tile of a bias that a block has all along, in shared memory: of each thread the pairs that meet its own scores.

A thread writes and reads its own words alone, so that nobody waits for anybody; those of neighbours lie side by side.

The tile of a dense bias that meets a tile of scores: brought by copies of boxes, read as scores lie in registers.

    tile = bias_tile(having, operand, at)                       [queries, keys] of 16 bits, a stage
    tile.load(smem, stage, bias_map, options, BiasPlace(b, h, m0, n0), full)
    score = fragment_scores(chain, ..., word=tile.word)         chain: that of `in_words`
    held = tile.held(smem, stage, words)                        once it is there, words = tile.words()
    score.finish_held(scores, held, options, scale, where)      or `bend`; then the stage is free

Four words of a thread come at once (`ldmatrix`), when the first of them is asked for, and stay until the next four do:
words are asked for by all lanes, in their order. Where rows of the scores are keys they come transposed, so that two
neighbours of a word are two queries then. What is beyond the bias comes as zeros, for scores that are masked.

Which biases are boxes: `boxed_bias`. Another one is read from memory score by score, or two at once (`options`).

The bias's tiles beside K's and V's, in the forward and dq's kernel: [64, BLOCK_KV], of each warpgroup its own.

A warpgroup that has read its tile gives it back at once, whatever the others do, so that the next one has nearly a
whole round to come: one stage is enough. Filling i * consumers + w is of tile i, for warpgroup w.

Without a bias in boxes the verbs do nothing.

The bias's tiles beside those of queries, whose stages they share: [BLOCK_Q, keys], where rows of scores are keys.

They come with dO, on the same mbarrier, and go when the queries do. Without a bias in boxes the verbs do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ....spec import Problem
from ....spec.attention import broadcast_strides
from ....spec.meta import itemsize
from ...compiler.backend import Members, Namespace, cuda, i32, i64, members, noun, tensor_map, types, u32, verb
from ...launch.maps import Mapped
from ...launch.views import Boxed, boxed
from ...tile.a_fragment import WORDS, words_of_columns, words_of_rows
from ...tile.boxes import Corner, box_shape, box_tile, prefetch_maps
from ...tile.pipeline import pipeline
from ...tile.products import anew_i32
from ...tile.storage import fetch_global_b32
from ...tile.swizzle import SPANS, Operand
from ...tile.warpgroup import ROWS
from ..arguments import Variant
from ..options import Having
from ..score_coords import my_column, my_row

PAIRS = "pairs"  # the order of a bias whose neighbours are fetched two at once


@noun
def bias_registers(variant: Variant, columns: int, threads: int) -> Members:
    """The verbs of tiles [64, columns] of each warpgroup, by so many threads in all. What is beyond the last row or
    column, where scores are masked, is what that one has.

    Word 2 * j + h is of quad j and row h of a thread's.
    """
    names = [option.name for option, _ in variant.having.variants]
    index, quads, size = names.index("bias"), columns // 8, columns // 4 * threads
    _, order = variant.having.variants[index].facts
    in_pairs = order == PAIRS

    @verb
    def words():
        """Return the shared array of words; once in a kernel, by all threads."""
        return cuda.shared.array(size, u32)

    @verb
    def _place(number):
        """Of my word, without a sign to look after."""
        return u32(number * threads) + u32(cuda.threadIdx.x)

    @verb
    def word(words, number):
        """Return my word with this number."""
        return words[_place(number)]

    @verb
    def fill(words, options, part, extent):
        """Write the words of a part of the bias (`bias_tile_scheduler.Part`)."""
        bias, Sq, Sk = options[index].bias, extent.Sq_bias, extent.Sk_bias
        tid = i32(cuda.threadIdx.x)
        head = i64(part.b) * bias.strides[0] + i64(part.h) * bias.strides[1]
        m, n = i32(part.m0 + tid // 128 * 64 + my_row()), i32(part.n0 + my_column())
        for half in range(2):
            row = head + i64(min(i32(m + 8 * half), i32(Sq - 1))) * bias.strides[2]
            for j in range(quads):
                column = i32(n + 8 * j)
                if in_pairs:
                    pair = min(column, i32(Sk - 2))
                    words[_place(2 * j + half)] = fetch_global_b32(bias.data, row + i64(pair))
                else:
                    first, second = min(column, i32(Sk - 1)), min(i32(column + 1), i32(Sk - 1))
                    low = u32(bias.data[row + i64(first) * bias.strides[3]])
                    high = u32(bias.data[row + i64(second) * bias.strides[3]])
                    words[_place(2 * j + half)] = u32(low | u32(high << u32(16)))

    return locals()


def in_words(found: Having) -> Having:
    """The options of a kernel that has its bias as words, of whatever order the bias itself is."""
    variants = (
        each._replace(facts=(each.facts[0], PAIRS)) if each.option.name == "bias" else each for each in found.variants
    )
    return found._replace(variants=tuple(variants))


ITEMSIZE = 2  # bytes of a number


class BiasPlace(NamedTuple):
    """Where a tile stands among the scores: batch, head, first query, first key."""

    b: Any
    h: Any
    m0: Any
    n0: Any


class HeldBias(NamedTuple):
    """Where a thread reads its words, and the four that it has read."""

    smem: Any
    first: Any
    words: Any


def bias_operand(queries: int, keys: int) -> Operand:
    """A tile of so many, in boxes as wide as whole ones of it are."""
    span = next(span for span in SPANS if ITEMSIZE * keys % span == 0)
    return Operand(queries, keys, ITEMSIZE, span, "k")


@noun
def bias_tile(having: Having, tile: Operand, at: int, *, transposed: bool = False) -> Members:
    """The verbs of a tile whose first stage begins at byte `at`, by a warpgroup whose scores are all of its 64 rows.

    transposed: rows of the scores are keys, 64 of the tile's for each warpgroup.

    Word 2 * j + h is of quad j and row h of a thread's, as `fragment_scores` asks for it.
    """
    index = [option.name for option, _ in having.variants].index("bias")
    boxes, own = box_tile(tile, at, 2), words_of_columns(tile) if transposed else words_of_rows(tile)

    @verb
    def load(smem, stage, bias_map, options, place, full):
        """Start to load the tile into a stage; by one thread. Batch and head are found anew for each tile: threads that
        load have few registers.
        """
        b, h, strides = i32(0), i32(0), options[index].bias.strides
        if strides[0] != 0:
            b = anew_i32(i32(place.b))
        if strides[1] != 0:
            h = anew_i32(i32(place.h))
        boxes.load(smem, stage, bias_map, Corner(place.m0, place.n0, (h, b)), full)

    @verb
    def words():
        """Return a local array for the words of a tile; once in a kernel."""
        return cuda.local.array(WORDS, u32)

    @verb
    def held(smem, stage, words):
        """Return what `word` takes, of a tile that has arrived."""
        return HeldBias(smem, own.first(boxes.at(stage), anew_i32(i32(cuda.threadIdx.x))), words)

    @verb
    def word(held, number):
        if number % WORDS == 0:
            own.load(held.words, 0, held.smem, held.first, number // WORDS)
        return held.words[number % WORDS]

    return members(
        locals(),
        nbytes=boxes.nbytes,  # of a stage
    )


def boxed_bias(problem: Problem) -> Boxed | None:
    """The bias along batch, head, query and key, 1 where it is broadcast; None for one that does not come as boxes: of
    other than 16 bits, with one row or one column, or whose rows don't lie at multiples of 16 bytes.
    """
    bias = problem.arrays.get("bias")
    if bias is None or itemsize(bias.dtype) != ITEMSIZE:
        return None
    strides = broadcast_strides(bias)
    if strides[3] != 1 or strides[2] == 0:
        return None
    own = (*(1 for _ in range(4 - len(bias.shape))), *bias.shape)
    shape = tuple(1 if stride == 0 else size for size, stride in zip(own, strides))
    return boxed({"bias": bias._replace(shape=shape, strides=strides)}, "bias", False)


def bias_map(problem: Problem, tile: Operand) -> Mapped:
    """The tensor map of a bias that comes as boxes, in such tiles."""
    if (found := boxed_bias(problem)) is None:
        raise ValueError("a bias that does not come as boxes has no tensor map")
    box = (1, 1, *box_shape(tile))
    return Mapped("bias", problem.arrays["bias"].dtype, found.shape, found.strides, box, tile.span)


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
    return _stages(variant, operand, at, stages, consumers) if stages else _no_stages()


def _no_stages() -> BiasStages:
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


class BiasDkv(Namespace):
    """The verbs. maps: the argument that has the bias's, where there is one."""

    maps_type: Any
    nbytes: int  # of a stage
    word: Callable[..., Any] | None  # as `fragment_scores` takes it
    prefetch: Callable[..., None]  # (maps): by all threads
    bring: Callable[..., None]  # (smem, stage, maps, options, place, full): by one thread. place: `BiasPlace`
    words: Callable[..., Any]  # () -> a local array for what is read; once in a kernel
    held: Callable[..., Any]  # (smem, stage, words) -> what scores go through, once the tile is there


def bias_dkv(variant: Variant, operand: Operand | None, at: int, loaders_warp: int) -> BiasDkv:
    """operand: a tile, of which the first stage begins at byte `at`; None: there is no bias in boxes."""
    if operand is None:
        return _no_tiles()
    tile = bias_tile(variant.having, operand, at, transposed=True)

    @verb
    def prefetch(maps):
        prefetch_maps(maps, loaders_warp)

    @verb
    def bring(smem, stage, maps, options, place, full):
        tile.load(smem, stage, maps[0], options, place, full)

    return BiasDkv(
        maps_type=types.Tuple([tensor_map]),
        nbytes=tile.nbytes,
        word=tile.word,
        prefetch=prefetch,
        bring=bring,
        words=tile.words,
        held=tile.held,
    )


def _no_tiles() -> BiasDkv:
    @verb
    def prefetch(maps):
        pass

    @verb
    def bring(smem, stage, maps, options, place, full):
        pass

    @verb
    def words():
        return cuda.local.array(1, u32)

    @verb
    def held(smem, stage, words):
        return words

    return BiasDkv.from_locals(locals(), maps_type=types.Tuple([]), nbytes=0, word=None)
