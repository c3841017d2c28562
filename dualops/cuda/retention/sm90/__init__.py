"""Retention on Hopper, and its gradient: which problems the rung takes, their tensor maps and launches.

chunks.py             the kernel: one pass
wide.py               the kernel for wide heads
decay_grad.py         log_decay's gradient from sums that the passes of dq and dk leave
config.py             tiles, argument records
chunk_decay.py        the decay between tokens of a chunk, and its tables for log_decay
states.py             positions of accumulators, the state in memory and shared memory, rounding errors of scores
state_sums.py         the update of the state, with 16 bits or all digits of float32
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ....spec import ArrayMeta, Problem
from ....spec.meta import Strided, compute_dtype
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.plans import Choice
from ...launch.step import Step
from ...launch.tensor_map import Mapped
from ...launch.views import Boxed, boxed, by_token, how_stored, whole
from ...tile.products import THREADS
from ...tile.warpgroup import ROWS
from ..arguments import Call, State, is_varlen, workspace
from ..decays import logs_of, prefix_sums_steps, prefix_sums_workspace
from ..passes import Pass, States, passes_of
from ..simt_states import build_walk
from .chunks import build_chunks
from .config import (
    BOX,
    CHUNK,
    DTYPE,
    SLACK,
    WARPS,
    Config,
    DecayGrad,
    Loaded,
    LoadedWithY,
    SegmentStates,
    Sm90Config,
    Walk,
    WideConfig,
    is_shared,
    loaded,
    padded,
)
from .decay_grad import build_decay_grad_sums
from .wide import build_wide

WIDEST = 128  # D and Dv of `chunks`
BLOCKS = 128  # sequences are cut into segments for this many blocks, on every GPU, for equal bits
LEAST_CHUNKS = 2  # of a segment
LEAST_BLOCKS = 16  # with fewer, other rungs come first, unless a sequence is short
ONE_CHUNK = 256  # tokens for which other rungs need one launch a pass
SHORT = 512  # tokens that a block walks in the time of their launches
# the arrays in the roles of q, k, v and o, for each pass of `passes`
FORWARD = (("q", "k", "v", "o"),)
BACKWARD = (("do", "v", "k", "dq"), ("k", "q", "do", "dv"), ("v", "do", "q", "dk"))


def segments_of(problem: Problem, blocks: Sequence[int]) -> int:
    """Return the number of segments of a sequence. It is one if all passes together fill half of a GPU.

    blocks: of each pass with one segment. Passes with more segments run one after another.
    """
    if sum(blocks) > BLOCKS // 2:
        return 1
    segments = int(BLOCKS // max(blocks))
    return segments if problem.Sk >= segments * LEAST_CHUNKS * CHUNK else 1


def _choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device, *, few: bool) -> Iterator[Choice]:
    p, metas, roles = problem, {**problem.arrays, **results}, BACKWARD if "do" in problem.arrays else FORWARD
    if p.dtype != DTYPE or not device.has_wgmma or is_varlen(p) or p.form != "chunk" or p.normalize is not None:
        return
    if not p.B * p.H:
        return
    wide, stepwise = p.D > WIDEST or p.Dv > WIDEST, "log_decay" in p.arrays
    width = {"q": int(p.D), "k": int(p.D), "v": int(p.Dv), "do": int(p.Dv)}
    widths = [(width[names[0]], width[names[2]]) for names in roles]  # of each pass's q and v
    config = WideConfig() if wide else Sm90Config(stepwise=stepwise)
    blocks = [int(p.B * p.H * config.slices(*each)) for each in widths]
    segments = segments_of(p, blocks)
    passes = 8 if "dlog_decay" in results else len(blocks)  # others need as many launches for log_decay's gradient
    short = ONE_CHUNK < p.Sk <= SHORT * passes and "state" not in results  # a state in three parts takes longer
    if (min(blocks) * segments < LEAST_BLOCKS and not short) != few:
        return
    stored = [names[-1] for names in roles]
    loaded = sorted({name for names in roles for name in names[:-1]})  # to shared memory
    if wide and (stepwise or any(is_shared(metas[name]) for name in loaded)):
        return
    if not all(metas[name].size and how_stored(metas, name, False) == "boxes" for name in stored):
        return
    lines = dict.fromkeys(loaded, config.chunk) | dict.fromkeys(stored, ROWS)
    boxes = [(each, lines[name]) for name in lines if (each := _boxed(metas, name))]
    if len(boxes) < len(lines):
        return
    parts = 3 if "state" in results or "dinitial_state" in results else 1
    config = replace(config, parts=parts, segments=segments)
    with_y = {False, "dlog_decay" in results}
    if max(config.shared_bytes(*each, y) for each in widths for y in with_y) + SLACK <= device.shared_memory_per_block:
        reason = "few sequences, most of the GPU rests" if few else "enough sequences, or short ones"
        what = "a sequence" if segments == 1 else f"one of {segments} segments of a sequence"
        of = f"a slice of {what}" if wide else what
        why = f"a block walks {of} in chunks of {config.chunk} tokens, the state in registers: {reason}"
        steps, made = partial(steps_of, p, results, config, roles), _workspace(p, results, config)
        maps = {f"{x.name}_map": Mapped(x.name, p.dtype, x.shape, x.strides, (1, 1, rows, BOX)) for x, rows in boxes}
        yield Choice("sm90", config, why, steps, made, maps=maps)


# tiles for forward and gradient; few: if few long sequences leave most of the GPU idle, and the many blocks of other
# rungs come first
choices, few_choices = (partial(_choices, few=few) for few in (False, True))


def _boxed(metas: Mapping[str, ArrayMeta], name: str) -> Boxed | None:
    """Return an array as boxes. Heads that share memory are one head there."""
    meta = metas[name]
    if is_shared(meta):
        B, _, S, width = meta.shape
        meta = meta._replace(shape=(B, 1, S, width))
    return boxed({name: meta}, name, False)


def _workspace(problem: Problem, results: Mapping[str, ArrayMeta], config: Config) -> dict[str, ArrayMeta]:
    """Return the state before each segment, with log_decay its prefix sums, and what log_decay's gradient needs."""
    p, made = problem, {}
    if config.segments > 1:
        made = {SEGMENTS: workspace(p, (p.B * config.segments, p.H, p.D * p.Dv)), **prefix_sums_workspace(p)}
    return made | (decay_grad_workspace(p) if "dlog_decay" in results else {})


def steps_of(
    problem: Problem, results: Mapping[str, ArrayMeta], config: Config, roles: tuple[tuple[str, ...], ...]
) -> Sequence[Step]:
    """Return the launches of each pass. They overlap if a block walks a whole sequence; otherwise they don't."""
    p, backward, passes = problem, roles is BACKWARD, passes_of(problem, results, config.chunk)
    sums = "prefix_sums" in _workspace(p, results, config)
    steps = list(prefix_sums_steps(p, passes[0].logs, passes[0].call)) if sums else []
    for each, names in zip(passes, roles, strict=True):
        walk, grad = partial(walk_step, p, each, names, config), "dlog_decay" in results and names[3] in Y
        if config.segments == 1:
            steps.append(walk(each.states, overlaps=backward, decay_grad=grad)._replace(overlaps=bool(steps)))
        else:
            adds, between, begins = between_segments(p, each, config)
            steps += [walk(adds, looks=False), between, walk(begins, decay_grad=grad)]
    return [*steps, decay_grad_sums_step(p, results, passes[0])] if "dlog_decay" in results else steps


# --- launches ----------------------------------------------------------------------------------------
# A pass is a walk. If sequences are few, launches before it find the states between segments. With log_decay's gradient
# the walks of dq and dk leave sums for it, and one launch follows.

SEGMENTS = "segments"  # the workspace of states between segments


def between_segments(problem: Problem, each: Pass, config: Config) -> tuple[States, Step, States]:
    """Return where a first launch leaves what each segment adds to the state, the launch that turns it into the state
    before each segment, and where the pass begins from there.
    """
    p, call, size = problem, each.call, each.call.D * each.call.Dv
    between = Strided(SEGMENTS, (config.segments * p.H * size, size, call.Dv, 1))
    states = Strided(SEGMENTS, (p.H * size, size, 1))
    missing = -p.Sk % config.chunk if call.direction < 0 else 0  # of the last chunk, with which passes back begin
    args = (states, each.states.state, each.decay, call_of(p, each, config), size, call.Dv, missing)
    kernel = build_walk(compute_dtype(p.dtype), each.variant.stepwise, False)
    walk = Step(kernel, (p.B * p.H * cdiv(size, THREADS),), args)
    return States(final=between), walk, States(initial=between)


def walk_step(
    problem: Problem,
    each: Pass,
    names: Sequence[str],
    config: Config,
    states: States,
    *,
    looks: bool = True,
    overlaps: bool = False,
    decay_grad: bool = False,
) -> Step:
    """Return a launch of the kernel, which begins with a state and leaves one as `states` says.

    names: the arrays in the roles of q, k, v and o. decay_grad: with the sums for log_decay's gradient.
    """
    p, call, widths = problem, each.call, (int(each.call.D), int(each.call.Dv))
    begins, finishes = bool(states.initial.data), bool(states.final.data)
    walk = Walk(begins, finishes, call.direction < 0, overlaps, looks, decay_grad)
    # one kernel for any number of segments; keys in parts if the state that it leaves becomes a result
    in_parts = finishes and bool(each.states.final.data)
    own = replace(config, parts=config.parts if in_parts else 1, segments=1)
    segments = config.segments if looks or each.states.final.data else config.segments - 1  # the last sum is not needed
    decay = each.logs if each.variant.stepwise else each.gamma
    ends = SegmentStates(states.initial, states.final, p.H * call.D * call.Dv, segments)
    to, args = f"{names[3]}_map", (ends, decay, call_of(p, each, config))
    blocks, slices = p.B * p.H * segments, own.slices(*widths)
    if isinstance(own, WideConfig):
        kernel, (maps, _) = build_wide(own, padded(widths[0]), walk), loaded(p, Loaded, names[:3])
        return Step(kernel, (blocks * slices,), (maps, to, each.inputs, *args, slices), own.shared_bytes(*widths))
    kernel, (maps, apart), grad = build_chunks(own, padded(widths[1]), walk), loaded(p, Loaded, names[:3]), ()
    if decay_grad:
        (maps, apart), grad = loaded(p, LoadedWithY, (*names[:3], Y[names[3]])), decay_grad_of(p, names[3])
    args = (maps, apart, to, each.inputs, grad, *args)
    return Step(kernel, (blocks,), args, own.shared_bytes(*widths, decay_grad))


def call_of(problem: Problem, each: Pass, config: Config) -> Call:
    """Return the sizes of a pass: `state_chunk` tokens are a segment."""
    tokens = cdiv(cdiv(problem.Sk, config.chunk), config.segments) * config.chunk
    return each.call._replace(state_chunk=tokens, slots=config.segments)


Y = {"dq": "q", "dk": "k"}  # the array that is multiplied with a pass's result for log_decay's gradient
RUN = 2  # chunks of a block that adds up the sums


def decay_grad_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return the sums of both passes' rows and chunks."""
    p = problem
    shapes = DecayGrad((p.B, p.H, p.Sk), *[(p.B, p.H, cdiv(p.Sk, CHUNK) * WARPS)] * 2)
    return {f"{name}_{kind}": workspace(p, shape) for name in Y for kind, shape in shapes._asdict().items()}


def decay_grad_of(problem: Problem, name: str) -> DecayGrad:
    """Return the sums of dq's or dk's pass."""
    made = decay_grad_workspace(problem)
    return DecayGrad(*(by_token(made, f"{name}_{kind}", False) for kind in DecayGrad._fields))


def decay_grad_sums_step(problem: Problem, results: Mapping[str, ArrayMeta], dq: Pass) -> Step:
    """Return the launch that adds up the sums of both passes."""
    p, chunks = problem, cdiv(problem.Sk, CHUNK)
    states = whole(p.arrays, "initial_state", 4), whole(results, "dinitial_state", 4)
    ends = State(*states, int(bool(states[0].data)), int("dstate" in p.arrays))
    sums = logs_of(results, "dlog_decay", False), decay_grad_of(p, "dq"), decay_grad_of(p, "dk")
    args = (*sums, dq.logs, ends, dq.call._replace(D=p.D, Dv=p.Dv), chunks)
    return Step(build_decay_grad_sums(RUN), (p.B * p.H * cdiv(chunks, RUN),), args)
