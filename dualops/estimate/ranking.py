"""The Configs of a problem, ranked by what they are estimated to take. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..cuda.compiler.offline import absent_problem
from ..cuda.launch.operation import OPERATIONS
from ..spec import Problem
from . import attention, attention_gradient, matmul, retention, rows
from .architectures import Architecture, architecture
from .candidates import Ranking, build as build_first, rank
from .problems import problem_of

ESTIMATED = ("sm90", "sm80")  # rungs


def estimate(problem: str, arch: str = "h200", *, backward: bool = True, build: int = 0) -> list[Ranking]:
    """What the Configs of a problem would take on a GPU that need not be here, and what holds each up.

        estimate("flash_attention B=2 H=16 S=8192 D=128 causal=True", "h200")
        estimate("matmul M=4096 N=4096 K=4096", "rtx4090", build=3)
        estimate("retention B=8 H=16 S=2048 D=128", "h100")

    problem: an operator (flash_attention, matmul, retention, softmax, rms_norm, layer_norm) and sizes, parameters and
    dtype=, bfloat16 where it is not said, of B, H, Hkv, S or Sq and Sk, D, Dv; of B, M, N, K; of B, H, S, D, Dv; of
    M, N. Or arrays, as `warm` takes them. Nothing but the operator: a usual problem. arch: a100, rtx4090, h100, h200,
    b200, rtx5090, or an architecture, such as sm_90a. backward: the gradient too.
    build: how many of the best candidates are compiled for it. Those that spill registers go to the end.

    Returns a ranking for the call, and for each part of its gradient that can be chosen by itself, best first. A time
    is that of the kernels, launches counted, in seconds, of calls in a burst. It is an estimate: README.md in this
    folder says how good it is and how it is computed.
    Raises ValueError and TypeError for a problem or architecture that can't be read, or a count below 0,
    NotImplementedError where the model does not know what a problem costs, or no kernel does it there.
    """
    gpu = architecture(arch)
    if build < 0:
        raise ValueError(f"build is {build}, expected at least 0")
    return [build_first(each, gpu, build) if build else each for each in rankings(problem, gpu, backward=backward)]


def rankings(text: str, gpu: Architecture, *, backward: bool = True) -> list[Ranking]:
    """The same, nothing compiled."""
    spec, case = problem_of(text)
    of_operator = RANKED[spec.name]
    found = [*of_operator(absent_problem(spec, case), False, gpu)]
    if backward:
        found += of_operator(absent_problem(spec, case, backward=True), True, gpu)
    return found


def _attention(p: Problem, backward: bool, gpu: Architecture) -> Iterator[Ranking]:
    attention.refuse_unknown(p)
    offer = _offer(p, backward, gpu)
    if backward:
        candidates = attention_gradient.gradient_candidates(p, gpu, offer.rungs)
        yield rank("backward", *_work(p, backward), candidates, offer.taken)
    else:
        candidates = attention.forward_candidates(p, gpu, offer.rungs)
        yield rank("forward", *_work(p, backward), candidates, offer.taken)


def _matmul(p: Problem, backward: bool, gpu: Architecture) -> Iterator[Ranking]:
    products = [*matmul.products_of(p, backward, gpu)]
    offer = _offer(p, backward, gpu)
    for place, (name, each, metas) in enumerate(products):
        title = f"backward, {name}" if backward else "forward"
        candidates = matmul.candidates(name, each, p, metas, gpu, offer.rungs)
        flops, nbytes = matmul.product_flops(each), matmul.product_bytes(each)
        yield rank(title, flops, nbytes, candidates, offer.taken[place : place + 1])


def _retention(p: Problem, backward: bool, gpu: Architecture) -> Iterator[Ranking]:
    retention.refuse_unknown(p, backward)
    offer = _offer(p, backward, gpu)
    candidates = retention.candidates(p, backward, gpu, offer.rungs)
    taken = retention.kernels_of(offer.taken)
    yield rank("backward" if backward else "forward", *_work(p, backward), candidates, taken)


def _rows(p: Problem, backward: bool, gpu: Architecture) -> Iterator[Ranking]:
    offer = _offer(p, backward, gpu, (*ESTIMATED, "simt"))
    rows.refuse_unknown(p, backward, offer.taken[0])
    title = "backward" if backward else "forward"
    yield rank(title, *_work(p, backward), rows.candidates(p, backward, gpu, offer.taken[0]), offer.taken)


def _work(p: Problem, backward: bool) -> tuple[int, int]:
    """The flops and the bytes of a problem."""
    cost = p.spec.backward_cost if backward else p.spec.forward_cost
    assert cost is not None  # what has estimates of a gradient has its cost
    return cost.flops(p), cost.bytes_read(p) + cost.bytes_written(p)


RANKED = {
    "flash_attention": _attention,
    "matmul": _matmul,
    "retention": _retention,
    **dict.fromkeys(("softmax", "rms_norm", "layer_norm"), _rows),
}


class _Offer(NamedTuple):
    """What the operator has for a problem: the rungs that do it, and the Configs that a call takes today."""

    rungs: frozenset[str]
    taken: tuple[Any, ...]


def _offer(p: Problem, backward: bool, gpu: Architecture, estimated: tuple[str, ...] = ESTIMATED) -> _Offer:
    """estimated: rungs that have estimates; where a call takes another one, or none, that is a NotImplementedError."""
    operation = OPERATIONS[p.spec.name][backward]
    choices = [*operation.choices(p, p.outputs(operation.outputs), gpu.device)]
    if not choices or choices[0].rung not in estimated:
        rung = f"the rung {choices[0].rung}" if choices else "no rung"
        raise NotImplementedError(
            f"{operation.op}: no estimates on {gpu.title}, where a call takes {rung}, not one of {', '.join(estimated)}"
        )
    config = choices[0].config
    taken = tuple(config) if isinstance(config, tuple) else (config,)
    return _Offer(frozenset(choice.rung for choice in choices), taken)
