"""The launches of log_decay's gradient on Hopper: a walk forth, a walk back, the pairs of all chunks.

Where sequences are few, walks begin in each of their segments, with the state that other launches have found for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....spec import ArrayMeta, Problem
from ....spec.meta import Strided
from ...arrays import cdiv
from ...step import Step
from ...views import by_token, whole
from ..arguments import workspace
from ..decays import logs_of
from ..passes import Pass, States, backward_passes
from .config import CHUNK, KEY_WIDTH, Sm90Config, Walk, padded
from .launches import between_segments, call_of, is_shared, segment_states
from .met_pairs import build_met_pairs
from .met_states import build_met_states
from .step_config import StepsConfig

CONFIG = StepsConfig()
STEP_SEGMENTS = "step_segments"  # the array of states between them


def step_gradient_bytes(problem: Problem) -> int:
    """Shared memory of the greediest of its kernels."""
    D, Dv = padded(int(problem.D)), padded(int(problem.Dv))
    return max(CONFIG.met_tiles(Dv).nbytes, CONFIG.pair_tiles(D, Dv).nbytes)


def step_gradient_workspace(problem: Problem, config: Sm90Config) -> dict[str, ArrayMeta]:
    """The state before each chunk, what it has of the one behind it, and what each token has of both."""
    p = problem
    chunks, tokens = (p.B, p.H, cdiv(p.Sk, CHUNK)), (p.B, p.H, p.Sk)
    made = {"kept": workspace(p, (*chunks, KEY_WIDTH * padded(int(p.Dv)))), "both": workspace(p, chunks)}
    made |= {"taken": workspace(p, tokens), "given": workspace(p, tokens)}
    return made | segment_states(p, config, STEP_SEGMENTS)


def step_gradient_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Sm90Config) -> list[Step]:
    """Its launches; config: how walks of chunks are cut into segments."""
    p, D, Dv = problem, padded(int(problem.D)), padded(int(problem.Dv))
    made = step_gradient_workspace(p, config)
    kept, both, taken, given = (by_token(made, name, False) for name in ("kept", "both", "taken", "given"))
    dq, dv, _ = backward_passes(p, results, {}, CHUNK)
    call, initial = dq.call._replace(D=p.D, Dv=p.Dv), whole(p.arrays, "initial_state", 4)
    forth = replace(dq, q=dv.k, k=dv.q, v=dq.k, call=call, states=States(initial))
    back = replace(dv, states=States(dv.states.initial))

    def walk(each: Pass, names: Sequence[str], met: Strided, states: States) -> Step:
        begins, finishes = bool(states.initial.data), bool(states.final.data)
        kernel = build_met_states(CONFIG, Dv, Walk(begins, finishes, each.call.direction < 0, looks=not finishes))
        segments = config.segments - int(finishes)  # nobody needs the last sum
        known = each.logs, call_of(p, each, config), p.H * p.D * p.Dv, segments, call.first_chunk
        maps = (f"{name}_map" for name in names)
        args = (*maps, met, kept, both, states.initial, states.final, *known, *_apart(p, names))
        return Step(kernel, (p.B * p.H * segments,), args, CONFIG.met_tiles(Dv).nbytes)

    def walks(each: Pass, names: Sequence[str], met: Strided) -> list[Step]:
        if config.segments == 1:
            return [walk(each, names, met, each.states)]
        adds, between, begins = between_segments(p, each, config, STEP_SEGMENTS)
        return [walk(each, names, met, adds), between, walk(each, names, met, begins)]

    names = ("q", "k", "do", "v")
    chunks = p.B * p.H * cdiv(p.Sk, CHUNK)
    known = dq.logs, call._replace(slots=cdiv(p.Sk, CHUNK)), chunks, *_apart(p, names)
    args = (*(f"{name}_map" for name in names), logs_of(results, "dlog_decay", False), taken, given, both, *known)
    pairs = Step(build_met_pairs(CONFIG, D, Dv), (cdiv(chunks, CONFIG.run),), args, CONFIG.pair_tiles(D, Dv).nbytes)
    return [*walks(forth, ("q", "do", "k", "v"), taken), *walks(back, ("k", "v", "q", "do"), given), pairs]


def _apart(problem: Problem, names: Sequence[str]) -> list[int]:
    """Of each array, 1, or 0 where all heads share it."""
    return [int(not is_shared(problem.arrays[name])) for name in names]
