"""The tiles of a bias. Word 2 * j + h of a thread has two neighbours: of quad j and row h of its scores.

`bias_registers`: a tile that stays for the whole kernel (dbias). Each thread writes its own words to shared memory and
reads them back, so no thread waits for another. Words of neighbouring threads are neighbours.

`bias_tile`: a tile for each tile of scores, if the bias is dense and aligned (`boxed_bias`); otherwise options read it
from memory. It is copied as a box and read in the layout of scores:

    tile = bias_tile(having, operand, at)                       [queries, keys] of 16 bits, a stage
    tile.load(smem, stage, bias_map, options, BiasPlace(b, h, m0, n0), full)
    score = fragment_scores(chain, ..., word=tile.word)         chain: that of `in_words`
    held = tile.held(smem, stage, words)                        once it has arrived; words = tile.words()
    score.finish_held(scores, held, options, scale, where)      or `bend`; then the stage is free

A thread loads four words at once (`ldmatrix`), when the first of them is used, and keeps them until the next four. So
all lanes use words in the same order. If rows of the scores are keys, words are loaded transposed: the two neighbours
of a word are two queries. Elements beyond the bias are zeros, for scores that are masked.

`bias_stages`: for forward and dq, which load K and V: each warpgroup has a tile [64, BLOCK_KV] of its own. A warpgroup
releases it as soon as it has read it, and one stage is enough: the next tile has nearly a whole round to arrive.
Filling i * consumers + w is tile i of warpgroup w.

`bias_dkv`: for dk and dv, whose tiles [BLOCK_Q, keys] share the stages and the mbarriers of dO.

Without a bias in boxes, the verbs of the last two do nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....spec import Problem
from ....spec.attention import broadcast_strides
from ....spec.meta import itemsize
from ...compiler.backend import Members, Noun, cuda, i32, i64, members, noun, tensor_map, types, u32, verb
from ...launch.tensor_map import Mapped
from ...launch.views import Boxed, boxed
from ...tile.a_fragment import WORDS, words_of_columns, words_of_rows
from ...tile.boxes import Corner, box_shape, box_tile, prefetch_maps
from ...tile.pipeline import pipeline
from ...tile.products import recomputed_i32
from ...tile.storage import fetch_global_b32
from ...tile.swizzle import Operand
from ...tile.unrolled import local_array, nothing
from ...tile.warpgroup import ROWS
from ..arguments import Variant
from ..options import Having, OptionChain, chain_of
from ..score_coords import my_column, my_row

PAIRS = "pairs"  # the order of a bias whose neighbours are fetched two at a time


@noun
def bias_registers(variant: Variant, columns: int, threads: int) -> Members:
    """The verbs of tiles [64, columns] of each warpgroup, by `threads` threads in all. Words beyond the last row or
    column repeat the last one; their scores are masked.
    """
    index, quads, size = variant.having.names.index("bias"), columns // 8, columns // 4 * threads
    _, order = variant.having.variants[index].facts
    in_pairs = order == PAIRS

    @verb
    def words():
        """Return the shared array of words; once in a kernel, by all threads."""
        return cuda.shared.array(size, u32)

    @verb
    def _place(number):
        """Return the index of my word, unsigned."""
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
    """Return the options of a kernel that has its bias as words, whatever the layout of the bias."""
    variants = (
        each._replace(facts=(each.facts[0], PAIRS)) if each.option.name == "bias" else each for each in found.variants
    )
    return found._replace(variants=tuple(variants))


class Chains(NamedTuple):
    """The options of a kernel; and for its tiles of scores those of `in_words`, if they have the bias as words."""

    whole: OptionChain
    of_tile: OptionChain


def chains_of(variant: Variant, *, words: bool, gradient: bool = False) -> Chains:
    """Return the options as device functions. words: the bias comes as words."""
    whole = chain_of(variant.having, variant.dtype, gradient=gradient)
    of_words = chain_of(in_words(variant.having), variant.dtype, gradient=gradient) if words else whole
    return Chains(whole, of_words)


class BiasPlace(NamedTuple):
    """Where a tile is among the scores: batch, head, first query, first key."""

    b: Any
    h: Any
    m0: Any
    n0: Any


class HeldBias(NamedTuple):
    """Where a thread reads its words, and the four that it has read."""

    smem: Any
    first: Any
    words: Any


@noun
def bias_tile(having: Having, tile: Operand, at: int, *, transposed: bool = False) -> Members:
    """The verbs of a tile whose first stage begins at byte `at`, by a warpgroup whose scores are 64 rows of it.

    transposed: rows of the scores are keys, 64 of the tile's for each warpgroup.
    """
    index = having.names.index("bias")
    boxes, own = box_tile(tile, at, 2), words_of_columns(tile) if transposed else words_of_rows(tile)

    @verb
    def load(smem, stage, bias_map, options, place, full):
        """Start to load the tile into a stage; by one thread. Batch and head are recomputed for each tile: threads that
        load have few registers.
        """
        b, h, strides = i32(0), i32(0), options[index].bias.strides
        if strides[0] != 0:
            b = recomputed_i32(i32(place.b))
        if strides[1] != 0:
            h = recomputed_i32(i32(place.h))
        boxes.load(smem, stage, bias_map, Corner(place.m0, place.n0, (h, b)), full)

    @verb
    def held(smem, stage, words):
        """Return the first argument of `word`, for a tile that has arrived."""
        return HeldBias(smem, own.first(boxes.at(stage), recomputed_i32(i32(cuda.threadIdx.x))), words)

    @verb
    def word(held, number):
        """Return my word with this number."""
        if number % WORDS == 0:
            own.load(held.words, 0, held.smem, held.first, number // WORDS)
        return held.words[number % WORDS]

    return members(
        locals(),
        words=local_array(WORDS, u32),  # () -> for the words of a tile; once in a kernel
        nbytes=boxes.nbytes,  # of a stage
    )


def boxed_bias(problem: Problem) -> Boxed | None:
    """Return the bias along batch, head, query and key, 1 where it is broadcast. None if it can't be copied as boxes:
    not 16 bits, one row or column, or rows not at multiples of 16 bytes.
    """
    bias = problem.arrays.get("bias")
    if bias is None or itemsize(bias.dtype) != 2:
        return None
    strides = broadcast_strides(bias)
    if strides[3] != 1 or strides[2] == 0:
        return None
    own = (*(1 for _ in range(4 - len(bias.shape))), *bias.shape)
    shape = tuple(1 if stride == 0 else size for size, stride in zip(own, strides))
    return boxed({"bias": bias._replace(shape=shape, strides=strides)}, "bias", False)


def bias_map(problem: Problem, tile: Operand) -> Mapped:
    """Return the tensor map of a bias that is copied as boxes, in these tiles."""
    if (found := boxed_bias(problem)) is None:
        raise ValueError("a bias that does not come as boxes has no tensor map")
    box = (1, 1, *box_shape(tile))
    return Mapped("bias", problem.arrays["bias"].dtype, found.shape, found.strides, box, tile.span)


WARPS = 4  # of a warpgroup


@verb
def _no_barriers():
    return i32(0)


NO_BARRIERS = Noun("no_barriers", {"barriers": _no_barriers, "init": nothing(1)})
NO_BIAS = {"maps_type": types.Tuple([]), "word": None, "prefetch": nothing(1), "words": local_array(1, u32)}


@verb
def _words_of_stage(smem, barriers, words, i, warpgroup):
    return words


@verb
def _words_of_tile(smem, stage, words):
    return words


@noun
def bias_stages(variant: Variant, operand: Operand | None, at: int, stages: int, consumers: int) -> Members:
    """The verbs of a kernel whose first stage begins at byte `at`. operand: a tile; None without a bias in boxes.

    maps: the kernel's argument, with the bias's map if there is one.
    """
    if operand is None:
        return members(
            {}, bring=nothing(7), wait=_words_of_stage, release=nothing(3), **NO_BIAS, **NO_BARRIERS.members()
        )
    CONSUMERS, tile = consumers, bias_tile(variant.having, operand, at)
    pipe, LOADERS_WARP = pipeline(stages * consumers, tile.nbytes, WARPS), WARPS * consumers

    @verb
    def _filling(i, warpgroup):
        return u32(u32(i) * u32(CONSUMERS) + u32(warpgroup))

    @verb
    def prefetch(maps):
        """Prefetch the map; by all threads."""
        prefetch_maps(maps, LOADERS_WARP)

    @verb
    def bring(smem, maps, barriers, options, task, n0, i):
        """Start to load the tiles of all warpgroups; by one thread."""
        for w in range(CONSUMERS):
            stage = pipe.acquire(barriers, _filling(i, w))
            m0 = i32(recomputed_i32(i32(task.m0)) + ROWS * w)  # else a register would keep one for each warpgroup
            tile.load(smem, stage, maps[0], options, BiasPlace(task.b, task.h, m0, n0), barriers.full)

    @verb
    def wait(smem, barriers, words, i, warpgroup):
        """Return the first argument of `word`, once my tile has arrived. words: of the verb `words`."""
        return tile.held(smem, pipe.wait(barriers, _filling(i, warpgroup)), words)

    @verb
    def release(barriers, i, warpgroup):
        """Release my tile, once scores have changed."""
        pipe.release(barriers, _filling(i, warpgroup))

    of_tile = {"word": tile.word, "words": tile.words, "maps_type": types.Tuple([tensor_map])}
    return members(locals(), **of_tile, barriers=pipe.barriers, init=pipe.init)


@noun
def bias_dkv(variant: Variant, operand: Operand | None, at: int, loaders_warp: int) -> Members:
    """The verbs of a kernel whose first stage begins at byte `at`. operand, maps: as in `bias_stages`."""
    if operand is None:
        return members({}, bring=nothing(6), held=_words_of_tile, nbytes=0, **NO_BIAS)
    tile = bias_tile(variant.having, operand, at, transposed=True)

    @verb
    def prefetch(maps):
        prefetch_maps(maps, loaders_warp)

    @verb
    def bring(smem, stage, maps, options, place, full):
        """Start to load the tile at a `BiasPlace` into a stage; by one thread."""
        tile.load(smem, stage, maps[0], options, place, full)

    of_tile = {"word": tile.word, "words": tile.words, "maps_type": types.Tuple([tensor_map])}
    return members(locals(), **of_tile, held=tile.held, nbytes=tile.nbytes)
