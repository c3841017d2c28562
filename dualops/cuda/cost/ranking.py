"""The Configs of a problem, ranked by what they are estimated to take. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable

from ...spec import Problem
from ..launch import OPERATIONS
from ..offline import absent_problem
from . import attention, attention_gradient, matmul
from .architectures import Architecture, architecture
from .candidates import Ranking, Taken, build as build_first, rank
from .problems import problem_of


def estimate(problem: str, arch: str = "h200", *, backward: bool = True, build: int = 0) -> list[Ranking]:
    """What the Configs of a problem would take on a GPU that need not be here, and what holds each up.

        estimate("flash_attention B=2 H=16 S=8192 D=128 causal=True", "h200")
        estimate("matmul M=4096 N=4096 K=4096", "rtx4090", build=3)

    problem: an operator (flash_attention, matmul) and sizes, parameters and dtype=, bfloat16 where it is not said, of
    B, H, Hkv, S or Sq and Sk, D, Dv; of B, M, N, K. Or arrays, as `warm` takes them. Nothing but the operator: a usual
    problem. arch: a100, rtx4090, h100, h200, b200, rtx5090, or an architecture, such as sm_90a. backward: the gradient
    too. build: so many candidates, the best, are compiled for it, those that spill registers go to the end.

    Returns a ranking for the call, and for each part of its gradient that can be chosen by itself, best first. A time
    is that of the kernels, launches counted, in seconds, of calls in a burst. It is an estimate: the page beside this
    file says how good it is and what it is made of.
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
    of_operator = _attention if spec.name == "flash_attention" else _matmul
    found = [*of_operator(absent_problem(spec, case), False, gpu)]
    if backward:
        found += of_operator(absent_problem(spec, case, backward=True), True, gpu)
    for each in found:
        if not each.rows:
            raise NotImplementedError(f"{spec.name}: no estimates of {each.title} on {gpu.title}, no kernel fits there")
    return found


def _attention(p: Problem, backward: bool, gpu: Architecture) -> Iterable[Ranking]:
    attention.refuse_unknown(p)
    cost = p.spec.backward_cost if backward else p.spec.forward_cost
    assert cost is not None
    if backward:
        title, candidates = "backward", attention_gradient.gradient_candidates(p, gpu)
    else:
        title, candidates = "forward", attention.forward_candidates(p, gpu)
    taken = _taken(p, backward, gpu)
    if backward:  # the last is of kernels that are not ranked
        taken = taken._replace(configs=taken.configs[:-1])
    yield rank(title, cost.flops(p), candidates, taken)


def _matmul(p: Problem, backward: bool, gpu: Architecture) -> Iterable[Ranking]:
    taken = _taken(p, backward, gpu)
    for place, (name, each, metas) in enumerate(matmul.products_of(p, backward, gpu)):
        title = f"backward, {name}" if backward else "forward"
        candidates, its = matmul.candidates(name, each, p, metas, gpu), taken.configs[place : place + 1]
        yield rank(title, matmul.product_flops(each), candidates, taken._replace(configs=its))


def _taken(p: Problem, backward: bool, gpu: Architecture) -> Taken:
    """What a call takes today. Raises NotImplementedError where no kernel does it."""
    operation = OPERATIONS[p.spec.name][backward]
    for choice in operation.choices(p, p.outputs(operation.outputs), gpu.device):
        return Taken(choice.rung, tuple(choice.config) if isinstance(choice.config, tuple) else (choice.config,))
    raise NotImplementedError(f"{operation.op}: no kernel does {p} on {gpu.title}")
