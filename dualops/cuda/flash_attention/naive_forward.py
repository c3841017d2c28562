"""Attention, the first idea: all scores lie in memory, and each element has a thread. A reader starts here.

    1  scores [B, H, Sq, Sk] = options(scale * q @ k.T)     -inf where a mask hides one
    2  probs = exp(scores - row_max), which replace them;  row_sum,  lse = row_max + log(row_sum)
    3  o = probs @ v / row_sum

Memory besides the results: itemsize * B * H * Sq * (Sk + 1), with an itemsize of 4 (8 for float64). Every score is
written, read twice and written again before it meets v, and neighbouring threads read keys a row apart.

-0 marks a probability that does not count. The product leaves it out, so that a NaN in a hidden key or value does not
spread. Sums over tokens are compensated: one thread adds as many terms as there are tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ...spec import Problem
from ..compiler.backend import Kernel, Members, builds, cuda, i32, i64, kept_noun, kernel, pointer, types, verb
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import Variant, array_type, size_types, spans, statistic_type, variant
from .options import chain_of, pair_places

THREADS = 256  # of a block
PIECE = 32  # terms of an inner product


def naive_variant(problem: Problem) -> Variant:
    """Return the variant of kernels that have the options and get widths at the launch."""
    return replace(variant(problem), D=0, Dv=0)


@verb
def my_index():
    """Return the number of my element; neighbouring threads have neighbouring elements."""
    return i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x


@verb
def place(row, heads, tokens):
    """Return batch, head and token of row number `row`."""
    return row // tokens // heads, row // tokens % heads, row % tokens


@kept_noun
def inner_products(dtype: str) -> Members:
    """The verb for inner products of rows, each by one thread. It adds sums of pieces: hundreds of terms one after
    another would lose too much in float32.
    """
    mem = storage(dtype)
    num = numbers(mem.number)

    @verb
    def product(a, i, b, j, width):
        """Return the inner product of `width` neighbours, in a from i on and in b from j on."""
        total = num.zero
        for first in range(0, width, PIECE):
            piece = num.zero
            for d in range(first, min(first + PIECE, width)):
                piece += mem.load(a, i + d) * mem.load(b, j + d)
            total += piece
        return total

    return locals()


@builds
def build_scores(variant: Variant) -> Kernel:
    """flash_attention_naive_scores(scores, q, k, D, B, work): one thread per score."""
    mem, inner = storage(variant.dtype), inner_products(variant.dtype)
    num, span = numbers(mem.number), spans(variant.varlen)
    chain, pair_at = chain_of(variant.having, variant.dtype), pair_places(mem.number)

    @kernel(pointer(mem.number), *[array_type(variant)] * 2, i32, i32, size_types(variant), threads=THREADS)
    def flash_attention_naive_scores(scores, q, k, D, B, work):
        index = my_index()
        n = index % work.Sk
        b, h, m = place(index // work.Sk, work.H, work.Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
            if (m < own_Sq) & (n < own_Sk):
                at = pair_at(b, h, m, n, work.aligned * (own_Sk - own_Sq))
                score = num.minus_inf
                if chain.visible(work.options, at):
                    q_row, k_row = start(q, b, h, q_first + m), start(k, b, h // work.group, k_first + n)
                    score = chain.score(work.scale * inner.product(q.data, q_row, k.data, k_row, D), work.options, at)
                scores[index] = score

    return flash_attention_naive_scores


@builds
def build_softmax(variant: Variant, with_lse: bool) -> Kernel:
    """flash_attention_naive_softmax(scores, row_sums, lse, B, work): one thread per row.

    Scores become probabilities times row_sum, after dropout, or -0 where they do not count.
    """
    mem = storage(variant.dtype)
    num, span = numbers(mem.number), spans(variant.varlen)
    chain, pair_at = chain_of(variant.having, variant.dtype), pair_places(mem.number)

    @kernel(*[pointer(mem.number)] * 2, statistic_type(variant), i32, size_types(variant), threads=THREADS)
    def flash_attention_naive_softmax(scores, row_sums, lse, B, work):
        row = my_index()
        b, h, m = place(row, work.H, work.Sq)
        if b < B:
            q_first, _, own_Sq, own_Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
            if m < own_Sq:
                sink = chain.sink(work.options, h)  # -inf where there is none
                row_max = sink
                for n in range(own_Sk):
                    row_max = num.maximum(row_max, scores[row * work.Sk + n])
                base = num.base(row_max)
                row_sum, lost = num.exp(sink - base), num.zero
                for n in range(own_Sk):
                    score = scores[row * work.Sk + n]
                    prob = num.exp(score - base)
                    row_sum, lost = num.add_compensated(row_sum, lost, prob)
                    at = pair_at(b, h, m, n, work.aligned * (own_Sk - own_Sq))
                    weighted = prob * chain.weight(work.options, at)
                    scores[row * work.Sk + n] = num.minus_zero if score == num.minus_inf else weighted
                row_sums[row] = row_sum
                if with_lse:
                    lse.data[start(lse, b, h, q_first + m)] = base + num.log(row_sum)

    return flash_attention_naive_softmax


class Product(NamedTuple):
    """Operands and result of a product over tokens."""

    out: Any  # [B, heads, tokens, width]
    left: Any  # [B, H, Sq, Sk]; elements of -0 are left out
    right: Any  # [B, heads, tokens, width]
    factor: Any  # of every element of out
    width: Any


def product_type(variant: Variant) -> Any:
    """Return the type of `Product`."""
    array, number = array_type(variant), storage(variant.dtype).number
    return types.NamedTuple((array, pointer(number), array, number, i32), Product)


@builds
def build_product(variant: Variant) -> Kernel:
    """flash_attention_naive_product(x, row_sums, divided, B, work): one thread per element. x: `Product`.

    out [B, H, Sq, width] = factor * left @ right [B, Hkv, Sk, width], divided by the row sums if `divided` is not 0: o
    = probs @ v and dq = scale * ds0 @ k.
    """
    mem, span = storage(variant.dtype), spans(variant.varlen)
    num = numbers(mem.number)

    @kernel(product_type(variant), pointer(mem.number), i32, i32, size_types(variant), threads=THREADS)
    def flash_attention_naive_product(x, row_sums, divided, B, work):
        index = my_index()
        row, column = index // x.width, index % x.width
        b, h, m = place(row, work.H, work.Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
            if m < own_Sq:
                total, lost = num.zero, num.zero
                for n in range(own_Sk):
                    weight = x.left[row * work.Sk + n]
                    if not num.is_minus_zero(weight):
                        value = mem.load(x.right.data, start(x.right, b, h // work.group, k_first + n) + column)
                        total, lost = num.add_compensated(total, lost, x.factor * weight * value)
                if divided != 0 and row_sums[row] != num.zero:
                    total /= row_sums[row]
                mem.store(x.out.data, start(x.out, b, h, q_first + m) + column, total)

    return flash_attention_naive_product
