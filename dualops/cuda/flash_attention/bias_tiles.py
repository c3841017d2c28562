"""The tile of a dense bias that meets a tile of scores: brought by copies of boxes, read as scores lie in registers.

    tile = bias_tile(having, operand, at)                       [queries, keys] of 16 bits, a stage
    tile.load(smem, stage, bias_map, options, BiasPlace(b, h, m0, n0), full)
    score = fragment_scores(chain, ..., word=tile.word)         chain: that of `in_words`
    held = tile.held(smem, stage, words)                        once it is there, words = tile.words()
    score.finish_held(scores, held, options, scale, where)      or `bend`; then the stage is free

Four words of a thread come at once (`ldmatrix`), when the first of them is asked for, and stay until the next four do:
words are asked for by all lanes, in their order. Where rows of the scores are keys they come transposed, so that two
neighbours of a word are two queries then. What is beyond the bias comes as zeros, for scores that are masked.

Which biases are boxes: `boxed_bias`. Another one is read from memory score by score, or two at once (`options`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...spec import Problem
from ...spec.attention import broadcast_strides
from ...spec.meta import itemsize
from ..compiler.backend import Members, cuda, i32, members, noun, u32, verb
from ..launch.maps import Mapped
from ..launch.views import Boxed, boxed
from ..tile.a_fragment import WORDS, words_of_columns, words_of_rows
from ..tile.boxes import Corner, box_shape, box_tile
from ..tile.products import anew_i32
from ..tile.swizzle import SPANS, Operand
from .options import Having

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
