"""The launches of a pass on Hopper, and those of the gradient with log_decay.

A pass is a walk. If sequences are few, launches before it find the states between segments. The gradient with
log_decay has the walks of dq, dv and dk, then the pairs of all chunks. dv and dk begin their segments with the same
states.
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
from ..arguments import Call, workspace
from ..decays import logs_of
from ..passes import NO_STATE, Pass, States, backward_passes, transposed
from ..simt_states import build_walk
from .arguments import Loaded, LoadedPairs, LoadedWithY, SegmentStates, loaded
from .chunks import build_chunks
from .config import CHUNK, KEY_WIDTH, Config, StepsConfig, Walk, WideConfig, padded
from .decay_grad_chunks import Met, build_decay_grad_chunks
from .decay_grad_pairs import PairSums, build_decay_grad_pairs
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


CONFIG = StepsConfig()
# the arrays in the roles of q, k, v, y and o; those of dv's pass, which has no y
FORTH, BACK, DV = ("do", "v", "k", "q", "dq"), ("v", "do", "q", "k", "dk"), ("k", "q", "do", "dv")


def step_gradient_bytes(problem: Problem) -> int:
    """Return the shared memory of the kernel that needs most."""
    D, Dv = padded(int(problem.D)), padded(int(problem.Dv))
    return max(CONFIG.met_tiles(D).nbytes, CONFIG.pair_tiles(D, Dv).nbytes)


def step_gradient_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """Return the state before each chunk, its product with the one behind it, and what each token has of both."""
    p = problem
    chunks, tokens = (p.B, p.H, cdiv(p.Sk, CHUNK)), (p.B, p.H, p.Sk)
    made = {"kept": workspace(p, (*chunks, KEY_WIDTH * padded(int(p.D)))), "both": workspace(p, chunks)}
    return made | {"taken": workspace(p, tokens), "given": workspace(p, tokens)}


def step_gradient_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Config) -> list[Step]:
    """Return its launches; config: how walks are cut into segments."""
    p, D, Dv = problem, padded(int(problem.D)), padded(int(problem.Dv))
    made, chunks = step_gradient_workspace(p), cdiv(p.Sk, CHUNK)
    kept, both, taken, given = (by_token(made, name, False) for name in ("kept", "both", "taken", "given"))
    dq, dv, dk = backward_passes(p, results, {}, CHUNK)

    def met(each: Pass, names: Sequence[str], of_tokens: Strided, states: States, *, overlaps: bool = False) -> Step:
        walk = Walk(begins=bool(states.initial.data), back=each.call.direction < 0, overlaps=overlaps)
        ends = SegmentStates(states.initial, NO_STATE, p.H * p.D * p.Dv, config.segments)
        to, call = Met(of_tokens, kept, both, dq.call.first_chunk), call_of(p, each, config)
        args = (*loaded(p, LoadedWithY, names[:-1]), f"{names[-1]}_map", each.inputs, to, ends, each.logs, call)
        kernel = build_decay_grad_chunks(CONFIG, padded(int(each.call.Dv)), walk)
        return Step(kernel, (p.B * p.H * config.segments,), args, CONFIG.met_tiles(padded(int(each.call.Dv))).nbytes)

    def segments(each: Pass, names: Sequence[str]) -> tuple[list[Step], States]:
        adds, between, begins = between_segments(p, each, config)
        return [walk_step(p, each, names, config, adds, looks=False, exact=True), between], begins

    if config.segments == 1:
        walk = walk_step(p, dv, DV, config, dv.states, overlaps=True)._replace(overlaps=True)
        walks = [met(dq, FORTH, taken, dq.states, overlaps=True), walk, met(dk, BACK, given, dk.states)]
    else:
        before_dq, begins = segments(dq, (*FORTH[:3], FORTH[-1]))
        walks = [*before_dq, met(dq, FORTH, taken, begins)]
        before_dv, begins = segments(dv, DV)
        alike = States(transposed(begins.initial))
        walks += [*before_dv, walk_step(p, dv, DV, config, begins), met(dk, BACK, given, alike)]
    call = dq.call._replace(D=p.D, Dv=p.Dv, slots=chunks)
    sums = PairSums(logs_of(results, "dlog_decay", False), taken, given, both)
    args = (*loaded(p, LoadedPairs, LoadedPairs._fields), sums, dq.logs, call, p.B * p.H * chunks)
    blocks, shared_bytes = cdiv(p.B * p.H * chunks, CONFIG.run), CONFIG.pair_tiles(D, Dv).nbytes
    return [*walks, Step(build_decay_grad_pairs(CONFIG, D, Dv), (blocks,), args, shared_bytes)]
