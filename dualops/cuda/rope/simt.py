"""rope: a thread rotates the same pairs in several heads of a token, so that it loads their cos and sin once.

    1  a thread has a token, a column of 16 bytes in each half of the rotary dimensions, and a first head
    2  load cos, sin of its pairs, from the token's row of the tables
    3  for its heads, `heads` of them at a time: load both pieces of each, rotate their pairs, store both

A head's D elements are `columns` columns. A column is 16 bytes (one element if rows are not aligned to that) of each
half. From R on, a column has elements that are copied. `lanes` threads share the heads of a token and column. If a
token's heads are neighbours in memory, as in a reshaped projection, these threads are in one block, which then reads
whole tokens. Otherwise a block reads many tokens of one head, and the lanes of a token are in different blocks.
Interleaved pairs have the same pieces, but both elements of a pair are in one piece.

Registers: 2 * heads pieces of 16 bytes, and cos and sin of a piece. No shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, Members, builds, cuda, i64, kept_noun, kernel, members, verb
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..tile.numbers import numbers
from ..tile.storage import access, storage
from .arguments import Variant, argument_types, arguments, find, start, starts, table_rows, variant, width


@dataclass(frozen=True)
class SimtConfig:
    """How columns are distributed to threads."""

    threads: int  # per block
    blocks: int  # least number of blocks that fit on an SM: caps the registers
    heads: int  # heads that a thread processes at once
    aligned: bool  # whether columns have 16 bytes
    wide_tables: bool  # whether rows of the tables begin at multiples of 16 bytes
    neighbours: bool  # whether the heads of a token are neighbours in memory


@builds
def build(config: SimtConfig, variant: Variant) -> Kernel:
    """Build rope_simt(rotated, x, tables, sizes, turn, columns, lanes)."""
    number, vec = storage(variant.dtype).number, access(variant.dtype, config.aligned, once=True)
    num, rows, pairs = numbers(number), table_rows(variant.positions), _pairs(config, variant)

    @kernel(*argument_types(variant), i64, i64, threads=config.threads, min_blocks=config.blocks)
    def rope_simt(rotated, x, tables, sizes, turn, columns, lanes):
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
            row, there = rows.of(tables.positions, b, s, sizes)
            cos_frag = cuda.local.array(vec.vector, number)
            sin_frag = cuda.local.array(vec.vector, number)
            pairs.load(cos_frag, tables.cos, start(tables.cos, b, row), first, second, turns & there)
            pairs.load(sin_frag, tables.sin, start(tables.sin, b, row), first, second, turns & there)
            for i in range(vec.vector):
                sin_frag[i] *= turn
            if pairs.split & turns:
                first, second = 2 * column, 2 * column + 1
            x_begin, y_begin = starts(x, b, s), starts(rotated, b, s)
            frag = cuda.local.array(config.heads * pairs.size, number)
            for h0 in range(lane, sizes.heads, lanes * config.heads):
                for j in range(config.heads):
                    h = h0 + j * lanes
                    mem, at = find(x, x_begin, h, sizes)
                    vec.load(frag, j * pairs.size, mem, at + first, turns & (h < sizes.heads), num.zero)
                    vec.load(frag, j * pairs.size + vec.vector, mem, at + second, h < sizes.heads, num.zero)
                for j in range(config.heads):
                    if turns:
                        pairs.turn(frag, j * pairs.size, cos_frag, sin_frag)
                    h = h0 + j * lanes
                    mem, at = find(rotated, y_begin, h, sizes)
                    vec.store(mem, at + first, turns & (h < sizes.heads), frag, j * pairs.size)
                    vec.store(mem, at + second, h < sizes.heads, frag, j * pairs.size + vec.vector)

    return rope_simt


@kept_noun
def _pairs(config: SimtConfig, variant: Variant) -> Members:
    """The verbs of a column's pairs and their angles.

    Both halves of a column share its angles. Interleaved, each piece has its own angles, half as many.
    """
    own = access(variant.dtype, config.aligned).vector
    whole = variant.interleaved and own > 1  # a piece has whole pairs
    run = own // 2 if whole else own
    table_mem = storage(variant.table_dtype)
    wide = config.wide_tables and run % table_mem.vector == 0
    table_vec, num = access(variant.table_dtype, wide), numbers(table_mem.number)
    RUN, OWN = run, own
    STEP, APART = (2, 1) if variant.interleaved else (1, own)  # from a pair to the next; inside a pair

    @verb
    def _load_run(frag, at, table, index, keep):
        for i in range(0, RUN, table_vec.vector):
            table_vec.load(frag, at + i, table.data, index + i, keep, num.nan)

    @verb
    def load(frag, table, row, first, second, keep):
        """Load cos or sin of both pieces, NaN without `keep`."""
        if not whole:
            _load_run(frag, 0, table, row + first, keep)
        else:
            _load_run(frag, 0, table, row + first // 2, keep)
            _load_run(frag, RUN, table, row + second // 2, keep)

    @verb
    def turn(frag, at, cos_frag, sin_frag):
        """Rotate the pairs of the two pieces at frag[at : at + size]."""
        for i in range(OWN):
            x1, x2 = frag[at + i * STEP], frag[at + i * STEP + APART]
            frag[at + i * STEP] = x1 * cos_frag[i] - x2 * sin_frag[i]
            frag[at + i * STEP + APART] = x2 * cos_frag[i] + x1 * sin_frag[i]

    return members(
        locals(),
        size=2 * own,  # elements of both pieces
        # whether a piece is one element, so that the other element of the pair is its neighbour in memory
        split=variant.interleaved and own == 1,
    )


# Speed as a share of a plain kernel with the same reads and writes: bf16, H200, 2026-11-21, 4 x 8192 tokens, 32 and 8
# heads of 128. A cap on registers for more blocks per SM costs 4 %, and spills with 8 heads per thread.
THREADS = 128
HEADS, ROUNDS = 4, 2  # 0.96, one round 0.93; 2 heads per round 0.96, 8: 0.96. Heads apart: 0.93, one round 0.92
WAVES, THREADS_PER_SM = 2, 640  # as many threads as the registers allow


def choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device, turn: float) -> Iterator[Choice]:
    """Yield the rotation, 16 bytes at a time if aligned. turn: see `arguments`."""
    config = config_of(problem, results)
    lanes = head_lanes(problem, config, device)
    reason = f"{lanes} threads share a token's heads"
    yield Choice("simt", config, reason, partial(steps, problem, results, turn, config, lanes))


def config_of(problem: Problem, results: Mapping[str, ArrayMeta]) -> SimtConfig:
    """Return the Config: 16 bytes at a time if every piece of every head begins at a multiple of that."""
    p, tables = problem, [problem.arrays[name] for name in ("cos", "sin")]
    vector, table_vector = storage(p.dtype).vector, storage(tables[0].dtype).vector
    heads = [*list(p.arrays.values())[:2], *results.values()]
    pieces = p.half % vector == 0 and (p.inplace or p.D % vector == 0)
    aligned = pieces and all(_aligned(meta, vector) for meta in heads)
    wide = all(_aligned(meta, table_vector) for meta in tables)
    return SimtConfig(THREADS, 1, HEADS, aligned, wide, _neighbours(problem))


def _neighbours(problem: Problem) -> bool:
    """Whether the heads of a token are neighbours in memory."""
    q = next(iter(problem.arrays.values()))
    return problem.S == 1 or (problem.H > 1 and q.strides[1] < q.strides[2])


def _aligned(meta: ArrayMeta, vector: int) -> bool:
    """Whether every row of an array begins at a multiple of 16 bytes, which are `vector` elements."""
    steps = (stride for size, stride in zip(meta.shape[:-1], meta.strides[:-1], strict=True) if size > 1)
    return meta.pointer % 16 == 0 and all(step % vector == 0 for step in steps)


def head_lanes(problem: Problem, config: SimtConfig, device: Device) -> int:
    """Return how many threads share the heads of a token.

    Each has two rounds of heads, so that cos and sin are loaded less often, or one if SMs would have too few threads.
    """
    p = problem
    most = cdiv(p.H + p.Hkv, config.heads)
    fewest = cdiv(most, ROUNDS)
    wanted = WAVES * device.sms * THREADS_PER_SM
    return max(fewest, min(most, cdiv(wanted, max(p.B * p.S * _columns(p, config), 1))))


def _columns(problem: Problem, config: SimtConfig) -> int:
    """Return the columns of a head."""
    return width(problem) // (storage(problem.dtype).vector if config.aligned else 1)


def steps(
    problem: Problem, results: Mapping[str, ArrayMeta], turn: float, config: SimtConfig, lanes: int
) -> list[Step]:
    """Return the launch, with `lanes` threads for the heads of a token; none for an empty call."""
    columns = _columns(problem, config)
    blocks = cdiv(problem.B * problem.S * columns * lanes, config.threads)
    args = (*arguments(problem, results, turn), columns, lanes)
    if not blocks:  # in place, and R is 0
        return []
    return [Step(build(config, variant(problem)), (blocks,), args)]
