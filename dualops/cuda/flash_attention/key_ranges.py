"""Key ranges of varlen, which may overlap: launches around the kernels of a rung.

    before: cu_seqlens_k = cumulative sum of k_lengths        one warp
    after the gradient: dk[t] = sum of a sequence's dk at t   over the sequences whose range has t, in the order of b

Kernels read k and v from k_starts[b] on. They number tiles of keys by cu_seqlens_k, as if the sequences followed one
another, and write dk and dv of sequence b to rows cu_seqlens_k[b] and following of arrays of their own ("parts"),
rounded to the storage dtype. So no two sequences write the same row. Sums are float32 (float64 for float64), rounded
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ...spec import ArrayMeta, Problem
from ...spec.meta import contiguous_strides
from ..compiler.backend import Kernel, builds, cuda, i32, kernel, u32
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice, Choices
from ..launch.step import Step, leaves, nested
from ..launch.views import boundary, by_token, how_stored, start, strided, whole
from ..tile.numbers import numbers
from ..tile.rows import FULL_WARP, shfl_idx_i32, vote_ballot
from ..tile.storage import access, storage

THREADS, LANES, STEPS = 256, 32, 5
WARPS = THREADS // LANES
ENDS = "cu_seqlens_k"
PARTS = {"dk": "dk of each sequence", "dv": "dv of each sequence"}


@builds
def build_ends() -> Kernel:
    """ends_of_lengths(ends, lengths, B): ends [B + 1] from lengths [B], by one warp."""

    @kernel(*[strided("int32", 1)] * 2, i32, threads=LANES)
    def ends_of_lengths(ends, lengths, B):
        lane, each = i32(cuda.threadIdx.x), i32((B + (LANES - 1)) // LANES)
        first, last = min(i32(lane * each), B), min(i32((lane + 1) * each), B)
        own = i32(0)
        for b in range(first, last):
            own = i32(own + boundary(lengths, b))
        end = own  # the sum of my lengths and those of earlier lanes
        for step in range(STEPS):
            before = shfl_idx_i32(end, max(i32(lane - (1 << step)), i32(0)), FULL_WARP)
            if lane >= 1 << step:
                end = i32(end + before)
        end = i32(end - own)
        if lane == 0:
            ends.data[0] = end
        for b in range(first, last):
            end = i32(end + boundary(lengths, b))
            ends.data[b + 1] = end

    return ends_of_lengths


@builds
def build_sum(dtype: str, aligned: bool) -> Kernel:
    """sum_of_ranges(x, parts, ends, starts, B, tokens, heads, width): one token per warp.

    A lane has 16 bytes at once if aligned.
    """
    mem, number = access(dtype, aligned), storage(dtype).number
    num, VECTOR = numbers(number), mem.vector

    @kernel(*[strided(dtype, 3)] * 2, *[strided("int32", 1)] * 2, *[i32] * 4, threads=THREADS)
    def sum_of_ranges(x, parts, ends, starts, B, tokens, heads, width):
        token, lane = i32(i32(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // LANES), i32(cuda.threadIdx.x % LANES)
        if token >= tokens:
            return
        total, part = cuda.local.array(VECTOR, number), cuda.local.array(VECTOR, number)
        for first in range(0, heads * width, LANES * VECTOR):
            place = i32(first + lane * VECTOR)
            head, column, there = i32(place // width), i32(place % width), place < heads * width
            for e in range(VECTOR):
                total[e] = num.zero
            for b_first in range(0, B, LANES):
                b, row = i32(b_first + lane), i32(-1)  # the row of sequence b's part, if it has the token
                if b < B:
                    before, at = boundary(ends, b), i32(token - boundary(starts, b))
                    if at >= 0 and at < boundary(ends, b + 1) - before:
                        row = i32(before + at)
                found, n = u32(vote_ballot(i32(row >= 0), FULL_WARP)), i32(0)
                while found != u32(0):
                    if found & u32(1):
                        part_row = start(parts, i32(0), head, shfl_idx_i32(row, n, FULL_WARP))
                        mem.load(part, 0, parts.data, part_row + column, there, num.zero)
                        for e in range(VECTOR):
                            total[e] += part[e]
                    found, n = u32(found >> u32(1)), i32(n + 1)
            mem.store(x.data, start(x, i32(0), head, token) + column, there, total, 0)

    return sum_of_ranges


def with_key_ranges(choices: Choices) -> Choices:
    """Return a rung's choices. A call with key ranges gets those of the call whose sequences follow one another."""

    def found(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
        if "k_starts" not in problem.arrays:
            yield from choices(problem, results, device)
            return
        p, more = problem, workspace(problem, results)
        packed = Problem(p.spec, p.dtype, p.dims, p.params, {**p.arrays, ENDS: more[ENDS]})
        parts = {name: more.get(PARTS.get(name, ""), meta) for name, meta in results.items()}
        for choice in choices(packed, parts, device):
            steps = partial(around, choice.steps, packed, results, parts)
            yield choice._replace(steps=steps, workspace={**choice.workspace, **more})

    return found


def workspace(problem: Problem, results: Mapping[str, ArrayMeta]) -> dict[str, ArrayMeta]:
    """Return cu_seqlens_k, and for a gradient the parts of dk and dv."""
    p, device = problem, problem.arrays["k"].device
    found = {ENDS: ArrayMeta((p.B + 1,), "int32", (1,), device, 0)}
    for name, meta in results.items():
        if name in PARTS:
            shape = (p.packed_k, *meta.shape[1:])
            found[PARTS[name]] = ArrayMeta(shape, meta.dtype, contiguous_strides(shape), device, 0)
    return found


def around(
    steps: Callable[[], Sequence[Step]],
    problem: Problem,
    results: Mapping[str, ArrayMeta],
    parts: Mapping[str, ArrayMeta],
) -> Sequence[Step]:
    """Return the launches of a rung with those before and after."""
    p, (ends, lengths, starts) = problem, (whole(problem.arrays, name, 1) for name in (ENDS, "k_lengths", "k_starts"))
    found = [Step(build_ends(), (1,), (ends, lengths, p.B)), *map(_into_parts, steps())]
    for name in [name for name in PARTS if name in results]:
        tokens, heads, width = results[name].shape
        build = build_sum(p.dtype, all(how_stored(metas, name, True) == "vectors" for metas in (results, parts)))
        arrays = by_token(results, name, True), by_token(parts, name, True)._replace(data=PARTS[name])
        args = (*arrays, ends, starts, p.B, tokens, heads, width)
        found.append(Step(build, (cdiv(tokens, WARPS),), args))
    return found


def _into_parts(step: Step) -> Step:
    """Return the launch with parts of dk and dv in their place."""
    names = (PARTS.get(arg, arg) if isinstance(arg, str) else arg for arg in leaves(step.args))
    return step._replace(args=nested(step.args, names))
