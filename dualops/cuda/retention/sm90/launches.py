"""The launches of a pass on Hopper, and those of the gradient with log_decay.

A pass is a walk. If sequences are few, launches before it find the states between segments. With log_decay's gradient
the walks of dq and dk leave sums for it, and one launch follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....spec import ArrayMeta, Problem
from ....spec.meta import Strided, compute_dtype
from ...launch.arrays import cdiv
from ...launch.step import Step
from ...launch.views import by_token, whole
from ...tile.products import THREADS
from ..arguments import Call, State, workspace
from ..decays import logs_of
from ..passes import NO_STATE, Pass, States
from ..simt_states import build_walk
from .arguments import Loaded, LoadedWithY, SegmentStates, loaded
from .chunks import build_chunks
from .config import CHUNK, WARPS, Config, GradConfig, Walk, WideConfig, padded
from .decay_grad_chunks import DecayGrad, build_decay_grad_chunks
from .decay_grad_sums import build_decay_grad_sums
from .wide import build_wide

SEGMENTS = "segments"  # the workspace of states between segments


def segment_states(problem: Problem, config: Config) -> dict[str, ArrayMeta]:
    """Return room for the state before each segment, if there are several."""
    p = problem
    shape = (p.B * config.segments, p.H, p.D * p.Dv)
    return {SEGMENTS: workspace(p, shape)} if config.segments > 1 else {}


def between_segments(problem: Problem, each: Pass, config: Config) -> tuple[States, Step, States]:
    """Return where a first launch leaves what each segment adds to the state, the launch that turns it into the state
    before each segment, and where the pass begins from there.
    """
    p, call, ends = problem, each.call, each.states
    size = call.D * call.Dv
    between = Strided(SEGMENTS, (config.segments * p.H * size, size, call.Dv, 1))
    states = whole(segment_states(p, config), SEGMENTS, 3)
    missing = -p.Sk % config.chunk if call.direction < 0 else 0  # of the last chunk, with which passes back begin
    args = (states, ends.state, each.decay, call_of(p, each, config), size, call.Dv, missing)
    kernel = build_walk(compute_dtype(p.dtype), **each.variant.options)
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
) -> Step:
    """Return a launch of the kernel, which begins with a state and leaves one as `states` says.

    names: the arrays in the roles of q, k, v and o.
    """
    p, call, widths = problem, each.call, (int(each.call.D), int(each.call.Dv))
    begins, finishes = bool(states.initial.data), bool(states.final.data)
    walk = Walk(begins, finishes, back=call.direction < 0, overlaps=overlaps, looks=looks)
    # one kernel for any number of segments; keys in parts if the state that it leaves becomes a result
    in_parts = finishes and bool(each.states.final.data)
    own = replace(config, parts=config.parts if in_parts else 1, segments=1)
    segments = config.segments if looks or each.states.final.data else config.segments - 1  # the last sum is not needed
    decay = each.logs if each.variant.stepwise else each.gamma
    ends = SegmentStates(states.initial, states.final, p.H * call.D * call.Dv, segments)
    maps, apart = loaded(p, Loaded, names[:3])
    args = (f"{names[3]}_map", each.inputs, ends, decay, call_of(p, each, config))
    blocks, slices = p.B * p.H * segments, own.slices(*widths)
    if isinstance(own, WideConfig):
        kernel, args = build_wide(own, padded(widths[0]), walk), (maps, *args, slices)
    else:
        kernel, args = build_chunks(own, padded(widths[1]), walk), (maps, apart, *args)
    return Step(kernel, (blocks * slices,), args, own.shared_bytes(*widths))


def call_of(problem: Problem, each: Pass, config: Config) -> Call:
    """Return the sizes of a pass: `state_chunk` tokens are a segment."""
    tokens = cdiv(cdiv(problem.Sk, config.chunk), config.segments) * config.chunk
    return each.call._replace(state_chunk=tokens, slots=config.segments)


GRAD = GradConfig()
Y = {"dq": "q", "dk": "k"}  # the array that is multiplied with a pass's result for log_decay's gradient


def decay_grad_bytes(problem: Problem) -> int:
    """Return the shared memory of the passes with log_decay's gradient."""
    return GRAD.tiles(padded(int(problem.D))).nbytes


def decay_grad_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return the sums of both passes' rows and chunks."""
    p = problem
    shapes = DecayGrad((p.B, p.H, p.Sk), *[(p.B, p.H, cdiv(p.Sk, CHUNK) * WARPS)] * 2)
    return {f"{name}_{kind}": workspace(p, shape) for name in Y for kind, shape in shapes._asdict().items()}


def decay_grad_of(problem: Problem, name: str) -> DecayGrad:
    """Return the sums of dq's or dk's pass."""
    made = decay_grad_workspace(problem)
    return DecayGrad(*(by_token(made, f"{name}_{kind}", False) for kind in DecayGrad._fields))


def decay_grad_step(
    problem: Problem, each: Pass, names: Sequence[str], config: Config, states: States, *, overlaps: bool
) -> Step:
    """Return the launch of dq's or dk's pass with the sums for log_decay's gradient. names: as for `walk_step`."""
    p, out, width = problem, names[3], padded(int(each.call.Dv))
    walk = Walk(begins=bool(states.initial.data), back=each.call.direction < 0, overlaps=overlaps)
    ends = SegmentStates(states.initial, NO_STATE, p.H * p.D * p.Dv, config.segments)
    maps = loaded(p, LoadedWithY, (*names[:3], Y[out]))
    args = (*maps, f"{out}_map", each.inputs, decay_grad_of(p, out), ends, each.logs, call_of(p, each, config))
    kernel, blocks = build_decay_grad_chunks(GRAD, width, walk), p.B * p.H * config.segments
    return Step(kernel, (blocks,), args, GRAD.tiles(width).nbytes)


def decay_grad_sums_step(problem: Problem, results: Mapping[str, ArrayMeta], dq: Pass) -> Step:
    """Return the launch that adds up the sums of both passes."""
    p, chunks = problem, cdiv(problem.Sk, CHUNK)
    states = whole(p.arrays, "initial_state", 4), whole(results, "dinitial_state", 4)
    ends = State(*states, int(bool(states[0].data)), int("dstate" in p.arrays))
    sums = logs_of(results, "dlog_decay", False), decay_grad_of(p, "dq"), decay_grad_of(p, "dk")
    args = (*sums, dq.logs, ends, dq.call._replace(D=p.D, Dv=p.Dv), chunks)
    return Step(build_decay_grad_sums(GRAD), (p.B * p.H * cdiv(chunks, GRAD.run),), args)
