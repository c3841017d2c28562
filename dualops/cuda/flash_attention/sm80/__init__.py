"""Attention by mma.sync: which problems the rung serves, and its launches.

forward.py, dq.py, dkv.py   the kernels
config.py                   their tiles
rows.py                     how rows are copied and stored
backward.py                 the launches of the gradient
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ....spec import ArrayMeta, Problem
from ....spec.meta import itemsize
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.plans import Choice
from ...launch.step import Step
from ...launch.views import SIZES, by_token
from ...tile.warp_mma import MMA_TYPES
from ..arguments import has_usual_scale, inputs_of, is_varlen, sizes, variant
from ..options import having
from ..tile_scheduler import section_of, tiled_work
from .config import ROWS, Sm80Config, configs
from .forward import build_forward
from .rows import vectors_of

WIDEST = 256


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for attention in 16 bits, best first."""
    if problem.dtype in MMA_TYPES:
        yield from _choices(problem, results, device)


def float32_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield tiles for float32. They come after simt, which is as fast: 12.7 ms against 13.2 (s4096d64, H200)."""
    if problem.dtype == "float32":
        yield from _choices(problem, results, device)


def _choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    p = problem
    if not device.has_mma_bf16 or p.D > WIDEST or p.Dv > WIDEST or not has_usual_scale(p):
        return
    if not results["o"].size:
        return
    options = [option.name for option, _ in having(p).variants]
    vectors = vectors_of({**p.arrays, **results})
    many = device.has_wgmma and p.Sq > ROWS and not is_varlen(p)
    many = many and all(count * itemsize(p.dtype) == SIZES[0] for count in vectors)
    for config, reason in configs(p.D, p.Dv, itemsize(p.dtype), options, many):
        shared_bytes = config.min_blocks * config.shared_bytes(p.D, p.Dv, itemsize(p.dtype))
        yield Choice("sm80", config, reason, partial(forward_steps, p, results, config), shared_bytes=shared_bytes)


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm80Config) -> Sequence[Step]:
    p, metas, varlen, heads = problem, {**problem.arrays, **results}, is_varlen(problem), problem.B * problem.H
    build = build_forward(config, variant(p), p.return_lse, vectors_of(metas))
    o, lse = (by_token(metas, name, varlen) for name in ("o", "lse"))
    args = (o, lse, inputs_of(metas, varlen), tiled_work(p, section_of(p), sizes(p)))
    return [Step(build, (heads * cdiv(p.Sq, config.block_q),), args, config.shared_bytes(p.D, p.Dv, itemsize(p.dtype)))]
