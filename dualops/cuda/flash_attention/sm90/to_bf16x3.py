"""The launch that writes float32 numbers as three parts of bfloat16 (`tile.split_bf16x3`), and the copies' maps.

A row of a copy has all upper parts, in whole boxes, then the middle and the lower ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ....spec import ArrayMeta, Problem
from ....spec.meta import contiguous_strides
from ...compiler.backend import Kernel, builds, cuda, f32, i32, i64, kernel, u32
from ...launch.arrays import cdiv
from ...launch.step import Step
from ...launch.tensor_map import Mapped
from ...launch.views import boxed, by_token, how_stored, start, strided
from ...tile.epilogue import st_global_kept_v4_b32
from ...tile.split_bf16x3 import PARTS, packed_parts, parts_of
from ...tile.storage import access
from ..arguments import is_varlen
from .config import BOX, padded

THREADS, EACH = 256, 4
NEAR = 8  # neighbours of a row that a thread takes, 16 bytes of each part
NAMES = {name: f"{name} in thirds" for name in ("q", "k", "v", "do")}


def rows_of(width: int) -> int:
    """Return how many rows a block has."""
    return THREADS * EACH * NEAR // padded(width)


@builds
def build_thirds(width: int, aligned: bool) -> Kernel:
    """flash_attention_thirds(parts, x, H, S): x [B, H, S, width] to parts [B, H, S, PARTS * padded(width)]. A thread
    splits 8 neighbours of a row.

    aligned: rows of x start and end at multiples of 16 bytes.
    """
    source, PITCH, ROWS = access("float32", aligned, once=True), padded(width), rows_of(width)
    EIGHTS = PITCH // NEAR
    LINES = THREADS // EIGHTS  # from a thread's row to its next

    @kernel(strided("bfloat16", 3), strided("float32", 3), *[i32] * 2, threads=THREADS)
    def flash_attention_thirds(parts, x, H, S):
        column, line = i32(cuda.threadIdx.x % EIGHTS * NEAR), i32(cuda.threadIdx.x // EIGHTS)
        blocks = (S + ROWS - 1) // ROWS
        head, m0 = cuda.blockIdx.x // blocks, cuda.blockIdx.x % blocks * ROWS + line
        b, h = i64(head // H), i64(head % H)
        some = cuda.local.array(EACH * NEAR, f32)
        for r in range(EACH):
            m = m0 + r * LINES
            first = start(x, b, h, m) + column
            for e in range(0, NEAR, source.vector):
                source.load(some, r * NEAR + e, x.data, first + e, (m < S) & (column + e < width), f32(0))
        words = cuda.local.array(PARTS * NEAR // 2, u32)
        for r in range(EACH):
            for pair in range(NEAR // 2):
                a_parts, b_parts = parts_of(some[r * NEAR + 2 * pair]), parts_of(some[r * NEAR + 2 * pair + 1])
                for part in range(PARTS):
                    words[part * NEAR // 2 + pair] = packed_parts(a_parts[part], b_parts[part])
            m = m0 + r * LINES
            first = start(parts, b, h, m) + column
            for part in range(PARTS):
                at = part * NEAR // 2
                four = words[at], words[at + 1], words[at + 2], words[at + 3]
                st_global_kept_v4_b32(parts.data, first + part * PITCH, i32(m < S), *four)

    return flash_attention_thirds


def thirds_of(problem: Problem, names: Iterable[str]) -> dict[str, ArrayMeta]:
    """Return the copies of these arrays, by names of their own."""
    found = {}
    for name in names:
        meta = problem.arrays[name]
        shape = (*meta.shape[:-1], PARTS * padded(meta.shape[-1]))
        found[NAMES[name]] = ArrayMeta(shape, "bfloat16", contiguous_strides(shape), meta.device, 0)
    return found


def thirds_maps(problem: Problem, lines: Mapping[str, int], prefix: str = "") -> dict[str, Mapped]:
    """Return the tensor maps of the copies, whose boxes have these lines."""
    copies = thirds_of(problem, lines)
    found = {name: boxed(copies, NAMES[name], is_varlen(problem)) for name in lines}
    return {
        f"{prefix}{name}_map": Mapped(each.name, "bfloat16", each.shape, each.strides, (1, 1, lines[name], BOX))
        for name, each in found.items()
        if each
    }


def thirds_steps(problem: Problem, names: Iterable[str]) -> list[Step]:
    """Return the launches that write the copies."""
    p, varlen, copies = problem, is_varlen(problem), thirds_of(problem, names)
    steps = []
    for name in names:
        meta = p.arrays[name]
        batches, heads, tokens = (1, meta.shape[1], meta.shape[0]) if varlen else meta.shape[:3]
        width = int(meta.shape[-1])  # a number, as a kernel is built for it
        build = build_thirds(width, how_stored(p.arrays, name, varlen) != "elements")
        arrays = by_token(copies, NAMES[name], varlen), by_token(p.arrays, name, varlen)
        steps.append(Step(build, (batches * heads * cdiv(tokens, rows_of(width)),), (*arrays, heads, tokens)))
    return steps
