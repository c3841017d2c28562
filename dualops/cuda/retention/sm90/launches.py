"""The launches of a pass on Hopper: a walk, and before it those that find the states between segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....spec import ArrayMeta, Problem
from ....spec.meta import Strided, compute_dtype
from ...launch.arrays import cdiv
from ...launch.step import Step
from ...launch.views import whole
from ...tile.products import THREADS
from ..arguments import Call, workspace
from ..passes import Pass, States
from ..simt_states import build_walk
from .arguments import Loaded, SegmentStates, loaded
from .chunks import build_chunks
from .config import Config, Walk, WideConfig, padded
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
    exact: bool = False,
) -> Step:
    """Return a launch of the kernel, which begins with a state and leaves one as `states` says.

    names: the arrays in the roles of q, k, v and o. exact: the state that it leaves is exact, even if it is no result.
    """
    p, call, widths = problem, each.call, (int(each.call.D), int(each.call.Dv))
    begins, finishes = bool(states.initial.data), bool(states.final.data)
    walk = Walk(begins, finishes, back=call.direction < 0, overlaps=overlaps, looks=looks)
    # one kernel for any number of segments; keys in parts if the state that it leaves becomes a result
    in_parts = finishes and (exact or bool(each.states.final.data))
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
