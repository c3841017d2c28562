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
from functools import cache

from ..backend import Kernel, Namespace, builds, cuda, i64, kernel, verb
from ..tile.numbers import numbers
from ..tile.storage import access, storage
from .arguments import Variant, argument_types, find, start, table_rows


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
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned, once=True)
    num, rows, pairs = numbers(mem.number), table_rows(variant.positions), _pairs(config, variant)

    @kernel(*argument_types(variant), i64, i64, threads=config.threads, min_blocks=config.blocks)
    def rope_simt(q_rotated, k_rotated, q, k, cos, sin, positions, sizes, turn, columns, lanes):
        index = i64(cuda.blockIdx.x) * config.threads + cuda.threadIdx.x
        column, index = index % columns, index // columns
        if config.neighbours:
            lane, token = index % lanes, index // lanes
        else:
            lane, token = index // sizes.tokens, index % sizes.tokens
        if (token < sizes.tokens) & (lane < lanes):
            b, s = token // sizes.S, token % sizes.S
            first = column * vec.vector
            second = first + sizes.half
            turns = first < sizes.half if variant.partial else True
            row, there = rows.of(positions, b, s, sizes)
            cos_frag = cuda.local.array(vec.vector, mem.number)
            sin_frag = cuda.local.array(vec.vector, mem.number)
            pairs.load(cos_frag, cos, start(cos, b, row), first, second, turns & there)
            pairs.load(sin_frag, sin, start(sin, b, row), first, second, turns & there)
            for i in range(vec.vector):
                sin_frag[i] *= turn
            if pairs.split & turns:
                first, second = 2 * column, 2 * column + 1
            q_from, k_from = start(q, b, s), start(k, b, s)
            q_to, k_to = start(q_rotated, b, s), start(k_rotated, b, s)
            frag = cuda.local.array(config.heads * pairs.size, mem.number)
            for h0 in range(lane, sizes.heads, lanes * config.heads):
                for j in range(config.heads):
                    h = h0 + j * lanes
                    x, at = find(q, k, q_from, k_from, h, sizes)
                    vec.load(frag, j * pairs.size, x, at + first, turns & (h < sizes.heads), num.zero)
                    vec.load(frag, j * pairs.size + vec.vector, x, at + second, h < sizes.heads, num.zero)
                for j in range(config.heads):
                    if turns:
                        pairs.turn(frag, j * pairs.size, cos_frag, sin_frag)
                    h = h0 + j * lanes
                    y, at = find(q_rotated, k_rotated, q_to, k_to, h, sizes)
                    vec.store(y, at + first, turns & (h < sizes.heads), frag, j * pairs.size)
                    vec.store(y, at + second, h < sizes.heads, frag, j * pairs.size + vec.vector)

    return rope_simt


class Pairs(Namespace):
    """The pairs of a column, and what they are turned by.

    Halves share the angles of the column; interleaved, each piece has those of its own pairs, half as many.
    """

    size: int  # elements of both pieces
    split: bool  # whether a piece is one element, and its neighbour in memory the other one of the pair
    load: Callable[..., None]  # (frag, table, row, first, second, keep): cos or sin of them, NaN without `keep`
    turn: Callable[..., None]  # (frag, at, cos_frag, sin_frag): those of the two pieces at frag[at : at + size]


@cache
def _pairs(config: SimtConfig, variant: Variant) -> Pairs:
    """The verbs of a kernel."""
    own = access(variant.dtype, config.aligned).vector
    whole = variant.interleaved and own > 1  # a piece has whole pairs
    run = own // 2 if whole else own
    table_mem = storage(variant.table_dtype)
    wide = config.wide_tables and run % table_mem.vector == 0
    table_vec, num = access(variant.table_dtype, wide), numbers(table_mem.number)
    RUN, OWN = run, own
    STEP, APART = (2, 1) if variant.interleaved else (1, own)  # from a pair to the next; inside a pair

    @verb
    def load_run(frag, at, table, index, keep):
        for i in range(0, RUN, table_vec.vector):
            table_vec.load(frag, at + i, table.data, index + i, keep, num.nan)

    @verb
    def load_halves(frag, table, row, first, second, keep):
        load_run(frag, 0, table, row + first, keep)

    @verb
    def load_neighbours(frag, table, row, first, second, keep):
        load_run(frag, 0, table, row + first // 2, keep)
        load_run(frag, RUN, table, row + second // 2, keep)

    @verb
    def turn(frag, at, cos_frag, sin_frag):
        for i in range(OWN):
            x1, x2 = frag[at + i * STEP], frag[at + i * STEP + APART]
            frag[at + i * STEP] = x1 * cos_frag[i] - x2 * sin_frag[i]
            frag[at + i * STEP + APART] = x2 * cos_frag[i] + x1 * sin_frag[i]

    return Pairs(
        size=2 * own,
        split=variant.interleaved and own == 1,
        load=load_neighbours if whole else load_halves,
        turn=turn,
    )
