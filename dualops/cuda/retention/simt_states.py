"""The states between the chunks: what each chunk adds, all chunks at once, and then a scan over the chunks.

    1  for each chunk of T tokens, at once:    A [D, Dv] = kept_scale * sum_t gamma^(T - t - later) * k_t^T v_t
    2  for each element, chunk after chunk:    the state before the chunk replaces A in memory,
                                               state = gamma^T * state + A

A state is written, read and written again. Then the rows of its chunk read it. The norm [D] is the state for v = 1. If
scores have terms, it is the state of a column of ones. A block of 16 x 16 threads has a tile of a state in step 1, and
a thread has an element in step 2. Sums over the S / T chunks are compensated.

Shared memory of step 1: itemsize * (LONGEST_CHUNK + TOKENS * (BLOCK_D + BLOCK_V + 8)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ...spec.meta import compute_dtype
from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, u32, verb
from ..launch.views import number_type, start, strided
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, mma_atb
from ..tile.shared import Part, Shared, Tile
from ..tile.storage import access, storage
from ..tile.vector_load import vector_tile
from .arguments import LONGEST_CHUNK, OF_COLUMNS, Variant, call_type, origin, slot_of, span, state_type
from .decays import decays_of

AHEAD = 8  # chunks whose contributions a thread of the walk loads ahead
NORM_THREADS = 64


class StatesLayout(NamedTuple):
    """The layout of shared memory."""

    weights: int  # of a chunk's tokens
    k: Tile  # [tokens, BLOCK_D]
    v: Tile  # [tokens, BLOCK_V]
    nbytes: int


@dataclass(frozen=True)
class StatesConfig:
    """A tile of a state: a thread has tile_d rows of `groups` times `near` columns."""

    tile_d: int
    groups: int
    near: int = 4
    lanes: int = LANES
    tokens: int = 32  # in shared memory at a time
    min_blocks: int = 1

    @cached_property
    def threads(self) -> int:
        return self.lanes**2

    @cached_property
    def block_d(self) -> int:
        return self.lanes * self.tile_d

    @cached_property
    def block_v(self) -> int:
        return self.lanes * self.near * self.groups

    def layout(self, dtype: str, *, aligned: bool = False) -> StatesLayout:
        """Return the layout. aligned: rows of the arrays are whole vectors."""
        shared = Shared(dtype, self.threads)
        weights = shared.vector(LONGEST_CHUNK)
        k = vector_tile(shared, self.tokens, self.block_d, aligned=aligned)
        v = vector_tile(shared, self.tokens, self.block_v, aligned=aligned, weighted=True)
        return StatesLayout(weights, k, v, shared.nbytes)

    def shared_bytes(self, dtype: str) -> int:
        return self.layout(dtype).nbytes


@verb
def fewer(call, count):
    """Return how many tokens the last chunk is short of a whole one. In a backward pass with the same chunks it is the
    first.
    """
    rest = count % call.state_chunk
    return call.state_chunk - rest if rest != 0 else rest


def chunk_of(mirrored: bool) -> Callable[..., Any]:
    """Return the verb (call, chunk, head) -> batch, head, the sequence's first token and number of tokens, the chunk's
    first row and the end of its rows. head: of all sequences. mirrored: a backward pass has the chunks of the forward
    pass.
    """

    @verb
    def rows(call, chunk, head):
        b, h = head // call.H, head % call.H
        first, _, count = span(call, b)
        t0 = chunk * call.state_chunk
        if mirrored:
            t0 -= fewer(call, count)
        return b, h, first, count, max(t0, 0) if mirrored else t0, min(t0 + call.state_chunk, count)

    return rows


def token_weights(variant: Variant, threads: int) -> Callable[..., None]:
    """Return the verb (smem, at, weights, place, rows, mine, call): write the factor of each token of a chunk; 0 beyond
    them. place: batch, head and the token of row 0. rows: the chunk's first and its end.
    """
    num, decays = numbers(storage(variant.dtype).number), decays_of(variant.dtype, variant.stepwise)

    @verb
    def put(smem, at, weights, place, rows, mine, call):
        (b, h, token0), (t0, end) = place, rows
        for n in range(cuda.threadIdx.x, LONGEST_CHUNK, threads):
            t, factor = t0 + n, num.zero
            if t < end:
                factor = decays.between(mine, t + call.later, end) * call.kept_scale
                if call.column_weighted != 0:
                    factor *= weights.data[start(weights, b, h, token0 + call.direction * t)]
            smem[at + n] = factor

    return put


def contributions_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of the arguments of a kernel that computes what each chunk adds to a state."""
    dtype, decay = variant.dtype, decays_of(variant.dtype, variant.stepwise).argument
    numbers_type = number_type(dtype, 3)
    return numbers_type, *[strided(dtype, 3)] * 2, numbers_type, decay, call_type(dtype), i64


@builds
def build_contributions(config: StatesConfig, variant: Variant, mirrored: bool) -> Kernel:
    """retention_contributions(states, k, v, weights, decay, call, chunks): step 1. chunks: those of a sequence."""
    mem, decays, rows_of = storage(variant.dtype), decays_of(variant.dtype, variant.stepwise), chunk_of(mirrored)
    put_weights = token_weights(variant, config.threads)
    vec = access(compute_dtype(variant.dtype), variant.aligned and config.near == 4)
    tile = config.layout(variant.dtype, aligned=variant.aligned)
    kv = mma_atb(mem.number, tile.k, tile.v, config.tile_d, config.near, config.lanes)

    @kernel(*contributions_types(variant), threads=config.threads, min_blocks=config.min_blocks)
    def retention_contributions(states, k, v, weights, decay, call, chunks):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        line = cuda.threadIdx.x // config.lanes
        d_blocks = (call.D + config.block_d - 1) // config.block_d
        v_blocks = (call.Dv + config.block_v - 1) // config.block_v
        part, place = i64(cuda.blockIdx.x) % (d_blocks * v_blocks), i64(cuda.blockIdx.x) // (d_blocks * v_blocks)
        d0, e0 = part // v_blocks * config.block_d, part % v_blocks * config.block_v
        chunk = place % chunks
        b, h, first, count, t0, end = rows_of(call, chunk, place // chunks)
        if t0 >= count:
            return
        token0 = origin(call, first, count)
        mine = decays.of(decay, call, b, h, first, count)
        put_weights(smem, tile.weights, weights, (b, h, token0), (t0, end), mine, call)

        acc = kv.fragment()
        kv.clear(acc)
        for t in range(t0, end, config.tokens):
            token = token0 + call.direction * t
            k_step, v_step = call.direction * k.strides[2], call.direction * v.strides[2]
            k_start, v_start = start(k, b, h, token) + d0, start(v, b, h, token) + e0
            cuda.syncthreads()
            tile.k.load(smem, Part(k.data, k_start, k_step, end - t, call.D - d0, 0))
            tile.v.load(smem, Part(v.data, v_start, v_step, end - t, call.Dv - e0, tile.weights + (t - t0)))
            cuda.syncthreads()
            kv.add(acc, smem)  # acc [BLOCK_D, BLOCK_V] += K.T @ V

        state = slot_of(call, first, b, chunk) * states.strides[0] + h * states.strides[1]
        for i in range(kv.rows):
            d = d0 + line * kv.rows + i
            for c in range(0, kv.columns, vec.vector):
                e = e0 + kv.column(c)
                vec.store(states.data, state + d * call.Dv + e, (d < call.D) & (e < call.Dv), acc, i * kv.columns + c)

    return retention_contributions


@builds
def build_norms(dtype: str, stepwise: bool, mirrored: bool) -> Kernel:
    """retention_norms(norms, x, weights, terms, decay, call, chunks): step 1 for the norms; x is k, or v."""
    mem, decays = storage(dtype), decays_of(dtype, stepwise)
    num, rows_of = numbers(mem.number), chunk_of(mirrored)

    @kernel(
        number_type(dtype, 3),
        strided(dtype, 3),
        *[number_type(dtype, 3)] * 2,
        decays.argument,
        call_type(dtype),
        i64,
        threads=NORM_THREADS,
    )
    def retention_norms(norms, x, weights, terms, decay, call, chunks):
        width = call.Dv if call.normed == OF_COLUMNS else call.D
        blocks = (width + NORM_THREADS - 1) // NORM_THREADS
        place = i64(cuda.blockIdx.x) // blocks
        e = i64(cuda.blockIdx.x) % blocks * NORM_THREADS + cuda.threadIdx.x
        chunk = place % chunks
        b, h, first, count, t0, end = rows_of(call, chunk, place // chunks)
        if (t0 >= count) | (e >= width):
            return
        token0 = origin(call, first, count)
        mine = decays.of(decay, call, b, h, first, count)
        total = num.zero
        for t in range(t0, end):
            token = token0 + call.direction * t
            factor = decays.between(mine, t + call.later, end)
            if call.column_term != 0:
                term = terms.data[start(terms, b, h, token)]
                factor *= weights.data[start(weights, b, h, token)] * term if term != num.zero else num.zero
            total += factor * mem.load(x.data, start(x, b, h, token) + e)
        slot = slot_of(call, first, b, chunk)
        norms.data[slot * norms.strides[0] + h * norms.strides[1] + e] = total * call.kept_scale

    return retention_norms


@verb
def place_in(state, b, h, e, width):
    """Return the index of number e of a state whose rows have `width` numbers."""
    row = i64(u32(e) // u32(width))
    step = state.strides
    return b * step[0] + h * step[1] + row * step[2] + (e - row * width) * step[3]


@builds
def build_walk(dtype: str, stepwise: bool, mirrored: bool) -> Kernel:
    """retention_walk(states, ends, decay, call, size, width, missing): step 2, in place.

    size: numbers of a state. ends: a `State` whose rows have `width` numbers. missing: how many tokens the first chunk
    is short of a whole one; with `mirrored` chunks the kernel computes it.
    """
    mem, num, decays = storage(dtype), numbers(storage(dtype).number), decays_of(dtype, stepwise)

    @kernel(number_type(dtype, 3), state_type(dtype), decays.argument, call_type(dtype), *[i64] * 3, threads=THREADS)
    def retention_walk(states, ends, decay, call, size, width, missing):
        # in 32 bits: divisions of 64 bits took as long as the rest
        blocks = u32(size + (THREADS - 1)) // u32(THREADS)
        head = u32(cuda.blockIdx.x) // blocks
        e = i64(i32((u32(cuda.blockIdx.x) - head * blocks) * u32(THREADS)) + cuda.threadIdx.x)
        b, h = i64(head // u32(call.H)), i64(head % u32(call.H))
        first, _, count = span(call, b)
        if e >= size:
            return
        tokens, each = i32(count), i32(call.state_chunk)
        mine = decays.of(decay, call, b, h, first, count)
        full = num.one
        if not stepwise:
            full = decays.between(mine, 0, each)
        less = i32(missing)
        if mirrored:
            less = i32(fewer(call, tokens))
        state, lost = num.zero, num.zero
        if ends.begins != 0:
            state = ends.initial.data[place_in(ends.initial, b, h, e, width)]
        chunks = i32(u32(less + tokens + (each - 1)) // u32(each))
        added = chunks if ends.finishes != 0 else i32(chunks - 1)  # chunks whose contribution exists
        at, step = slot_of(call, first, b, 0) * states.strides[0] + h * states.strides[1] + e, states.strides[0]
        contributions, before, chunk = cuda.local.array(AHEAD, mem.number), i32(0), i32(0)
        while chunk < chunks:
            there = at
            for i in range(AHEAD):
                contributions[i] = num.zero
                if chunk + i < added:
                    contributions[i] = states.data[there]
                there += step
            for i in range(AHEAD):
                if chunk + i < chunks:
                    states.data[at] = state
                    factor, end = full, i32(min(i32(before + each), tokens))
                    if chunk + i == 0:
                        end = i32(min(i32(each - less), tokens))
                    if stepwise | (end - before != each):
                        factor = decays.between(mine, before, end)
                    before = end
                    state, lost = num.add_compensated(state * factor, lost * factor, contributions[i])
                at += step
            chunk = i32(chunk + AHEAD)
        if ends.finishes != 0:
            ends.final.data[place_in(ends.final, b, h, e, width)] = state

    return retention_walk
