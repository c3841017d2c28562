"""Attention, the first idea: all scores lie in memory, and an element has a thread. Where a reader starts.

    1  scores [B, H, Sq, Sk] = options(scale * q @ k.T)     -inf where a mask is
    2  probs = exp(scores - row_max), in their place;  row_sum,  lse = row_max + log(row_sum)
    3  o = probs @ v / row_sum

Memory beside the results: itemsize * B * H * Sq * (Sk + 1), with an itemsize of 4 (8 for float64). Every score is
written, read twice and written again before it meets v, and neighbouring threads read keys a row apart.

A probability that does not count is kept as -0 and left out of the product, so that a NaN in a key or value that is
not seen stays where it is. Sums over tokens are compensated: one thread adds up as many terms as there are tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ...spec import Problem
from ..compiler.backend import Kernel, Members, builds, cuda, i32, i64, kernel, noun, pointer, verb
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import Variant, array_type, size_types, spans, statistic_type, variant
from .options import chain_of, pair_places

THREADS = 256  # of a block
PIECE = 32  # terms of an inner product


def naive_variant(problem: Problem) -> Variant:
    """What kernels that know the options are built for; widths they are told at the launch."""
    return replace(variant(problem), D=0, Dv=0)


@verb
def my_index():
    """Which element is mine: neighbouring threads have neighbours."""
    return i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x


@verb
def place(row, heads, tokens):
    """Batch, head and token of row number `row`."""
    return row // tokens // heads, row // tokens % heads, row % tokens


@cache
@noun
def inner_products(dtype: str) -> Members:
    """Inner products of rows, which one thread reads.

    The verb for arrays of a dtype.

    It adds in pieces, which are then added: hundreds of terms one after another would lose too much in float32.
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
    """flash_attention_naive_scores(scores, q, k, D, B, H, group, Sq, Sk, aligned, scale, lengths, options).

    A score a thread. aligned: 1 where the last query stands at the last key, 0 where the first one stands at the first.
    """
    mem, inner = storage(variant.dtype), inner_products(variant.dtype)
    num, span = numbers(mem.number), spans(variant.varlen)
    chain, pair_at = chain_of(variant.having, variant.dtype), pair_places(mem.number)

    @kernel(pointer(mem.number), *[array_type(variant)] * 2, i32, i32, *size_types(variant), threads=THREADS)
    def flash_attention_naive_scores(scores, q, k, D, B, H, group, Sq, Sk, aligned, scale, lengths, options):
        index = my_index()
        n = index % Sk
        b, h, m = place(index // Sk, H, Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span.of_batch(lengths, b, Sq, Sk)
            if (m < own_Sq) & (n < own_Sk):
                at = pair_at(b, h, m, n, aligned * (own_Sk - own_Sq))
                score = num.minus_inf
                if chain.visible(options, at):
                    q_row, k_row = start(q, b, h, q_first + m), start(k, b, h // group, k_first + n)
                    score = chain.score(scale * inner.product(q.data, q_row, k.data, k_row, D), options, at)
                scores[index] = score

    return flash_attention_naive_scores


@builds
def build_softmax(variant: Variant, with_lse: bool) -> Kernel:
    """flash_attention_naive_softmax(scores, row_sums, lse, B, H, group, Sq, Sk, aligned, scale, lengths, options).

    A row a thread. Scores become probabilities, times row_sum and through dropout, or -0 where they do not count.
    """
    mem = storage(variant.dtype)
    num, span = numbers(mem.number), spans(variant.varlen)
    chain, pair_at = chain_of(variant.having, variant.dtype), pair_places(mem.number)

    @kernel(*[pointer(mem.number)] * 2, statistic_type(variant), i32, *size_types(variant), threads=THREADS)
    def flash_attention_naive_softmax(scores, row_sums, lse, B, H, group, Sq, Sk, aligned, scale, lengths, options):
        row = my_index()
        b, h, m = place(row, H, Sq)
        if b < B:
            q_first, _, own_Sq, own_Sk = span.of_batch(lengths, b, Sq, Sk)
            if m < own_Sq:
                sink = chain.sink(options, h)  # -inf where there is none
                row_max = sink
                for n in range(own_Sk):
                    row_max = num.maximum(row_max, scores[row * Sk + n])
                base = num.base(row_max)
                row_sum, lost = num.exp(sink - base), num.zero
                for n in range(own_Sk):
                    score = scores[row * Sk + n]
                    prob = num.exp(score - base)
                    row_sum, lost = num.add_compensated(row_sum, lost, prob)
                    at = pair_at(b, h, m, n, aligned * (own_Sk - own_Sq))
                    weighted = prob * chain.weight(options, at)
                    scores[row * Sk + n] = num.minus_zero if score == num.minus_inf else weighted
                row_sums[row] = row_sum
                if with_lse:
                    lse.data[start(lse, b, h, q_first + m)] = base + num.log(row_sum)

    return flash_attention_naive_softmax


@builds
def build_product(variant: Variant) -> Kernel:
    """flash_attention_naive_product(out, left, right, row_sums, divided, factor, width, B, H, group, Sq, Sk, ...).

    out [B, H, Sq, width] = factor * left [B, H, Sq, Sk] @ right [B, Hkv, Sk, width], an element a thread; where
    `divided` is not 0, rows are divided by their sums. o = probs @ v is that, and dq = scale * ds0 @ k.
    """
    mem, span = storage(variant.dtype), spans(variant.varlen)
    num = numbers(mem.number)

    @kernel(
        array_type(variant),
        pointer(mem.number),
        array_type(variant),
        pointer(mem.number),
        i32,
        mem.number,
        i32,
        i32,
        *size_types(variant),
        threads=THREADS,
    )
    def flash_attention_naive_product(
        out, left, right, row_sums, divided, factor, width, B, H, group, Sq, Sk, aligned, scale, lengths, options
    ):
        index = my_index()
        row, column = index // width, index % width
        b, h, m = place(row, H, Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span.of_batch(lengths, b, Sq, Sk)
            if m < own_Sq:
                total, lost = num.zero, num.zero
                for n in range(own_Sk):
                    weight = left[row * Sk + n]
                    if not num.is_minus_zero(weight):
                        value = mem.load(right.data, start(right, b, h // group, k_first + n) + column)
                        total, lost = num.add_compensated(total, lost, factor * weight * value)
                if divided != 0 and row_sums[row] != num.zero:
                    total /= row_sums[row]
                mem.store(out.data, start(out, b, h, q_first + m) + column, total)

    return flash_attention_naive_product
