"""The Configs of a problem, ranked by their estimated time. Needs no GPU."""

from __future__ import annotations

from collections.abc import Container, Iterator

from ..cuda.compiler.offline import absent_problem
from ..cuda.launch.operation import OPERATIONS, Choice
from ..spec import Problem
from . import attention, matmul, retention
from .architectures import Architecture, architecture
from .candidates import Candidate, Part, Ranking, build as build_first, rank
from .model import copying
from .problems import problem_of

TENSOR_CORES = ("sm90", "sm80")  # rungs


def estimate(problem: str, arch: str = "h200", *, backward: bool = True, build: int = 0) -> list[Ranking]:
    """Estimate the time of a problem's Configs on a GPU that need not be present, and what bounds each.

        estimate("flash_attention B=2 H=16 S=8192 D=128 causal=True", "h200")
        estimate("matmul M=4096 N=4096 K=4096", "rtx4090", build=3)
        estimate("retention B=8 H=16 S=2048 D=128", "h100")

    problem: an operator (flash_attention, matmul, retention, softmax, rms_norm, layer_norm, rope, lion) and sizes,
    parameters and dtype= (default bfloat16), of B, H, Hkv, S or Sq and Sk, D, Dv; of B, M, N, K; of B, H, S, D, Dv; of
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
    """Return the rankings of `estimate`, without compiling."""
    spec, case = problem_of(text)
    found = [*_rankings(absent_problem(spec, case), False, gpu)]
    if backward and spec.backward_cost:
        found += _rankings(absent_problem(spec, case, backward=True), True, gpu)
    return found


def _rankings(p: Problem, backward: bool, gpu: Architecture) -> Iterator[Ranking]:
    title, cost = ("backward", p.spec.backward_cost) if backward else ("forward", p.spec.forward_cost)
    assert cost is not None
    nbytes = cost.bytes_read(p) + cost.bytes_written(p)
    if p.spec.name == "matmul":
        yield from matmul.rankings(p, backward, gpu, _choices(p, backward, gpu, TENSOR_CORES))
    elif model := {"flash_attention": attention, "retention": retention}.get(p.spec.name):
        model.refuse_unknown(p, backward)
        choices = _choices(p, backward, gpu, TENSOR_CORES)
        yield rank(title, cost.flops(p), nbytes, model.candidates(p, backward, gpu, choices))
    else:
        choices = _choices(p, backward, gpu)
        yield rank(title, cost.flops(p), nbytes, [_by_bytes(p, backward, nbytes, gpu, each) for each in choices])


def _by_bytes(p: Problem, backward: bool, nbytes: int, gpu: Architecture, choice: Choice) -> Candidate:
    """Estimate an operator along rows: the time to read each input and write each result once, and that of launches.

    This does not rank Configs, which differ by a few percent: `tune` times them.
    """
    makes = ", ".join(p.outputs(OPERATIONS[p.spec.name][backward].outputs))
    return Candidate(
        choice.rung, (Part(makes, choice.config),), copying(nbytes, gpu, len(choice.steps())), choice.steps
    )


def _choices(p: Problem, backward: bool, gpu: Architecture, rungs: Container[str] = ()) -> list[Choice]:
    """Return the operator's own choices: those of `rungs`, or all but the slowest. The first is the one that a call
    uses.

    Raises NotImplementedError if a call uses another rung, or none.
    """
    operation = OPERATIONS[p.spec.name][backward]
    choices = [*operation.choices(p, p.outputs(operation.outputs), gpu.device)]
    if choices and choices[0].config is None:
        raise NotImplementedError(f"{operation.op}: no estimates of an empty problem")
    if not choices or (rungs and choices[0].rung not in rungs):
        takes = f"the rung {choices[0].rung}" if choices else "no rung"
        raise NotImplementedError(f"{operation.op}: no estimates on {gpu.device.name}, where a call takes {takes}")
    if rungs:
        return [choice for choice in choices if choice.rung in rungs]
    return [choice for choice in choices if choice.rung != "naive"] or choices[:1]
