"""The launches of the gradient with log_decay on Hopper: those of dq, dv and dk, then the pairs of all chunks.

If sequences are few, walks begin in each segment, with the state that other launches have found for it. dv and dk use
the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....spec import ArrayMeta, Problem
from ....spec.meta import Strided
from ...launch.arrays import cdiv
from ...launch.step import Step
from ...launch.views import by_token
from ..arguments import workspace
from ..decays import logs_of
from ..passes import NO_STATE, Pass, States, backward_passes, transposed
from .arguments import LoadedPairs, LoadedWithY, SegmentStates, loaded
from .config import CHUNK, KEY_WIDTH, Config, Walk, padded
from .decay_grad_chunks import Met, build_decay_grad_chunks
from .decay_grad_pairs import PairSums, build_decay_grad_pairs
from .launches import between_segments, call_of, walk_step
from .step_config import StepsConfig

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
