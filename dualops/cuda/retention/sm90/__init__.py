"""Retention forward on Hopper: which problems the rung takes, its launch and its tensor maps.

forward.py     the kernel
fragments.py   decay on accumulators, states from and to memory
hidden.py      elements of o that later tokens must not reach
config.py      tiles
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ....spec import ArrayMeta, Problem
from ...device import Device
from ...maps import Mapped
from ...plans import Choice
from ...step import Step
from ...tile.warpgroup import ROWS
from ...views import boxed, how_stored
from ..arguments import is_varlen
from ..passes import forward_pass
from .config import BOX, CHUNK, SLACK, Sm90Config, padded
from .forward import DTYPE, build_forward

WIDEST = 128  # D and Dv
LEAST_SEQUENCES = 16  # batches times heads, from which it is chosen
NAMES = ("q", "k", "v", "o")


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The tiles, where there are enough sequences for blocks that walk one each."""
    if problem.B * problem.H >= LEAST_SEQUENCES:
        yield from _choices(problem, results, device, "enough sequences")


def few_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The same, where there are fewer, and simt's many blocks come first."""
    if problem.B * problem.H < LEAST_SEQUENCES:
        yield from _choices(problem, results, device, "few sequences, most of the GPU rests")


def _choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device, reason: str) -> Iterator[Choice]:
    p, metas = problem, {**problem.arrays, **results}
    if p.dtype != DTYPE or not device.has_wgmma or is_varlen(p) or p.form != "chunk" or p.normalize is not None:
        return
    if p.D > WIDEST or p.Dv > WIDEST or not results["o"].size:
        return
    if any(boxed(metas, name, False) is None for name in NAMES[:3]) or how_stored(metas, "o", False) != "boxes":
        return
    config = Sm90Config(parts=3 if p.return_state else 1)
    if config.shared_bytes(padded(int(p.Dv))) + SLACK <= device.shared_memory_per_block:
        told = f"a block walks a sequence in chunks of {CHUNK} tokens, the state in registers: {reason}"
        steps = partial(forward_steps, p, results, config)
        yield Choice("sm90", config, told, steps, maps=forward_maps(p, metas))


def forward_maps(problem: Problem, metas: Mapping[str, ArrayMeta]) -> dict[str, Mapped]:
    """The tensor maps of the launch."""
    found = [each for name in NAMES if (each := boxed(metas, name, False))]
    return {
        f"{each.name}_map": Mapped(
            each.name, problem.dtype, each.shape, each.strides, (1, 1, ROWS if each.name == "o" else CHUNK, BOX)
        )
        for each in found
    }


def forward_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config) -> Sequence[Step]:
    p, each = problem, forward_pass(problem, results, CHUNK)
    Dv, states = padded(int(p.Dv)), each.states
    build = build_forward(config, Dv, bool(states.initial.data), bool(states.final.data))
    maps = [f"{name}_map" for name in NAMES]
    args = (*maps, each.q, each.k, each.v, states.initial, states.final, each.gamma, each.call)
    return [Step(build, (p.B * p.H,), args, config.shared_bytes(Dv))]
