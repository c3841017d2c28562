"""Retention on Hopper, and its gradient: which problems the rung takes, its launches and their tensor maps.

chunks.py      the kernel: one pass
wide.py        the same where heads are wide
fragments.py   where accumulators stand; states from and to memory
head_decay.py  what is left of one token at another, of gamma
step_decay.py  the same of log_decay, by the tables of step_tables.py
hidden.py      elements of a result that tokens must not reach which are not seen
config.py      tiles
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ....spec import ArrayMeta, Problem
from ....spec.meta import Strided
from ...arrays import cdiv
from ...device import Device
from ...maps import Mapped
from ...plans import Choice
from ...step import Step
from ...tile.products import THREADS
from ...tile.warpgroup import ROWS
from ...views import Boxed, boxed, how_stored, whole
from .. import simt
from ..arguments import Call, is_varlen, workspace
from ..marks import marks_steps, marks_workspace
from ..passes import Pass, States, backward_passes, forward_pass
from ..simt_launches import step_gradient_bytes, step_gradient_steps, step_gradient_workspace
from ..simt_states import build_walk
from .chunks import build_chunks
from .config import BOX, CHUNK, DTYPE, SLACK, Config, Sm90Config, Walk, WideConfig, padded
from .wide import build_wide

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
    wide, stepwise, widths = p.D > WIDEST or p.Dv > WIDEST, "log_decay" in p.arrays, _widths(p, roles)
    if not p.B * p.H:
        return
    config = WideConfig() if wide else Sm90Config(stepwise=stepwise)
    blocks = [int(p.B * p.H * config.slices(*each)) for each in widths]
    segments = segments_of(p, blocks)
    if (min(blocks) * segments < LEAST_BLOCKS) != few:
        return
    loaded, stored = _loaded(roles), [names[-1] for names in roles]
    if wide and (stepwise or any(is_shared(metas[name]) for name in loaded)):
        return
    if not all(metas[name].size for name in stored) or any(_boxed(metas, name) is None for name in loaded):
        return
    if any(how_stored(metas, name, False) != "boxes" for name in stored):
        return
    parts = 3 if "state" in results or "dinitial_state" in results else 1
    config = replace(config, parts=parts, segments=segments)
    room = max(config.shared_bytes(*each) for each in widths) + SLACK
    if "dlog_decay" in results:
        room = max(room, step_gradient_bytes(p, simt.by_chunks(p, results)[1]))
    if room <= device.shared_memory_per_block:
        reason = "few sequences, most of the GPU rests" if few else "enough sequences"
        what = "a sequence" if segments == 1 else f"one of {segments} segments of a sequence"
        of = f"a slice of {what}" if wide else what
        told = f"a block walks {of} in chunks of {config.chunk} tokens, the state in registers: {reason}"
        steps, made = partial(_steps, p, results, config, roles), _workspace(p, results, config)
        yield Choice("sm90", config, told, steps, made, maps=_maps(p, metas, roles, config.chunk))


def _widths(problem: Problem, roles: tuple[tuple[str, ...], ...]) -> list[tuple[int, int]]:
    """Of each pass, those of its q and of its v: a kernel is built for them."""
    width = {"q": int(problem.D), "k": int(problem.D), "v": int(problem.Dv), "do": int(problem.Dv)}
    return [(width[names[0]], width[names[2]]) for names in roles]


def _loaded(roles: tuple[tuple[str, ...], ...]) -> list[str]:
    """What comes to shared memory, each once."""
    return sorted({name for names in roles for name in names[:-1]})


def is_shared(meta: ArrayMeta) -> bool:
    """Whether all heads of [B, H, S, width] are one in memory."""
    return meta.shape[1] > 1 and meta.strides[1] == 0


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
    made = _segment_states(p, config)
    if made:
        made |= marks_workspace(p)
    if "dlog_decay" in results:
        made |= step_gradient_workspace(p, simt.by_chunks(p, results)[0])
    return made


def _segment_states(problem: Problem, config: Config) -> dict[str, ArrayMeta]:
    p = problem
    shape = (p.B * config.segments, p.H, p.D * p.Dv)
    return {"segments": workspace(p, shape)} if config.segments > 1 else {}


def _steps(
    problem: Problem,
    results: Mapping[str, ArrayMeta],
    config: Config,
    roles: tuple[tuple[str, ...], ...],
) -> Sequence[Step]:
    """The launches of each pass, one after another, or side by side where a block walks a sequence."""
    p, backward = problem, roles is BACKWARD
    chunk = config.chunk
    passes: Sequence[Pass] = backward_passes(p, results, {}, chunk) if backward else [forward_pass(p, results, chunk)]
    steps: list[Step] = []
    gradient = "dlog_decay" in results
    sums = marks_steps(p, passes[0].logs, passes[0].ends, passes[0].call) if gradient or config.segments > 1 else []
    for each, names in zip(passes, roles, strict=True):
        maps = [f"{name}_map" for name in names]
        if config.segments == 1:
            step = _walk(p, each, maps, config, each.states, beside=backward)
            steps.append(step._replace(overlaps=bool(steps)))
        else:
            steps += _segment_steps(p, each, maps, config)
    more = step_gradient_steps(p, results, *simt.by_chunks(p, results), kept=False) if gradient else []
    return [*sums, *steps, *more]


def _segment_steps(problem: Problem, each: Pass, maps: Sequence[str], config: Config) -> list[Step]:
    """What each segment adds to the state, the state before each, and the pass from there."""
    p, call, ends = problem, each.call, each.states
    size = call.D * call.Dv
    between = Strided("segments", (config.segments * p.H * size, size, call.Dv, 1))
    states = whole(_segment_states(p, config), "segments", 3)
    known = each.decay, each.ends, _call(p, each, config)
    flags = int(bool(ends.initial.data)), int(bool(ends.final.data))
    missing = -p.Sk % config.chunk if call.direction < 0 else 0  # of the last chunk, where those that go back begin
    adds = _walk(p, each, maps, config, States(final=between), looks=False)
    walk = Step(
        build_walk(p.dtype, **each.variant.options),
        (p.B * p.H * cdiv(size, THREADS),),
        (states, ends.initial, ends.final, *known, size, call.Dv, *flags, missing),
    )
    return [adds, walk, _walk(p, each, maps, config, States(initial=between))]


def _walk(
    problem: Problem,
    each: Pass,
    maps: Sequence[str],
    config: Config,
    states: States,
    *,
    looks: bool = True,
    beside: bool = False,
) -> Step:
    """A launch of the kernel, which begins with a state and leaves one as `states` says."""
    p, call, widths = problem, each.call, (int(each.call.D), int(each.call.Dv))
    begins, finishes = bool(states.initial.data), bool(states.final.data)
    walk = Walk(begins, finishes, back=call.direction < 0, beside=beside, looks=looks)
    # one kernel, however many segments there are; keys in parts where what it leaves becomes a result
    own = replace(config, parts=config.parts if finishes and each.states.final.data else 1, segments=1)
    segments = config.segments if looks or each.states.final.data else config.segments - 1  # nobody needs the last sum
    decay = each.logs if each.variant.stepwise else each.gamma
    known = decay, _call(p, each, config), p.H * call.D * call.Dv, segments
    args = (*maps, each.q, each.k, each.v, states.initial, states.final, *known)
    apart = (int(not is_shared(p.arrays[x.data])) for x in (each.q, each.k, each.v))
    blocks, slices = p.B * p.H * segments, own.slices(*widths)
    if isinstance(own, WideConfig):
        kernel, args = build_wide(own, padded(widths[0]), walk), (*args, slices)
    else:
        kernel, args = build_chunks(own, padded(widths[1]), walk), (*args, *apart)
    return Step(kernel, (blocks * slices,), args, own.shared_bytes(*widths))


def _call(problem: Problem, each: Pass, config: Config) -> Call:
    """What a pass is told: `state_chunk` tokens are a segment."""
    tokens = cdiv(cdiv(problem.Sk, config.chunk), config.segments) * config.chunk
    return each.call._replace(state_chunk=tokens, slots=config.segments)
