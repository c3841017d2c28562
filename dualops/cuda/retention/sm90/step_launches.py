"""The launches of the gradient with log_decay on Hopper: of dq, dv and dk, then the pairs of all chunks.

Where sequences are few, walks begin in each of their segments, with the state that other launches have found for it; dv
and dk with the same one.
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
from ..passes import Pass, States, backward_passes, transposed
from .config import CHUNK, KEY_WIDTH, Config, Walk, padded
from .decay_grad_chunks import build_decay_grad_chunks
from .decay_grad_pairs import build_decay_grad_pairs
from .launches import between_segments, call_of, is_shared, walk_step
from .step_config import StepsConfig

CONFIG = StepsConfig()
PAIRS = ("q", "k", "do", "v")  # what these load
FORTH, BACK, DV = ("do", "v", "k", "q", "dq"), ("v", "do", "q", "k", "dk"), ("k", "q", "do", "dv")  # and walks


def step_gradient_bytes(problem: Problem) -> int:
    """Shared memory of the greediest of its kernels."""
    D, Dv = padded(int(problem.D)), padded(int(problem.Dv))
    return max(CONFIG.met_tiles(D).nbytes, CONFIG.pair_tiles(D, Dv).nbytes)


def step_gradient_workspace(problem: Problem) -> dict[str, ArrayMeta]:
    """The state before each chunk, what it has of the one behind it, and what each token has of both."""
    p = problem
    chunks, tokens = (p.B, p.H, cdiv(p.Sk, CHUNK)), (p.B, p.H, p.Sk)
    made = {"kept": workspace(p, (*chunks, KEY_WIDTH * padded(int(p.D)))), "both": workspace(p, chunks)}
    return made | {"taken": workspace(p, tokens), "given": workspace(p, tokens)}


def step_gradient_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: Config) -> list[Step]:
    """Its launches; config: how walks of chunks are cut into segments."""
    p, D, Dv = problem, padded(int(problem.D)), padded(int(problem.Dv))
    made, chunks = step_gradient_workspace(p), cdiv(p.Sk, CHUNK)
    kept, both, taken, given = (by_token(made, name, False) for name in ("kept", "both", "taken", "given"))
    dq, dv, dk = backward_passes(p, results, {}, CHUNK)

    def met(each: Pass, names: Sequence[str], of_tokens: Strided, states: States, *, beside: bool = False) -> Step:
        walk = Walk(begins=bool(states.initial.data), back=each.call.direction < 0, beside=beside)
        call, segment = call_of(p, each, config), p.H * p.D * p.Dv
        arrays = each.q, each.k, each.v, of_tokens, kept, both, states.initial, each.logs
        known = call, segment, config.segments, dq.call.first_chunk, *_apart(p, names[:-1])
        args = (*(f"{name}_map" for name in names), *arrays, *known)
        kernel = build_decay_grad_chunks(CONFIG, padded(int(each.call.Dv)), walk)
        return Step(kernel, (p.B * p.H * config.segments,), args, CONFIG.met_tiles(padded(int(each.call.Dv))).nbytes)

    def segments(each: Pass, names: Sequence[str]) -> tuple[list[Step], States]:
        adds, between, begins = between_segments(p, each, config)
        maps = [f"{name}_map" for name in names]
        return [walk_step(p, each, maps, config, adds, looks=False, exact=True), between], begins

    dv_maps = [f"{name}_map" for name in DV]
    if config.segments == 1:
        walk = walk_step(p, dv, dv_maps, config, dv.states, beside=True)._replace(overlaps=True)
        walks = [met(dq, FORTH, taken, dq.states, beside=True), walk, met(dk, BACK, given, dk.states)]
    else:
        before_dq, begins = segments(dq, (*FORTH[:3], FORTH[-1]))
        walks = [*before_dq, met(dq, FORTH, taken, begins)]
        before_dv, begins = segments(dv, DV)
        alike = States(transposed(begins.initial))
        walks += [*before_dv, walk_step(p, dv, dv_maps, config, begins), met(dk, BACK, given, alike)]
    call = dq.call._replace(D=p.D, Dv=p.Dv, slots=chunks)
    known = dq.logs, call, p.B * p.H * chunks, *_apart(p, PAIRS)
    args = (*(f"{name}_map" for name in PAIRS), logs_of(results, "dlog_decay", False), taken, given, both, *known)
    blocks, shared_bytes = cdiv(p.B * p.H * chunks, CONFIG.run), CONFIG.pair_tiles(D, Dv).nbytes
    return [*walks, Step(build_decay_grad_pairs(CONFIG, D, Dv), (blocks,), args, shared_bytes)]


def _apart(problem: Problem, names: Sequence[str]) -> list[int]:
    """Of each array, 1, or 0 where all heads share it."""
    return [int(not is_shared(problem.arrays[name])) for name in names]
