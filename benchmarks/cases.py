"""Derive an asv class from a spec: `Softmax = suite("softmax", sample=rows, peers=PEERS)` in `benchmarks/softmax.py`.

The parameter of the class is the name of a BENCH case. A sample is the time of one call in a burst, measured by GPU
events. The body of the benchmark advances a virtual clock by that time, and asv computes the median of the samples.
Before the first sample, the result is compared with the float64 reference, and a wrong one fails the benchmark. Without
a GPU, and at commits that do not have the operator, a benchmark is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .clock import VirtualClock
from .contestant import Contestant, PeerMaker, dualops_contestant
from .samples import Sample
from .tree import spec

if TYPE_CHECKING:  # torch is not needed to list the benchmarks
    from .workload import Workload

CLOCK = VirtualClock()


class Suite:
    """The attributes of a benchmark class that asv reads; `suite` derives a class for each operator."""

    operator: ClassVar[spec.Spec]
    sample: ClassVar[Sample]
    peers: ClassVar[Mapping[str, PeerMaker]]
    slow_peers: ClassVar[Mapping[str, PeerMaker]]
    rungs: ClassVar[tuple[str, ...]]

    params: ClassVar[list[list[str]]]
    param_names: ClassVar[list[str]] = ["case"]
    timer: ClassVar[VirtualClock] = CLOCK
    number = 1
    rounds = 1
    repeat = 15
    warmup_time = 0.0
    timeout = 300.0
    version = "1"  # raise it by hand if the meaning of a sample changes, so that older points are not compared

    def setup(self, case_id: str) -> None:
        """Raise NotImplementedError, which asv reports as skipped, if nothing can be timed."""
        require_gpu()
        require_measured_tree()


def suite(
    name: str,
    *,
    sample: Sample,
    peers: Mapping[str, PeerMaker],
    slow_peers: Mapping[str, PeerMaker] | None = None,
    rungs: tuple[str, ...] = (),
) -> type[Suite]:
    """Return the asv class of operator `name`: its BENCH cases, `time_forward`, and `time_backward` if it has a
    gradient.

    sample: picks the part of a result that is compared with the reference; peers: other implementations, by name;
    slow_peers: those that search for their best kernel for minutes, run on request; rungs: rungs of dualops that are
    timed like peers.
    """
    operator = spec.OPERATORS[name]
    cases = {case.id: case for case in operator.tagged(spec.Tag.BENCH)}
    calls: dict[tuple[str, str], tuple[Callable[[], object], int]] = {}

    def sampled(case_id: str, direction: str) -> None:
        from .timing import burst_calls, stopwatch

        key = case_id, direction
        if key not in calls:  # asv calls the body, and setup before it, once for each sample
            call = checked_call(operator, cases[case_id], sample, direction)
            calls[key] = call, burst_calls(call)
        CLOCK.advance(stopwatch(*calls[key]))

    def time_forward(self: Suite, case_id: str) -> None:
        sampled(case_id, "forward")

    def time_backward(self: Suite, case_id: str) -> None:
        sampled(case_id, "backward")

    members: dict[str, Any] = {
        "__doc__": f"{operator.name}: {operator.formula}",
        "operator": operator,
        "sample": staticmethod(sample),
        "peers": peers,
        "slow_peers": slow_peers or {},
        "rungs": rungs,
        "params": [list(cases)],
        "time_forward": time_forward,
    }
    if operator.backward_cost is not None:
        members["time_backward"] = time_backward
    return type(class_name(name), (Suite,), members)


def class_name(operator: str) -> str:
    """`flash_attention` -> `FlashAttention`."""
    return "".join(word.capitalize() for word in operator.split("_"))


def find(operator: str) -> type[Suite]:
    """Return the class of an operator, from the module of its name; for a variant, from its parent's module."""
    home = spec.OPERATORS[operator].parent or operator
    return getattr(import_module(f"{__package__}.{home}"), class_name(operator))


def checked(workload: Workload, direction: str) -> tuple[Contestant, spec.Accuracy]:
    """Return dualops' functions after a check of their results, and the accuracy.

    Raises WrongResult if they are wrong, NotImplementedError if they do not exist.
    """
    from .workload import WrongResult

    operator, case = workload.operator, workload.case
    contestant = dualops_contestant(operator, case)
    workload.restore("forward")
    if direction == "backward":
        workload.prepare_backward(contestant)
    accuracy = workload.check(contestant, direction)
    if not accuracy.passed:
        raise WrongResult(f"{operator.name} {direction} {case.id}: {accuracy.message}")
    return contestant, accuracy


def checked_call(operator: spec.Spec, case: spec.Case, sample: Sample, direction: str) -> Callable[[], object]:
    """Return a warmed-up call of dualops on the case, ready to be timed; in asv a missing operator is skipped."""
    from asv_runner.benchmarks.mark import SkipNotImplemented

    from .timing import warm_up
    from .workload import Workload

    try:
        workload = Workload(operator, case, sample)
        contestant, _ = checked(workload, direction)
        call = workload.call(contestant, direction)
    except NotImplementedError as missing:
        raise SkipNotImplemented(str(missing)) from missing
    warm_up(call)
    return call


def require_gpu() -> None:
    """Raise NotImplementedError unless torch is installed and sees a GPU."""
    try:
        import torch
    except ImportError as missing:
        raise NotImplementedError("benchmarks need torch: pip install torch") from missing
    if not torch.cuda.is_available():
        raise NotImplementedError("benchmarks need a GPU that torch can use")


def require_measured_tree() -> None:
    """Raise NotImplementedError if asv has checked out a commit and `dualops` is not that commit's."""
    checkout = os.environ.get("ASV_BUILD_DIR")
    found = import_module("dualops").__file__
    if checkout and not (found and Path(found).resolve().is_relative_to(Path(checkout).resolve())):
        raise NotImplementedError(f"the commit in {checkout} has no dualops; {found} is another")
