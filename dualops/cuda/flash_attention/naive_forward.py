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

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

from ...spec import Problem
from ...spec.attention import At
from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer, verb
from ..tile import numbers, storage
from .call import Variant, array_type, size_types, spans, start, statistic_type, variant
from .options import chain

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
def dot(dtype: str) -> Callable[..., Any]:
    """A verb (a, i, b, j, width) -> the inner product of `width` neighbours in a from i on and in b from j on.

    In pieces, which are then added: hundreds of terms one after another would lose too much in float32.
    """
    number, load = storage(dtype).number, storage(dtype).load
    ZERO = number(0)

    @verb
    def product(a, i, b, j, width):
        total = ZERO
        for first in range(0, width, PIECE):
            piece = ZERO
            for d in range(first, min(first + PIECE, width)):
                piece += load(a, i + d) * load(b, j + d)
            total += piece
        return total

    return product


@builds
def build_scores(variant: Variant) -> Kernel:
    """flash_attention_naive_scores(scores, q, k, D, B, H, group, Sq, Sk, aligned, scale, lengths, options).

    A score a thread. aligned: 1 where the last query stands at the last key, 0 where the first one stands at the first.
    """
    number, inner = storage(variant.dtype).number, dot(variant.dtype)
    options_of, span = chain(variant.having, variant.dtype), spans(variant.varlen)
    option_score, visible = options_of.score, options_of.visible
    NOTHING = number(-inf)

    @kernel(pointer(number), *[array_type(variant)] * 2, i32, i32, *size_types(variant), threads=THREADS)
    def flash_attention_naive_scores(scores, q, k, D, B, H, group, Sq, Sk, aligned, scale, lengths, options):
        index = my_index()
        n = index % Sk
        b, h, m = place(index // Sk, H, Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span(lengths, b, Sq, Sk)
            if (m < own_Sq) & (n < own_Sk):
                at = At(b, h, m, n, m + aligned * (own_Sk - own_Sq))
                score = NOTHING
                if visible(options, at):
                    q_row, k_row = start(q, b, h, q_first + m), start(k, b, h // group, k_first + n)
                    score = option_score(scale * inner(q.data, q_row, k.data, k_row, D), options, at)
                scores[index] = score

    return flash_attention_naive_scores


@builds
def build_softmax(variant: Variant, with_lse: bool) -> Kernel:
    """flash_attention_naive_softmax(scores, row_sums, lse, B, H, group, Sq, Sk, aligned, scale, lengths, options).

    A row a thread. Scores become probabilities, times row_sum and through dropout, or -0 where they do not count.
    """
    number = storage(variant.dtype).number
    add, maximum, base_of = numbers(number).add_compensated, numbers(number).maximum, numbers(number).base
    exp, log = numbers(number).exp, numbers(number).log
    options_of, span = chain(variant.having, variant.dtype), spans(variant.varlen)
    option_sink, option_weight = options_of.sink, options_of.weight
    NOTHING, ZERO, MINUS_ZERO, WITH_LSE = number(-inf), number(0), number(-0.0), with_lse

    @kernel(*[pointer(number)] * 2, statistic_type(variant), i32, *size_types(variant), threads=THREADS)
    def flash_attention_naive_softmax(scores, row_sums, lse, B, H, group, Sq, Sk, aligned, scale, lengths, options):
        row = my_index()
        b, h, m = place(row, H, Sq)
        if b < B:
            q_first, _, own_Sq, own_Sk = span(lengths, b, Sq, Sk)
            if m < own_Sq:
                sink = option_sink(options, h)  # -inf where there is none
                row_max = sink
                for n in range(own_Sk):
                    row_max = maximum(row_max, scores[row * Sk + n])
                base = base_of(row_max)
                row_sum, lost = exp(sink - base), ZERO
                for n in range(own_Sk):
                    score = scores[row * Sk + n]
                    prob = exp(score - base)
                    row_sum, lost = add(row_sum, lost, prob)
                    at = At(b, h, m, i64(n), m + aligned * (own_Sk - own_Sq))
                    weighted = prob * option_weight(options, at)
                    scores[row * Sk + n] = MINUS_ZERO if score == NOTHING else weighted
                row_sums[row] = row_sum
                if WITH_LSE:
                    lse.data[start(lse, b, h, q_first + m)] = base + log(row_sum)

    return flash_attention_naive_softmax


@builds
def build_product(variant: Variant) -> Kernel:
    """flash_attention_naive_product(out, left, right, row_sums, divided, factor, width, B, H, group, Sq, Sk, ...).

    out [B, H, Sq, width] = factor * left [B, H, Sq, Sk] @ right [B, Hkv, Sk, width], an element a thread; where
    `divided` is not 0, rows are divided by their sums. o = probs @ v is that, and dq = scale * ds0 @ k.
    """
    number, load, store = storage(variant.dtype).number, storage(variant.dtype).load, storage(variant.dtype).store
    add, minus_zero, span = numbers(number).add_compensated, numbers(number).minus_zero, spans(variant.varlen)
    ZERO = number(0)

    @kernel(
        array_type(variant),
        pointer(number),
        array_type(variant),
        pointer(number),
        i32,
        number,
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
            q_first, k_first, own_Sq, own_Sk = span(lengths, b, Sq, Sk)
            if m < own_Sq:
                total, lost = ZERO, ZERO
                for n in range(own_Sk):
                    weight = left[row * Sk + n]
                    if not minus_zero(weight):
                        value = load(right.data, start(right, b, h // group, k_first + n) + column)
                        total, lost = add(total, lost, factor * weight * value)
                if divided != 0 and row_sums[row] != ZERO:
                    total /= row_sums[row]
                store(out.data, start(out, b, h, q_first + m) + column, total)

    return flash_attention_naive_product
