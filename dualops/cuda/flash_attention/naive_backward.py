"""The gradient of attention, the first idea: scores and their gradient lie in memory; each element has a thread.

    1  scores, as forward computes them
    2  delta = rowsum(do * o) - dlse    as in simt (`simt_sums`)
    3  P = exp(S - lse),  dS = P * (weight * (do @ v.T) - delta);  weight * P replaces the scores
    4  dv = (weight * P).T @ do,  summed over the heads that share a key
    5  dbias = dS, summed over the axes that the bias is broadcast on
    6  ds0 = dS * slope, which replaces dS; without options that have slopes, dS is ds0
    7  dq = scale * ds0 @ k     the product of forward
    8  dk = scale * ds0.T @ q   as dv
    9  dsinks = -sum(exp(sink - lse) * delta)    as in simt

Memory besides the results: itemsize * B * H * Sq * (2 * Sk + 1), with an itemsize of 4 (8 for float64). There are no
atomics: every element of a result is one thread's sum, the same in each run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Kernel, builds, i32, i64, kernel, pointer, types
from ..launch.views import start, strided
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import Variant, array_type, size_types, spans, statistic_type
from .naive_forward import THREADS, inner_products, my_index, place, product_type
from .options import chain_of, pair_places
from .saved_lse import exponential_of


class Operands(NamedTuple):
    """What dS is computed from, in addition to the scores."""

    v: Any  # [B, Hkv, Sk, Dv]
    do: Any  # [B, H, Sq, Dv]
    lse: Any  # [B, H, Sq]
    delta: Any  # as lse
    Dv: Any


def operands_type(variant: Variant) -> Any:
    """Return the type of `Operands`."""
    return types.NamedTuple((*[array_type(variant)] * 2, *[statistic_type(variant)] * 2, i32), Operands)


@builds
def build_score_gradients(variant: Variant) -> Kernel:
    """flash_attention_naive_score_gradients(probs, d_scores, x, B, work): one thread per score. x: `Operands`.

    weight * P replaces the scores in `probs`. In both results, -0 marks what does not count.
    """
    mem, inner = storage(variant.dtype), inner_products(variant.dtype)
    num, span = numbers(mem.number), spans(variant.varlen)
    exponential = exponential_of(mem.number)
    chain, pair_at = chain_of(variant.having, variant.dtype), pair_places(mem.number)

    @kernel(*[pointer(mem.number)] * 2, operands_type(variant), i32, size_types(variant), threads=THREADS)
    def flash_attention_naive_score_gradients(probs, d_scores, x, B, work):
        index = my_index()
        row, n = index // work.Sk, index % work.Sk
        b, h, m = place(row, work.H, work.Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
            if (m < own_Sq) & (n < own_Sk):
                weighted, d_score, token = num.minus_zero, num.minus_zero, q_first + m
                row_lse = x.lse.data[start(x.lse, b, h, token)]
                at = pair_at(b, h, m, n, work.aligned * (own_Sk - own_Sq))
                # a NaN row makes all keys that it sees NaN
                if probs[index] != num.minus_inf or (row_lse != row_lse and chain.visible(work.options, at)):
                    prob = exponential(probs[index], row_lse)
                    weight = chain.weight(work.options, at)
                    v_row = start(x.v, b, h // work.group, k_first + n)
                    d_prob = weight * inner.product(x.do.data, start(x.do, b, h, token), x.v.data, v_row, x.Dv)
                    weighted, d_score = prob * weight, prob * (d_prob - x.delta.data[start(x.delta, b, h, token)])
                    if num.is_minus_zero(d_score):
                        d_score = num.zero  # it counts
                probs[index] = weighted
                d_scores[index] = d_score

    return flash_attention_naive_score_gradients


@builds
def build_transposed_product(variant: Variant) -> Kernel:
    """flash_attention_naive_transposed_product(x, B, Hkv, work): one thread per element. x: `Product`.

    out [B, Hkv, Sk, width] = factor * left.T @ right [B, H, Sq, width], summed over the heads of a group, for dv =
    (weight * P).T @ do and dk = scale * ds0.T @ q.
    """
    mem, span = storage(variant.dtype), spans(variant.varlen)
    num = numbers(mem.number)

    @kernel(product_type(variant), i32, i32, size_types(variant), threads=THREADS)
    def flash_attention_naive_transposed_product(x, B, Hkv, work):
        index = my_index()
        column = index % x.width
        b, h_kv, n = place(index // x.width, Hkv, work.Sk)
        if b < B:
            q_first, _, own_Sq, own_Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
            if n < own_Sk:
                total, lost = num.zero, num.zero
                for h in range(h_kv * work.group, (h_kv + 1) * work.group):
                    for m in range(own_Sq):
                        weight = x.left[((b * work.H + h) * work.Sq + m) * work.Sk + n]
                        if not num.is_minus_zero(weight):
                            value = mem.load(x.right.data, start(x.right, b, h, q_first + m) + column)
                            total, lost = num.add_compensated(total, lost, x.factor * weight * value)
                mem.store(x.out.data, start(x.out, b, h_kv, span.key_out(work.lengths, b) + n) + column, total)

    return flash_attention_naive_transposed_product


@builds
def build_bias_gradient(dtype: str) -> Kernel:
    """flash_attention_naive_bias_gradient(dbias, d_scores, sizes, over, H, Sq, Sk): one thread per element of the bias.

    sizes: of the bias along B, H, Sq and Sk. over: how many scores along each axis share an element of the bias.
    """
    mem = storage(dtype)
    num = numbers(mem.number)

    @kernel(strided(dtype, 4), pointer(mem.number), *[types.UniTuple(i64, 4)] * 2, *[i32] * 3, threads=THREADS)
    def flash_attention_naive_bias_gradient(dbias, d_scores, sizes, over, H, Sq, Sk):
        index = my_index()
        bias_n = index % sizes[3]
        bias_b, bias_h, bias_m = place(index // sizes[3], sizes[1], sizes[2])
        if bias_b < sizes[0]:
            total, lost = num.zero, num.zero
            for b in range(bias_b, bias_b + over[0]):
                for h in range(bias_h, bias_h + over[1]):
                    for m in range(bias_m, bias_m + over[2]):
                        for n in range(bias_n, bias_n + over[3]):
                            total, lost = num.add_compensated(total, lost, d_scores[((b * H + h) * Sq + m) * Sk + n])
            step = dbias.strides
            mem.store(dbias.data, bias_b * step[0] + bias_h * step[1] + bias_m * step[2] + bias_n * step[3], total)

    return flash_attention_naive_bias_gradient


@builds
def build_bend(variant: Variant) -> Kernel:
    """flash_attention_naive_bend(d_scores, q, k, D, B, work): ds0 = dS * slope, one thread per score."""
    mem, inner = storage(variant.dtype), inner_products(variant.dtype)
    num, span = numbers(mem.number), spans(variant.varlen)
    chain, pair_at = chain_of(variant.having, variant.dtype, gradient=True), pair_places(mem.number)

    @kernel(pointer(mem.number), *[array_type(variant)] * 2, i32, i32, size_types(variant), threads=THREADS)
    def flash_attention_naive_bend(d_scores, q, k, D, B, work):
        index = my_index()
        n = index % work.Sk
        b, h, m = place(index // work.Sk, work.H, work.Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
            if (m < own_Sq) & (n < own_Sk):
                d_score = d_scores[index]
                if not num.is_minus_zero(d_score):
                    q_row, k_row = start(q, b, h, q_first + m), start(k, b, h // work.group, k_first + n)
                    score = work.scale * inner.product(q.data, q_row, k.data, k_row, D)
                    d_score *= chain.slope(score, work.options, pair_at(b, h, m, n, work.aligned * (own_Sk - own_Sq)))
                    if num.is_minus_zero(d_score):
                        d_score = num.zero  # it counts
                    d_scores[index] = d_score

    return flash_attention_naive_bend
