"""Retention on Hopper, and its gradient: which problems the rung takes, its launches and their tensor maps.

chunks.py      the kernel: one pass
wide.py        the same where heads are wide
chunk_range.py  which chunks a block of either walks
fragments.py   where accumulators stand; states from and to memory
constant_decay.py  what is left of one token at another, of gamma
per_token_decay.py  the same of log_decay, by the tables of decay_tables.py, which decay_tables_feed.py hands over
nan_repair.py  elements of a result that tokens must not reach which are not seen
launches.py    those of a pass
config.py      tiles

The gradient with log_decay:

decay_grad_chunks.py  dq or dk, and what tokens have of the states between chunks; saved_states.py: these in memory
decay_grad_pairs.py  the pairs of a chunk, and all of it summed up; decay_row_sums.py: along their rows
step_launches.py  its launches; step_config.py: its tiles
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ....spec import ArrayMeta, Problem
from ...launch.device import Device
from ...launch.maps import Mapped
from ...launch.plans import Choice
from ...launch.step import Step
from ...launch.views import Boxed, boxed, how_stored
from ...tile.warpgroup import ROWS
from ..arguments import is_varlen
from ..decay_prefix_sums import prefix_sums_steps, prefix_sums_workspace
from ..passes import Pass, backward_passes, forward_pass
from .arguments import is_shared
from .config import BOX, CHUNK, DTYPE, SLACK, Config, Sm90Config, WideConfig
from .launches import SEGMENTS, between_segments, segment_states, walk_step
from .step_launches import step_gradient_bytes, step_gradient_steps, step_gradient_workspace

WIDEST = 128  # D and Dv of `chunks`
BLOCKS = 128  # for which sequences are cut into segments: on every GPU, so that bits are the same
LEAST_CHUNKS = 2  # of a segment
LEAST_BLOCKS = 16  # from which it is chosen
# which arrays play the roles of q, k, v and o, in each pass of `passes`
FORWARD = (("q", "k", "v", "o"),)
BACKWARD = (("do", "v", "k", "dq"), ("k", "q", "do", "dv"), ("v", "do", "q", "dk"))


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The tiles, where there are enough sequences, or segments of them, for blocks that walk one each."""
    return _choices(problem, results, device, FORWARD, few=False)


def few_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The same, where there are fewer, and simt's many blocks come first."""
    return _choices(problem, results, device, FORWARD, few=True)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Those of the gradient, where there are enough."""
    return _choices(problem, results, device, BACKWARD, few=False)


def few_backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The same, where there are fewer."""
    return _choices(problem, results, device, BACKWARD, few=True)


def segments_of(problem: Problem, blocks: Sequence[int]) -> int:
    """In how many segments a sequence is walked: one, where all passes fill half of a GPU.

    blocks: of each pass, were it one. Where there are more, passes run one after another.
    """
    if sum(blocks) > BLOCKS // 2:
        return 1
    segments = int(BLOCKS // max(blocks))
    return segments if problem.Sk >= segments * LEAST_CHUNKS * CHUNK else 1


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
    wide, stepwise, widths = p.D > WIDEST or p.Dv > WIDEST, "log_decay" in p.arrays, widths_of(p, roles)
    if not p.B * p.H:
        return
    config = WideConfig() if wide else Sm90Config(stepwise=stepwise)
    blocks, steps_too = [int(p.B * p.H * config.slices(*each)) for each in widths], "dlog_decay" in results
    segments = segments_of(p, blocks[:1] if steps_too else blocks)  # of one pass after another, or side by side
    if (min(blocks) * segments < LEAST_BLOCKS) != few:
        return
    loaded, stored = _loaded(roles), [names[-1] for names in roles]
    if wide and (stepwise or any(is_shared(metas[name]) for name in loaded)):
        return
    if not all(metas[name].size for name in stored) or any(_boxed(metas, name) is None for name in loaded):
        return
    if any(how_stored(metas, name, False) != "boxes" for name in stored):
        return
    parts = 3 if steps_too or "state" in results or "dinitial_state" in results else 1
    config = replace(config, parts=parts, segments=segments)
    room = max(config.shared_bytes(*each) for each in widths) + SLACK
    if steps_too:
        room = max(room, step_gradient_bytes(p) + SLACK)
    if room <= device.shared_memory_per_block:
        reason = "few sequences, most of the GPU rests" if few else "enough sequences"
        what = "a sequence" if segments == 1 else f"one of {segments} segments of a sequence"
        of = f"a slice of {what}" if wide else what
        told = f"a block walks {of} in chunks of {config.chunk} tokens, the state in registers: {reason}"
        steps, made = partial(steps_of, p, results, config, roles), _workspace(p, results, config)
        yield Choice("sm90", config, told, steps, made, maps=_maps(p, metas, roles, config.chunk))


def widths_of(problem: Problem, roles: tuple[tuple[str, ...], ...]) -> list[tuple[int, int]]:
    """Of each pass, those of its q and of its v: a kernel is built for them."""
    width = {"q": int(problem.D), "k": int(problem.D), "v": int(problem.Dv), "do": int(problem.Dv)}
    return [(width[names[0]], width[names[2]]) for names in roles]


def _loaded(roles: tuple[tuple[str, ...], ...]) -> list[str]:
    """What comes to shared memory, each once."""
    return sorted({name for names in roles for name in names[:-1]})


def _boxed(metas: Mapping[str, ArrayMeta], name: str) -> Boxed | None:
    """As boxes; heads that are one in memory are one there too."""
    meta = metas[name]
    if is_shared(meta):
        B, _, S, width = meta.shape
        meta = meta._replace(shape=(B, 1, S, width))
    return boxed({name: meta}, name, False)


def _maps(
    problem: Problem, metas: Mapping[str, ArrayMeta], roles: tuple[tuple[str, ...], ...], chunk: int
) -> dict[str, Mapped]:
    """The tensor maps of the launches."""
    lines = dict.fromkeys(_loaded(roles), chunk) | {names[-1]: ROWS for names in roles}
    found = [each for name in lines if (each := _boxed(metas, name))]
    return {
        f"{each.name}_map": Mapped(each.name, problem.dtype, each.shape, each.strides, (1, 1, lines[each.name], BOX))
        for each in found
    }


def _workspace(problem: Problem, results: Mapping[str, ArrayMeta], config: Config) -> dict[str, ArrayMeta]:
    """The state before each segment; with log_decay its sums for these, and what its gradient needs."""
    p = problem
    made = segment_states(p, config)
    if "log_decay" in p.arrays and SEGMENTS in made:
        made |= prefix_sums_workspace(p)
    return made | (step_gradient_workspace(p) if "dlog_decay" in results else {})


def steps_of(
    problem: Problem,
    results: Mapping[str, ArrayMeta],
    config: Config,
    roles: tuple[tuple[str, ...], ...],
) -> Sequence[Step]:
    """The launches of each pass, one after another, or side by side where a block walks a sequence."""
    p, backward = problem, roles is BACKWARD
    chunk = config.chunk
    passes: Sequence[Pass] = backward_passes(p, results, {}, chunk) if backward else [forward_pass(p, results, chunk)]
    sums = "marks" in _workspace(p, results, config)
    steps = list(prefix_sums_steps(p, passes[0].logs, passes[0].call)) if sums else []
    if "dlog_decay" in results:
        return [*steps, *step_gradient_steps(p, results, config)]
    for each, names in zip(passes, roles, strict=True):
        if config.segments == 1:
            step = walk_step(p, each, names, config, each.states, beside=backward)
            steps.append(step._replace(overlaps=bool(steps)))
        else:
            adds, between, begins = between_segments(p, each, config)
            steps += [walk_step(p, each, names, config, adds, looks=False), between]
            steps.append(walk_step(p, each, names, config, begins))
    return steps
