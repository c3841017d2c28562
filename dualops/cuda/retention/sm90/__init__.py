"""Retention on Hopper, and its gradient: which problems the rung takes, its launches and their tensor maps.

chunks.py      the kernel: one pass
fragments.py   decay on accumulators, states from and to memory
hidden.py      elements of a result that tokens must not reach which are not seen
config.py      tiles
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ....spec import ArrayMeta, Problem
from ...device import Device
from ...maps import Mapped
from ...plans import Choice
from ...step import Step
from ...tile.warpgroup import ROWS
from ...views import boxed, how_stored
from ..arguments import is_varlen
from ..passes import Pass, backward_passes, forward_pass
from .chunks import DTYPE, build_chunks
from .config import BOX, CHUNK, SLACK, Sm90Config, Walk, padded

WIDEST = 128  # D and Dv
LEAST_SEQUENCES = 16  # batches times heads, from which it is chosen
# which arrays play the roles of q, k, v and o, in each pass of `passes`
FORWARD = (("q", "k", "v", "o"),)
BACKWARD = (("do", "v", "k", "dq"), ("k", "q", "do", "dv"), ("v", "do", "q", "dk"))


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The tiles, where there are enough sequences for blocks that walk one each."""
    return _choices(problem, results, device, FORWARD, few=False)


def few_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The same, where there are fewer, and simt's many blocks come first."""
    return _choices(problem, results, device, FORWARD, few=True)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Those of the gradient, where there are enough sequences."""
    return _choices(problem, results, device, BACKWARD, few=False)


def few_backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The same, where there are fewer."""
    return _choices(problem, results, device, BACKWARD, few=True)


def _choices(
    problem: Problem,
    results: Mapping[str, ArrayMeta],
    device: Device,
    roles: tuple[tuple[str, ...], ...],
    *,
    few: bool,
) -> Iterator[Choice]:
    p, metas = problem, {**problem.arrays, **results}
    if p.dtype != DTYPE or not device.has_wgmma or is_varlen(p) or p.form != "chunk" or p.normalize is not None:
        return
    if (p.B * p.H < LEAST_SEQUENCES) != few or p.D > WIDEST or p.Dv > WIDEST:
        return
    loaded, stored = _loaded(roles), [names[-1] for names in roles]
    if not all(metas[name].size for name in stored) or any(boxed(metas, name, False) is None for name in loaded):
        return
    if any(how_stored(metas, name, False) != "boxes" for name in stored):
        return
    config = Sm90Config(parts=3 if "state" in results or "dinitial_state" in results else 1)
    if max(config.shared_bytes(padded(int(width))) for width in (p.D, p.Dv)) + SLACK <= device.shared_memory_per_block:
        reason = "few sequences, most of the GPU rests" if few else "enough sequences"
        told = f"a block walks a sequence in chunks of {CHUNK} tokens, the state in registers: {reason}"
        yield Choice("sm90", config, told, partial(_steps, p, results, config, roles), maps=_maps(p, metas, roles))


def _loaded(roles: tuple[tuple[str, ...], ...]) -> list[str]:
    """What comes to shared memory, each once."""
    return sorted({name for names in roles for name in names[:-1]})


def _maps(problem: Problem, metas: Mapping[str, ArrayMeta], roles: tuple[tuple[str, ...], ...]) -> dict[str, Mapped]:
    """The tensor maps of the launches."""
    lines = dict.fromkeys(_loaded(roles), CHUNK) | {names[-1]: ROWS for names in roles}
    found = [each for name in lines if (each := boxed(metas, name, False))]
    return {
        f"{each.name}_map": Mapped(each.name, problem.dtype, each.shape, each.strides, (1, 1, lines[each.name], BOX))
        for each in found
    }


def _steps(
    problem: Problem,
    results: Mapping[str, ArrayMeta],
    config: Sm90Config,
    roles: tuple[tuple[str, ...], ...],
) -> Sequence[Step]:
    p, backward = problem, roles is BACKWARD
    passes: Sequence[Pass] = backward_passes(p, results, {}, CHUNK) if backward else [forward_pass(p, results, CHUNK)]
    steps = []
    for each, names in zip(passes, roles, strict=True):
        states, Dv = each.states, padded(int(each.call.Dv))
        begins, finishes = bool(states.initial.data), bool(states.final.data)
        walk = Walk(begins, finishes, back=each.call.direction < 0, beside=backward)
        own = config if finishes else replace(config, parts=1)
        maps = [f"{name}_map" for name in names]
        args = (*maps, each.q, each.k, each.v, states.initial, states.final, each.gamma, each.call)
        build = build_chunks(own, Dv, walk)
        steps.append(Step(build, (p.B * p.H,), args, own.shared_bytes(Dv), overlaps=bool(steps)))
    return steps
