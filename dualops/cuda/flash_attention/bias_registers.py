"""The tile of a bias that a block has all along, in shared memory: of each thread the pairs that meet its own scores.

A thread writes and reads its own words alone, so that nobody waits for anybody; those of neighbours lie side by side.
"""

from __future__ import annotations

from ..compiler.backend import Members, cuda, i32, i64, noun, u32, verb
from ..tile.storage import fetch_global_b32
from .arguments import Variant
from .options import Having
from .score_coords import my_column, my_row

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
    def fill(words, options, b, h, m0, n0, Sq, Sk):
        """Write the words of the bias's tile at m0, n0; the bias has Sq rows and Sk columns."""
        bias = options[index].bias
        tid = i32(cuda.threadIdx.x)
        head = i64(b) * bias.strides[0] + i64(h) * bias.strides[1]
        m, n = i32(m0 + tid // 128 * 64 + my_row()), i32(n0 + my_column())
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
