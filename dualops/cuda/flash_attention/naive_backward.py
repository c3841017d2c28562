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

from ..compiler.backend import Kernel, builds, i32, i64, kernel, pointer, types
from ..launch.views import start, strided
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import Variant, array_type, size_types, spans, statistic_type
from .naive_forward import THREADS, inner_products, my_index, place
from .options import chain_of, pair_places
from .saved_lse import exponential_of


@builds
def build_delta(variant: Variant) -> Kernel:
    """flash_attention_naive_delta(delta, o, do, dlse, has_dlse, Dv, B, H, group, Sq, Sk, ...). A row a thread."""
    mem, inner, span = storage(variant.dtype), inner_products(variant.dtype), spans(variant.varlen)

    @kernel(
        pointer(mem.number),
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
            q_first, _, own_Sq, _ = span.of_batch(lengths, b, Sq, Sk)
            if m < own_Sq:
                token = q_first + m
                total = inner.product(do.data, start(do, b, h, token), o.data, start(o, b, h, token), Dv)
                if has_dlse != 0:
                    total -= dlse.data[start(dlse, b, h, token)]
                delta[row] = total

    return flash_attention_naive_delta


@builds
def build_score_gradients(variant: Variant) -> Kernel:
    """flash_attention_naive_score_gradients(probs, d_scores, v, do, lse, delta, Dv, B, H, group, Sq, Sk, ...).

    A score a thread. `probs` has the scores, and takes weight * P; what does not count is -0 in both.
    """
    mem, inner = storage(variant.dtype), inner_products(variant.dtype)
    num, span = numbers(mem.number), spans(variant.varlen)
    exponential = exponential_of(mem.number)
    chain, pair_at = chain_of(variant.having, variant.dtype), pair_places(mem.number)

    @kernel(
        *[pointer(mem.number)] * 2,
        *[array_type(variant)] * 2,
        statistic_type(variant),
        pointer(mem.number),
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
            q_first, k_first, own_Sq, own_Sk = span.of_batch(lengths, b, Sq, Sk)
            if (m < own_Sq) & (n < own_Sk):
                weighted, d_score, token = num.minus_zero, num.minus_zero, q_first + m
                row_lse = lse.data[start(lse, b, h, token)]
                at = pair_at(b, h, m, n, aligned * (own_Sk - own_Sq))
                # all that a NaN row sees is NaN
                if probs[index] != num.minus_inf or (row_lse != row_lse and chain.visible(options, at)):
                    prob = exponential(probs[index], row_lse)
                    weight = chain.weight(options, at)
                    v_row = start(v, b, h // group, k_first + n)
                    d_prob = weight * inner.product(do.data, start(do, b, h, token), v.data, v_row, Dv)
                    weighted, d_score = prob * weight, prob * (d_prob - delta[row])
                    if num.is_minus_zero(d_score):
                        d_score = num.zero  # it counts
                probs[index] = weighted
                d_scores[index] = d_score

    return flash_attention_naive_score_gradients


@builds
def build_transposed_product(variant: Variant) -> Kernel:
    """flash_attention_naive_transposed_product(out, left, right, factor, width, B, Hkv, H, group, Sq, Sk, ...).

    out [B, Hkv, Sk, width] = factor * left.T @ right, an element a thread, for left [B, H, Sq, Sk] and right
    [B, H, Sq, width], summed over the heads of a group. dv = (weight * P).T @ do is that, and dk = scale * ds0.T @ q.
    """
    mem, span = storage(variant.dtype), spans(variant.varlen)
    num = numbers(mem.number)

    @kernel(
        array_type(variant),
        pointer(mem.number),
        array_type(variant),
        mem.number,
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
            q_first, _, own_Sq, own_Sk = span.of_batch(lengths, b, Sq, Sk)
            if n < own_Sk:
                total, lost = num.zero, num.zero
                for h in range(h_kv * group, (h_kv + 1) * group):
                    for m in range(own_Sq):
                        weight = left[((b * H + h) * Sq + m) * Sk + n]
                        if not num.is_minus_zero(weight):
                            value = mem.load(right.data, start(right, b, h, q_first + m) + column)
                            total, lost = num.add_compensated(total, lost, factor * weight * value)
                mem.store(out.data, start(out, b, h_kv, span.key_out(lengths, b) + n) + column, total)

    return flash_attention_naive_transposed_product


@builds
def build_bias_gradient(dtype: str) -> Kernel:
    """flash_attention_naive_bias_gradient(dbias, d_scores, sizes, over, H, Sq, Sk).

    An element of the bias a thread. sizes: of the bias along B, H, Sq and Sk; over: how many scores of each axis have
    the same element of it.
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
    """flash_attention_naive_bend(d_scores, q, k, D, B, H, group, Sq, Sk, ...): ds0 = dS * slope. A score a thread."""
    mem, inner = storage(variant.dtype), inner_products(variant.dtype)
    num, span = numbers(mem.number), spans(variant.varlen)
    chain, pair_at = chain_of(variant.having, variant.dtype, gradient=True), pair_places(mem.number)

    @kernel(pointer(mem.number), *[array_type(variant)] * 2, i32, i32, *size_types(variant), threads=THREADS)
    def flash_attention_naive_bend(d_scores, q, k, D, B, H, group, Sq, Sk, aligned, scale, lengths, options):
        index = my_index()
        n = index % Sk
        b, h, m = place(index // Sk, H, Sq)
        if b < B:
            q_first, k_first, own_Sq, own_Sk = span.of_batch(lengths, b, Sq, Sk)
            if (m < own_Sq) & (n < own_Sk):
                d_score = d_scores[index]
                if not num.is_minus_zero(d_score):
                    q_row, k_row = start(q, b, h, q_first + m), start(k, b, h // group, k_first + n)
                    score = scale * inner.product(q.data, q_row, k.data, k_row, D)
                    d_score *= chain.slope(score, options, pair_at(b, h, m, n, aligned * (own_Sk - own_Sq)))
                    if num.is_minus_zero(d_score):
                        d_score = num.zero  # it counts
                    d_scores[index] = d_score

    return flash_attention_naive_bend


@builds
def build_sinks_gradient(variant: Variant, sinks_dtype: str) -> Kernel:
    """flash_attention_naive_sinks_gradient(dsinks, lse, delta, B, H, group, Sq, Sk, ...). A head a thread."""
    mem, sinks_mem = storage(variant.dtype), storage(sinks_dtype)
    num, span = numbers(mem.number), spans(variant.varlen)
    chain = chain_of(variant.having, variant.dtype)

    @kernel(
        strided(sinks_dtype, 1),
        statistic_type(variant),
        pointer(mem.number),
        i32,
        *size_types(variant),
        threads=THREADS,
    )
    def flash_attention_naive_sinks_gradient(dsinks, lse, delta, B, H, group, Sq, Sk, aligned, scale, lengths, options):
        h = my_index()
        if h < H:
            total, lost = num.zero, num.zero
            for b in range(B):
                q_first, _, own_Sq, _ = span.of_batch(lengths, b, Sq, Sk)
                for m in range(own_Sq):
                    base = num.base(lse.data[start(lse, b, h, q_first + m)])
                    term = num.exp(chain.sink(options, h) - base) * delta[(i64(b) * H + h) * Sq + m]
                    total, lost = num.add_compensated(total, lost, term)
            sinks_mem.store(dsinks.data, h * dsinks.strides[0], -total)

    return flash_attention_naive_sinks_gradient
