"""The asv classes: an exact clock, the spec's cases, a skip for what cannot be timed, a failure for what is wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from asv_runner.benchmarks.mark import SkipNotImplemented
from asv_runner.benchmarks.time import TimeBenchmark

from benchmarks import cases, timing, workload
from benchmarks.clock import VirtualClock
from benchmarks.contestant import Contestant
from benchmarks.samples import rows
from dualops import spec
from dualops.spec import Case, Tag

SECONDS = (0.5, 0.25, 4.0, 0.125, 1.0)


def asv_benchmark(suite: type, method: str, case: str) -> TimeBenchmark:
    """The method as asv_runner sees it, with `case` chosen."""
    instance = suite()
    benchmark = TimeBenchmark(f"{suite.__name__}.{method}", getattr(instance, method), [instance])
    benchmark.set_param_idx(list(instance.params[0]).index(case))
    return benchmark


class TestClock:
    def test_asv_reads_what_the_body_advanced_and_nothing_else(self) -> None:
        times = iter(SECONDS)

        class Toy(cases.Suite):
            params: ClassVar[list[list[str]]] = [["only"]]
            timer = VirtualClock()
            repeat = len(SECONDS)

            def setup(self, case_id: str) -> None:
                self.timer.advance(1000.0)  # not the body's: must not count

            def time_forward(self, case_id: str) -> None:
                self.timer.advance(next(times))

        benchmark = asv_benchmark(Toy, "time_forward", "only")
        assert benchmark.do_setup() is False
        assert benchmark.do_run() == {"samples": list(SECONDS), "number": 1}

    @pytest.mark.parametrize("seconds", [-1e-9, float("nan")])
    def test_time_does_not_go_backwards(self, seconds: float) -> None:
        clock = VirtualClock()
        with pytest.raises(ValueError, match="expected 0 or more"):
            clock.advance(seconds)
        assert clock() == 0.0


@pytest.mark.parametrize("name", spec.OPERATORS)
class TestClasses:
    def test_methods_are_the_directions_of_the_spec(self, name: str) -> None:
        methods = {method for method in dir(cases.find(name)) if method.startswith("time_")}
        has_gradient = spec.OPERATORS[name].backward_cost is not None
        assert methods == {"time_forward"} | ({"time_backward"} if has_gradient else set())

    def test_without_a_gpu_asv_skips(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        suite = cases.find(name)
        assert asv_benchmark(suite, "time_forward", suite.params[0][0]).do_setup() is True


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], list[int]]:
    """A softmax suite of one small case, run on the CPU; a list of the calls that were timed, each of 2 ms."""
    timed: list[int] = []

    def stopwatch(call: Callable[[], object], calls: int) -> float:
        timed.append(calls)
        return 2e-3

    case = Case("small", "float32", {"x": (6, 40)}, tags=frozenset({Tag.BENCH}))
    monkeypatch.setattr(cases.spec.softmax.__class__, "tagged", lambda self, tag: [case])
    monkeypatch.setattr(workload, "Workload", partial(workload.Workload, device="cpu"))
    monkeypatch.setattr(workload, "ROTATION_BYTES", 2000)
    monkeypatch.setattr(timing, "stopwatch", stopwatch)
    monkeypatch.setattr(timing, "warm_up", lambda call: call())
    monkeypatch.setattr(cases, "require_gpu", lambda: None)

    def of(make: Callable[..., Contestant]) -> type:
        monkeypatch.setattr(cases, "dualops_contestant", make)
        return cases.suite("softmax", sample=rows, peers={})

    return of, timed


def softmax_by_torch(*_: object) -> Contestant:
    return Contestant(
        "torch", lambda x: torch.softmax(x, -1), lambda y, dy: torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)
    )


class TestGate:
    @pytest.mark.parametrize("method", ["time_forward", "time_backward"])
    def test_a_right_operator_is_timed(self, toy: Any, method: str) -> None:
        of, timed = toy
        benchmark = asv_benchmark(of(softmax_by_torch), method, "small-float32")
        assert benchmark.do_setup() is False
        assert benchmark.do_run() == {"samples": [pytest.approx(2e-3)] * cases.Suite.repeat, "number": 1}
        assert timed == [1] + [timing.BURST_CALLS] * cases.Suite.repeat  # the first says how many make a burst

    @pytest.mark.parametrize("method", ["time_forward", "time_backward"])
    def test_a_wrong_one_fails_and_is_never_timed(self, toy: Any, method: str) -> None:
        def wrong(*_: object) -> Contestant:
            right = softmax_by_torch()
            assert right.backward is not None
            backward = right.backward
            # forward is right where only backward is to be found wrong
            forward = right.forward if method == "time_backward" else lambda x: torch.softmax(x, -1) * 1.00001
            return Contestant("wrong", forward, lambda y, dy: backward(y, dy) + 1e-4)

        of, timed = toy
        benchmark = asv_benchmark(of(wrong), method, "small-float32")
        assert benchmark.do_setup() is False
        with pytest.raises(workload.WrongResult, match=f"softmax {method.removeprefix('time_')} small-float32"):
            benchmark.do_run()
        assert timed == []

    def test_a_commit_without_the_operator_is_skipped(self, toy: Any) -> None:
        def missing(*_: object) -> Contestant:
            raise NotImplementedError("this dualops has no softmax")

        of, timed = toy
        with pytest.raises(SkipNotImplemented, match="has no softmax"):
            asv_benchmark(of(missing), "time_forward", "small-float32").do_run()
        assert timed == []

    def test_a_commit_without_the_gradient_is_skipped(self, toy: Any) -> None:
        of, timed = toy
        suite = of(lambda *_: softmax_by_torch()._replace(backward=None))
        with pytest.raises(SkipNotImplemented, match="torch has no backward"):
            asv_benchmark(suite, "time_backward", "small-float32").do_run()
        assert timed == []

    def test_another_tree_than_the_commits_is_not_timed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.setenv("ASV_BUILD_DIR", str(tmp_path))
        with pytest.raises(NotImplementedError, match="has no dualops"):
            cases.require_measured_tree()
        monkeypatch.setenv("ASV_BUILD_DIR", str(workload.__file__).split("benchmarks")[0])
        cases.require_measured_tree()
