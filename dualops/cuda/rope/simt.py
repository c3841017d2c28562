"""rope: a thread turns the same pairs in several heads of a token, so that it fetches their cos and sin once.

    1  my token, my column of 16 bytes in each half of the rotary dimensions, my first head
    2  cos, sin of my pairs, from the token's row of the tables
    3  for my heads, `heads` of them at a time: load both pieces of each, turn their pairs, store both

A head's D elements are `columns` columns: one is 16 bytes (or one element where those are not aligned) of each half,
and beyond R of the rest, which is copied. `lanes` threads share the heads of a token and of a column. Where heads are
neighbours in memory, as where projections were reshaped to heads, they are threads of one block, which so reads whole
tokens; elsewhere a block reads many tokens of one head, and a token's lanes are far apart.
Interleaved pairs lie in the same pieces, and differ in whom they are turned with.

Registers: 2 * heads pieces of 16 bytes, and cos and sin of a piece. No shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Any

from ..backend import Kernel, builds, cuda, i64, kernel, verb
from ..tile import access, storage
from .call import Variant, argument_types, find, start, table_row


@dataclass(frozen=True)
class SimtConfig:
    """How columns are dealt to threads."""

    threads: int  # of a block
    blocks: int  # that run on an SM at once, at the least: caps the registers
    heads: int  # that a thread has under way
    aligned: bool  # columns are of 16 bytes
    wide_tables: bool  # rows of the tables begin at multiples of 16 bytes
    neighbours: bool  # the heads of a token lie side by side


@builds
def build(config: SimtConfig, variant: Variant) -> Kernel:
    """rope_simt(q_rotated, k_rotated, q, k, cos, sin, positions, sizes, turn, columns, lanes)."""
    number = storage(variant.dtype).number
    vector, load, store = access(variant.dtype, config.aligned, once=True)
    row_of, load_table = table_row(variant.positions), _table_loader(config, variant)
    THREADS, HEADS, VECTOR = config.threads, config.heads, vector
    PIECES, ELEMENTS = 2 * vector, 2 * vector * config.heads
    PARTIAL, NEIGHBOURS = variant.partial, config.neighbours
    ALONE = variant.interleaved and vector == 1  # a piece is half a pair
    ZERO, turn_pairs = number(0), _turning(variant.interleaved, vector)

    @kernel(*argument_types(variant), i64, i64, threads=config.threads, min_blocks=config.blocks)
    def rope_simt(q_rotated, k_rotated, q, k, cos, sin, positions, sizes, turn, columns, lanes):
        index = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        column, index = index % columns, index // columns
        if NEIGHBOURS:
            lane, token = index % lanes, index // lanes
        else:
            lane, token = index // sizes.tokens, index % sizes.tokens
        if (token < sizes.tokens) & (lane < lanes):
            b, s = token // sizes.S, token % sizes.S
            first = column * VECTOR
            second = first + sizes.half
            turns = first < sizes.half if PARTIAL else True
            row, there = row_of(positions, b, s, sizes)
            cos_frag = cuda.local.array(VECTOR, number)
            sin_frag = cuda.local.array(VECTOR, number)
            load_table(cos_frag, cos, start(cos, b, row), first, second, turns & there)
            load_table(sin_frag, sin, start(sin, b, row), first, second, turns & there)
            for i in range(VECTOR):
                sin_frag[i] *= turn
            if ALONE & turns:
                first, second = 2 * column, 2 * column + 1
            q_from, k_from = start(q, b, s), start(k, b, s)
            q_to, k_to = start(q_rotated, b, s), start(k_rotated, b, s)
            frag = cuda.local.array(ELEMENTS, number)
            for h0 in range(lane, sizes.heads, lanes * HEADS):
                for j in range(HEADS):
                    h = h0 + j * lanes
                    x, at = find(q, k, q_from, k_from, h, sizes)
                    load(frag, j * PIECES, x, at + first, turns & (h < sizes.heads), ZERO)
                    load(frag, j * PIECES + VECTOR, x, at + second, h < sizes.heads, ZERO)
                for j in range(HEADS):
                    if turns:
                        turn_pairs(frag, j * PIECES, cos_frag, sin_frag)
                    h = h0 + j * lanes
                    y, at = find(q_rotated, k_rotated, q_to, k_to, h, sizes)
                    store(y, at + first, turns & (h < sizes.heads), frag, j * PIECES)
                    store(y, at + second, h < sizes.heads, frag, j * PIECES + VECTOR)

    return rope_simt


def _turning(interleaved: bool, vector: int) -> Callable[..., Any]:
    """A verb (frag, at, cos_frag, sin_frag): turn the pairs of the two pieces at frag[at : at + 2 * vector]."""
    VECTOR = vector
    STEP, APART = (2, 1) if interleaved else (1, vector)  # from a pair to the next; inside a pair

    @verb
    def turn_pairs(frag, at, cos_frag, sin_frag):
        for i in range(VECTOR):
            x1, x2 = frag[at + i * STEP], frag[at + i * STEP + APART]
            frag[at + i * STEP] = x1 * cos_frag[i] - x2 * sin_frag[i]
            frag[at + i * STEP + APART] = x2 * cos_frag[i] + x1 * sin_frag[i]

    return turn_pairs


def _table_loader(config: SimtConfig, variant: Variant) -> Callable[..., Any]:
    """A verb (frag, table, row, first, second, keep): what the pairs of a column are turned by, NaN without `keep`.

    Halves share the angles of the column; interleaved, each piece has those of its own pairs, half as many.
    """
    own = access(variant.dtype, config.aligned).vector
    split = variant.interleaved and own > 1
    run = own // 2 if split else own
    kept = storage(variant.table_dtype)
    wide = config.wide_tables and run % kept.vector == 0
    load = kept.load_vector if wide else access(variant.table_dtype, False).load
    RUN, VECTOR, NAN = run, kept.vector if wide else 1, kept.number(nan)

    @verb
    def load_run(frag, at, table, index, keep):
        for i in range(0, RUN, VECTOR):
            load(frag, at + i, table.data, index + i, keep, NAN)

    @verb
    def load_halves(frag, table, row, first, second, keep):
        load_run(frag, 0, table, row + first, keep)

    @verb
    def load_neighbours(frag, table, row, first, second, keep):
        load_run(frag, 0, table, row + first // 2, keep)
        load_run(frag, RUN, table, row + second // 2, keep)

    return load_neighbours if split else load_halves
