"""The gradient of attention, the first idea: scores and their gradient lie in memory, and an element has a thread.

    1  scores, as forward makes them
    2  delta = rowsum(do * o) - dlse
    3  P = exp(S - lse),  dS = P * (weight * (do @ v.T) - delta);  weight * P takes the scores' place
    4  dv = (weight * P).T @ do,  summed over the heads that share a key
    5  dbias = dS, summed over what the bias is broadcast on
    6  ds0 = dS * slope, in its place; where every slope is 1, dS is ds0
    7  dq = scale * ds0 @ k     the product of forward
    8  dk = scale * ds0.T @ q   as dv
    9  dsinks = -sum(exp(sink - lse) * delta)

Memory beside the results: itemsize * B * H * Sq * (2 * Sk + 1), with an itemsize of 4 (8 for float64). There are no
atomics: every element of a result is one thread's sum, the same from run to run.
"""

from __future__ import annotations

from math import inf

from ...spec.attention import At
from ..backend import Kernel, builds, i32, i64, kernel, pointer, types
from ..tile import numbers, storage
from .call import Variant, array_type, size_types, spans, start, statistic_type
from .naive_forward import THREADS, dot, my_index, place
from .options import chain, strided


@builds
def build_delta(variant: Variant) -> Kernel:
    """flash_attention_naive_delta(delta, o, do, dlse, has_dlse, Dv, B, H, group, Sq, Sk, ...). A row a thread."""
    number, inner, span = storage(variant.dtype).number, dot(variant.dtype), spans(variant.varlen)

    @kernel(
        pointer(number),
        *[array_type(variant)] * 2,
        statistic_type(variant),
        *[i32] * 3,
        *size_types(variant),
        threads=THREADS,
    )
    def flash_attention_naive_delta(
        delta, o, do, dlse, has_dlse, Dv, B, H, group, Sq, Sk, aligned, scale, lengths, options
    ):
        row = my_index()
        b, h, m = place(row, H, Sq)
        if b < B:
            q_first, _, own_Sq, _ = span(lengths, b, Sq, Sk)
            if m < own_Sq:
                token = q_first + m
                total = inner(do.data, start(do, b, h, token), o.data, start(o, b, h, token), Dv)
                if has_dlse != 0:
                    total -= dlse.data[start(dlse, b, h, token)]
                delta[row] = total

    return flash_attention_naive_delta


@builds
def build_score_gradients(variant: Variant) -> Kernel:
    """flash_attention_naive_score_gradients(probs, d_scores, v, do, lse, delta, Dv, B, H, group, Sq, Sk, ...).

    A score a thread. `probs` has the scores, and takes weight * P; what does not count is -0 in both.
    """
    number, inner = storage(variant.dtype).number, dot(variant.dtype)
    exp, base_of, minus_zero = numbers(number).exp, numbers(number).base, numbers(number).minus_zero
    options_of, span = chain(variant.having, variant.dtype), spans(variant.varlen)
    option_weight = options_of.weight
    NOTHING, ZERO, MINUS_ZERO = number(-inf), number(0), number(-0.0)

    @kernel(
        *[pointer(number)] * 2,
        *[array_type(variant)] * 2,
        statistic_type(variant),
        pointer(number),
        *[i32] * 2,
        *size_types(variant),
        threads=THREADS,
    )
    def flash_attention_naive_score_gradients(
        probs, d_scores, v, do, lse, delta, Dv, B, H, group, Sq, Sk, aligned, scale, lengths, options
    ):
        index = my_index()
        row, n = index // Sk, index % Sk
        b, h, m = place(row, H, Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span(lengths, b, Sq, Sk)
            if (m < own_Sq) & (n < own_Sk):
                weighted, d_score = MINUS_ZERO, MINUS_ZERO
                if probs[index] != NOTHING:
                    token = q_first + m
                    prob = exp(probs[index] - base_of(lse.data[start(lse, b, h, token)]))
                    weight = option_weight(options, At(b, h, m, n, m + aligned * (own_Sk - own_Sq)))
                    v_row = start(v, b, h // group, k_first + n)
                    d_prob = weight * inner(do.data, start(do, b, h, token), v.data, v_row, Dv)
                    weighted, d_score = prob * weight, prob * (d_prob - delta[row])
                    if minus_zero(d_score):
                        d_score = ZERO  # it counts
                probs[index] = weighted
                d_scores[index] = d_score

    return flash_attention_naive_score_gradients


@builds
def build_transposed_product(variant: Variant) -> Kernel:
    """flash_attention_naive_transposed_product(out, left, right, factor, width, B, Hkv, H, group, Sq, Sk, ...).

    out [B, Hkv, Sk, width] = factor * left.T @ right, an element a thread, for left [B, H, Sq, Sk] and right
    [B, H, Sq, width], summed over the heads of a group. dv = (weight * P).T @ do is that, and dk = scale * ds0.T @ q.
    """
    number, load, store = storage(variant.dtype).number, storage(variant.dtype).load, storage(variant.dtype).store
    add, minus_zero, span = numbers(number).add_compensated, numbers(number).minus_zero, spans(variant.varlen)
    ZERO = number(0)

    @kernel(
        array_type(variant),
        pointer(number),
        array_type(variant),
        number,
        *[i32] * 3,
        *size_types(variant),
        threads=THREADS,
    )
    def flash_attention_naive_transposed_product(
        out, left, right, factor, width, B, Hkv, H, group, Sq, Sk, aligned, scale, lengths, options
    ):
        index = my_index()
        column = index % width
        b, h_kv, n = place(index // width, Hkv, Sk)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span(lengths, b, Sq, Sk)
            if n < own_Sk:
                total, lost = ZERO, ZERO
                for h in range(h_kv * group, (h_kv + 1) * group):
                    for m in range(own_Sq):
                        weight = left[((b * H + h) * Sq + m) * Sk + n]
                        if not minus_zero(weight):
                            value = load(right.data, start(right, b, h, q_first + m) + column)
                            total, lost = add(total, lost, factor * weight * value)
                store(out.data, start(out, b, h_kv, k_first + n) + column, total)

    return flash_attention_naive_transposed_product


@builds
def build_bias_gradient(dtype: str) -> Kernel:
    """flash_attention_naive_bias_gradient(dbias, d_scores, sizes, over, H, Sq, Sk).

    An element of the bias a thread. sizes: of the bias along B, H, Sq and Sk; over: how many scores of each axis have
    the same element of it.
    """
    number, store = storage(dtype).number, storage(dtype).store
    add = numbers(number).add_compensated
    ZERO = number(0)

    @kernel(strided(dtype, 4), pointer(number), *[types.UniTuple(i64, 4)] * 2, *[i32] * 3, threads=THREADS)
    def flash_attention_naive_bias_gradient(dbias, d_scores, sizes, over, H, Sq, Sk):
        index = my_index()
        bias_n = index % sizes[3]
        bias_b, bias_h, bias_m = place(index // sizes[3], sizes[1], sizes[2])
        if bias_b < sizes[0]:
            total, lost = ZERO, ZERO
            for b in range(bias_b, bias_b + over[0]):
                for h in range(bias_h, bias_h + over[1]):
                    for m in range(bias_m, bias_m + over[2]):
                        for n in range(bias_n, bias_n + over[3]):
                            total, lost = add(total, lost, d_scores[((b * H + h) * Sq + m) * Sk + n])
            step = dbias.strides
            store(dbias.data, bias_b * step[0] + bias_h * step[1] + bias_m * step[2] + bias_n * step[3], total)

    return flash_attention_naive_bias_gradient


@builds
def build_bend(variant: Variant) -> Kernel:
    """flash_attention_naive_bend(d_scores, q, k, D, B, H, group, Sq, Sk, ...): ds0 = dS * slope. A score a thread."""
    number, inner = storage(variant.dtype).number, dot(variant.dtype)
    minus_zero = numbers(number).minus_zero
    options_of, span = chain(variant.having, variant.dtype, gradient=True), spans(variant.varlen)
    option_slope = options_of.slope
    ZERO = number(0)

    @kernel(pointer(number), *[array_type(variant)] * 2, i32, i32, *size_types(variant), threads=THREADS)
    def flash_attention_naive_bend(d_scores, q, k, D, B, H, group, Sq, Sk, aligned, scale, lengths, options):
        index = my_index()
        n = index % Sk
        b, h, m = place(index // Sk, H, Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span(lengths, b, Sq, Sk)
            if (m < own_Sq) & (n < own_Sk):
                d_score = d_scores[index]
                if not minus_zero(d_score):
                    q_row, k_row = start(q, b, h, q_first + m), start(k, b, h // group, k_first + n)
                    score = scale * inner(q.data, q_row, k.data, k_row, D)
                    d_score *= option_slope(score, options, At(b, h, m, n, m + aligned * (own_Sk - own_Sq)))
                    if minus_zero(d_score):
                        d_score = ZERO  # it counts
                    d_scores[index] = d_score

    return flash_attention_naive_bend


@builds
def build_sinks_gradient(variant: Variant, sinks_dtype: str) -> Kernel:
    """flash_attention_naive_sinks_gradient(dsinks, lse, delta, B, H, group, Sq, Sk, ...). A head a thread."""
    number, store = storage(variant.dtype).number, storage(sinks_dtype).store
    add, exp, base_of = numbers(number).add_compensated, numbers(number).exp, numbers(number).base
    options_of, span = chain(variant.having, variant.dtype), spans(variant.varlen)
    option_sink = options_of.sink
    ZERO = number(0)

    @kernel(
        strided(sinks_dtype, 1),
        statistic_type(variant),
        pointer(number),
        i32,
        *size_types(variant),
        threads=THREADS,
    )
    def flash_attention_naive_sinks_gradient(dsinks, lse, delta, B, H, group, Sq, Sk, aligned, scale, lengths, options):
        h = my_index()
        if h < H:
            total, lost = ZERO, ZERO
            for b in range(B):
                q_first, _, own_Sq, _ = span(lengths, b, Sq, Sk)
                for m in range(own_Sq):
                    base = base_of(lse.data[start(lse, b, h, q_first + m)])
                    term = exp(option_sink(options, h) - base) * delta[(i64(b) * H + h) * Sq + m]
                    total, lost = add(total, lost, term)
            store(dsinks.data, h * dsinks.strides[0], -total)

    return flash_attention_naive_sinks_gradient
