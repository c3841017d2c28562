"""Fill the results of varlen tokens that belong to no sequence, for example padding after the last sequence.

An operator's kernels process sequences and write nothing to these tokens. Only the GPU knows where the last sequence
ends, so an additional launch of a few blocks checks. Usually it finds no such token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..spec import ArrayMeta, Problem
from ..spec.meta import Strided
from .compiler.backend import Kernel, builds, cuda, i32, i64, kernel, types, verb
from .launch.arrays import cdiv
from .launch.device import Device
from .launch.plans import Choice, Choices
from .launch.step import Step
from .launch.views import boundary, start, strided, whole
from .tile.storage import storage

THREADS = 256
WARPS = THREADS // 32
MOST_BLOCKS = 512


class Filled(NamedTuple):
    """A result by token: the rows of each token, their width, and the number to fill them with."""

    x: Any  # along batch, head and token
    heads: Any
    width: Any
    value: Any


def filled(metas: Mapping[str, ArrayMeta], name: str, value: float = 0.0, *, heads_first: bool = False) -> Filled:
    """Return the Filled of a result [total, H, width] or [total, H]; heads_first: [H, total]."""
    shape, strides = metas[name].shape, metas[name].strides
    token, head = (1, 0) if heads_first else (0, 1)
    width = shape[2] if len(shape) == 3 else 1
    return Filled(Strided(name, (0, strides[head], strides[token])), shape[head], width, value)


@builds
def build_unowned(dtype: str, count: int) -> Kernel:
    """Build unowned_tokens(results, ends, B, tokens) for `count` results of one dtype. A warp fills a row at a time."""
    mem = storage(dtype)
    kind = types.NamedTuple((strided(dtype, 3), i32, i32, mem.number), Filled)

    @verb
    def fill(each, first, tokens):
        x, heads, width, value = each
        row = i64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
        while row < (tokens - first) * heads:
            at = start(x, i32(0), row % heads, first + row // heads)
            for column in range(i64(cuda.threadIdx.x % 32), width, 32):
                mem.store(x.data, at + column, value)
            row += i64(cuda.gridDim.x) * WARPS

    @kernel(types.UniTuple(kind, count), strided("int32", 1), i32, i32, threads=THREADS)
    def unowned_tokens(results, ends, B, tokens):
        first = i64(boundary(ends, B))
        for i in range(count):
            fill(results[i], first, tokens)

    return unowned_tokens


def unowned_steps(problem: Problem, metas: Mapping[str, ArrayMeta], ends: str, results: Iterable[Filled]) -> list[Step]:
    """Return a launch for each dtype among results of the same tokens. ends: the array of the sequences' ends."""
    by_dtype: dict[str, list[Filled]] = {}
    for each in results:
        by_dtype.setdefault(metas[each.x.data].dtype, []).append(each)
    steps = []
    for dtype, those in by_dtype.items():
        most = max(metas[each.x.data].size for each in those)
        if most:
            tokens = metas[those[0].x.data].size // (those[0].heads * those[0].width)
            rows = tokens * max(each.heads for each in those)
            args = (tuple(those), whole(problem.arrays, ends, 1), problem.B, tokens)
            build = build_unowned(dtype, len(those))
            steps.append(Step(build, (min(cdiv(rows, WARPS), MOST_BLOCKS),), args, resident=True))
    return steps


def with_steps(choices: Choices, more: Callable[[Problem, Mapping[str, ArrayMeta]], Sequence[Step]]) -> Choices:
    """Yield a rung's choices with more launches at the end. With no sequence, only these launches have blocks."""

    def found(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
        for choice in choices(problem, results, device):
            yield choice._replace(steps=after(choice.steps, problem, results))

    def after(
        steps: Callable[[], Sequence[Step]], problem: Problem, results: Mapping[str, ArrayMeta]
    ) -> Callable[[], Sequence[Step]]:
        return lambda: [*(step for step in steps() if all(step.grid)), *more(problem, results)]

    return found
