"""`python -m benchmarks run`: who is timed, what a failing peer leaves, what the JSON holds. Times are made up here."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import cases, comparison, workload
from benchmarks.contestant import Contestant, dualops_contestant
from benchmarks.recorded import Key, peer_runs
from benchmarks.roofline import Roof
from benchmarks.softmax import eager, of_last_axis
from benchmarks.timing import Turn
from benchmarks.tree import spec
from benchmarks.work import Work, bind

CASE = spec.Case("small", "float32", {"x": (6, 40)}, tags=frozenset({spec.Tag.BENCH}))
ON_REQUEST = spec.Case("wide", "float32", {"x": (3, 90)}, tags=frozenset({spec.Tag.COMPARE}), backward=False)
OPERATOR = spec.OPERATORS["softmax"]


def missing(problem: spec.Problem) -> Contestant:
    raise ImportError("No module named 'absent'\nand more")


def inaccurate(problem: spec.Problem) -> Contestant:
    return Contestant("inaccurate", lambda x: torch.softmax(x, -1) * 1.01)


def misshapen(problem: spec.Problem) -> Contestant:
    return Contestant("misshapen", lambda x: torch.softmax(x, -1)[:, :3], lambda y, dy: dy[:, :3])


def overwriting(problem: spec.Problem) -> Contestant:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.softmax(x, -1))

    return Contestant("overwriting", forward)


class Stage:
    """Turns with made-up times: who took one, in order, and how long it is said to have taken in each round."""

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.milliseconds = {"roof": [1.0, 0.9, 1.0], "dualops": [1.9, 2.2, 2.0]}

    def turn(self, call: Any) -> Turn:
        call()
        self.turns.append(call.who)
        times = self.milliseconds.get(call.who, [3.0])
        taken = times[self.turns.count(call.who) % len(times) - 1] / 1e3
        return Turn(taken, 2 * taken)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> Any:
    """A softmax suite of one small case on the CPU, where dualops takes 2 ms and every peer 3 ms."""

    def roof_call() -> None:
        pass

    def call_of(self: workload.Workload, contestant: Contestant, direction: str) -> Any:
        call: Any = made(self, contestant, direction)
        call.who = contestant.name
        return call

    roof_call.who = "roof"  # type: ignore[attr-defined]
    made = workload.Workload.call
    monkeypatch.setattr(workload.Workload, "call", call_of)
    tagged = {spec.Tag.BENCH: [CASE], spec.Tag.COMPARE: [ON_REQUEST]}
    monkeypatch.setattr(OPERATOR.__class__, "tagged", lambda self, tag: tagged[tag])
    monkeypatch.setattr(comparison, "Workload", partial(workload.Workload, device="cpu"))
    monkeypatch.setattr(workload, "ROTATION_BYTES", 2000)
    monkeypatch.setattr(cases, "dualops_contestant", lambda operator, case: own(bind(operator, case)))
    monkeypatch.setattr(comparison, "dualops_contestant", rung_of)
    monkeypatch.setattr(comparison, "require_gpu", lambda: None)
    monkeypatch.setattr(comparison, "roof", lambda work, dtype: Roof(roof_call, 0.5))
    monkeypatch.setattr(comparison, "turn", stage.turn)
    monkeypatch.setattr(comparison, "extra_memory", lambda call: 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a toy")
    monkeypatch.setattr(comparison, "build_ahead", lambda operator, cases: None)
    peers = {"torch eager": eager, "absent": missing, "inaccurate": inaccurate, "misshapen": misshapen}
    return cases.suite("softmax", sample=cases.find("softmax").sample, peers=peers)


def own(problem: spec.Problem) -> Contestant:
    return eager(problem)._replace(name="dualops")


def rung_of(operator: spec.Spec, case: spec.Case, rung: str) -> Contestant:
    """A rung whose gradient needs more memory than there is."""

    def backward(**arrays: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    return eager(bind(operator, case))._replace(name=f"dualops {rung}", backward=backward)


def test_each_peer_that_has_the_direction_leaves_a_line(suite: Any) -> None:
    shown: list[str] = []
    found = comparison.run(suite, peers=True, show=shown.append)
    assert [(m.direction, m.name) for m in found] == [
        ("forward", "dualops"),
        ("forward", "torch eager"),
        ("forward", "absent"),
        ("forward", "inaccurate"),
        ("forward", "misshapen"),
        ("backward", "dualops"),
        ("backward", "torch eager"),
        ("backward", "absent"),
        ("backward", "misshapen"),
    ]
    assert len(shown) == 1 + 2 + len(found)  # the roof has a line in each direction
    assert found[2].failure == "ImportError: No module named 'absent'"
    assert (found[4].failure or "").startswith("ValueError: y: shape (6, 3), expected (6, 40)")
    assert found[3].failure is None
    assert found[3].error == pytest.approx(0.01, rel=1e-3)
    assert shown[4].split()[3:] == ["ImportError:", "No", "module", "named", "'absent'"]


def test_the_columns_are_ratios_to_dualops_in_the_same_run(suite: Any) -> None:
    shown: list[str] = []
    comparison.run(suite, cases=["small-float32"], peers=True, show=shown.append)
    rate = 2 * 6 * 40 * 4 / 1e12
    for text, seconds, spread in ((shown[2], 2e-3, "15.0%"), (shown[3], 3e-3, "0.0%")):
        cells = [cell.strip() for cell in text.split("  ") if cell.strip()]
        ratio = f"{seconds / 2e-3:.2f}"
        burst, single = (f"{n * seconds * 1e3:.3f} ms" for n in (1, 2))
        assert cells[3:9] == [burst, spread, ratio, single, spread, ratio]
        assert cells[9] == f"{rate / seconds:.2f} TB/s"
        assert cells[10] == f"{0.5e-3 / seconds:.1%}"
        assert cells[12] == "1.00 MiB"
    assert shown[1].split()[2:] == ["roof", "500.0", "µs", "10.0%", "0.25", f"{rate / 0.5e-3:.2f}", "TB/s"]


def test_in_each_round_the_roof_and_every_implementation_have_a_turn(suite: Any, stage: Stage) -> None:
    (dualops, *_) = comparison.run(suite, cases=["small"], peers=True, show=lambda text: None)
    rounds = [stage.turns[first : first + 4] for first in (0, 4, 8)]
    assert [sorted(each) for each in rounds] == [["dualops", "inaccurate", "roof", "torch eager"]] * 3
    assert len({tuple(each) for each in rounds}) > 1, "nobody comes always after the same"
    backward = [stage.turns[first : first + 3] for first in (12, 15, 18)]
    assert [sorted(each) for each in backward] == [["dualops", "roof", "torch eager"]] * 3
    assert len(stage.turns) == 21
    assert (dualops.burst, dualops.single) == (2e-3, 4e-3)
    assert dualops.burst_spread == dualops.single_spread == pytest.approx(0.15)
    assert (dualops.roof, dualops.roof_spread) == (0.5e-3, pytest.approx(0.1))


def test_who_is_slow_takes_one_turn(suite: Any, stage: Stage) -> None:
    stage.milliseconds["inaccurate"] = [1e3 * comparison.SLOW + 1]
    found = {m.name: m for m in comparison.run(suite, cases=["small"], peers=True, show=lambda text: None)[:5]}
    assert sorted(stage.turns[:10]) == ["dualops"] * 3 + ["inaccurate"] + ["roof"] * 3 + ["torch eager"] * 3
    assert found["inaccurate"].burst == pytest.approx(0.251)
    assert found["inaccurate"].burst_spread == 0.0


def test_who_fails_in_a_later_round_is_out_and_the_others_go_on(
    suite: Any, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(call: Any) -> Turn:
        if call.who == "torch eager" and stage.turns.count(call.who) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return stage.turn(call)

    monkeypatch.setattr(comparison, "turn", turn)
    found = {m.name: m for m in comparison.run(suite, cases=["small"], peers=True, show=lambda text: None)[:5]}
    eager_found = found["torch eager"]
    assert eager_found.failure == "OutOfMemoryError: CUDA out of memory."
    assert eager_found.burst is eager_found.error is eager_found.extra_memory is None
    assert eager_found.roof == 0.5e-3
    assert sorted(stage.turns[:10]) == ["dualops"] * 3 + ["inaccurate"] * 3 + ["roof"] * 3 + ["torch eager"]
    assert found["dualops"].burst == 2e-3
    assert found["inaccurate"].burst == 3e-3


def test_every_implementation_gets_the_same_data(suite: Any, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[torch.Tensor]] = {}

    def spy(problem: spec.Problem) -> Contestant:
        def forward(x: torch.Tensor) -> torch.Tensor:
            seen.setdefault("x", []).append(x.clone())
            return torch.softmax(x, -1)

        return Contestant("spy", forward)

    suite.peers = {"overwriting": overwriting, "spy": spy}
    found = comparison.run(suite, cases=["small"], peers=True, show=lambda text: None)
    assert [m.name for m in found] == ["dualops", "overwriting", "spy", "dualops"]
    assert len(seen["x"]) == 1 + 3
    assert all(torch.equal(x, seen["x"][0]) for x in seen["x"])
    assert found[1].error == found[2].error


def test_peers_by_a_word_of_their_names(suite: Any) -> None:
    found = comparison.run(suite, cases=["small"], peers=True, named=["eager", "shapen"], show=lambda text: None)
    assert [m.name for m in found if m.direction == "forward"] == ["dualops", "torch eager", "misshapen"]
    with pytest.raises(ValueError, match=r"softmax has no peer 'nobody', it has .*torch eager, absent"):
        comparison.run(suite, cases=["small"], peers=True, named=["eager", "nobody"], show=lambda text: None)


def test_cases_to_compare_are_timed_where_they_are_named_and_without_a_gradient_that_they_do_not_want(
    suite: Any,
) -> None:
    shown: list[str] = []
    assert {m.case for m in comparison.run(suite, peers=False, show=shown.append)} == {"small-float32"}
    found = comparison.run(suite, cases=["wide", "small-float32"], peers=False, show=shown.append)
    assert [(m.case, m.direction) for m in found] == [
        ("small-float32", "forward"),
        ("small-float32", "backward"),
        ("wide-float32", "forward"),
    ]
    assert {m.case for m in comparison.run(suite, cases=["w*"], peers=False, show=shown.append)} == {"wide-float32"}


def test_a_rung_of_dualops_stands_before_the_peers_where_its_memory_fits(suite: Any) -> None:
    suite.rungs = ("naive",)
    found = comparison.run(suite, peers=True, show=lambda text: None)
    forward, backward = (
        next(m for m in found if (m.name, m.direction) == ("dualops naive", d)) for d in ("forward", "backward")
    )
    assert found.index(forward) == 1
    assert forward.burst == 3e-3
    assert forward.extra_memory == 2**20
    assert backward.failure == "OutOfMemoryError: CUDA out of memory."
    suite.rungs = ()


def test_a_rung_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[dict[str, Any]] = []
    names = ("flash_attention", "flash_attention_backward")
    functions = SimpleNamespace(**dict.fromkeys(names, lambda **given: called.append(given)))
    monkeypatch.setattr("benchmarks.contestant.import_module", lambda name: functions)
    case = spec.Case("toy", "float32", {}, {"causal": True})
    for rung in (None, "naive"):
        contestant = dualops_contestant(spec.OPERATORS["flash_attention"], case, rung)
        assert contestant.name == ("dualops naive" if rung else "dualops")
        assert contestant.backward is not None
        contestant.forward(q=1)
        contestant.backward(do=2)
    plain, named = {"causal": True}, {"causal": True, "kernel": "naive"}
    assert called == [{**plain, "q": 1}, {**plain, "do": 2}, {**named, "q": 1}, {**named, "do": 2}]


def test_a_wrong_dualops_stops_the_run_before_anything_is_timed(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "dualops_contestant", lambda operator, case: inaccurate(bind(operator, case)))
    monkeypatch.setattr(comparison, "turn", lambda call: pytest.fail("timed"))
    with pytest.raises(workload.WrongResult, match="softmax forward small-float32: y: max error"):
        comparison.run(suite, peers=True, show=lambda text: None)


def test_a_case_that_is_not_there_is_named_with_those_that_are(suite: Any) -> None:
    with pytest.raises(ValueError, match="no BENCH or COMPARE case 'large', it has small-float32, wide-float32"):
        comparison.run(suite, cases=["small", "large"], peers=False, show=lambda text: None)


def test_what_is_written_is_what_plot_reads(suite: Any, tmp_path: Path) -> None:
    found = comparison.run(suite, peers=True, show=lambda text: None)
    comparison.save(tmp_path / "new" / "softmax.json", comparison.document("softmax", found))
    key, peers = Key("softmax", "small-float32", "forward"), peer_runs(tmp_path / "new")["softmax"]
    assert peers.runs[key].device == "a toy"
    forward = peers.measurements[key]
    assert forward["dualops"]["burst"] == 2e-3
    assert forward["dualops"]["burst_spread"] == pytest.approx(0.15)
    assert forward["absent"]["burst"] is None
    assert json.loads((tmp_path / "new" / "softmax.json").read_text())["operator"] == "softmax"


def test_a_run_keeps_what_earlier_ones_measured_of_other_cases(suite: Any, tmp_path: Path) -> None:
    path, found = tmp_path / "softmax.json", comparison.run(suite, peers=False, show=lambda text: None)
    others = [replace(measurement, case="other-float32", burst=1.0) for measurement in found]
    for measured in ([*found, *others], found, found):
        comparison.save(path, comparison.document("softmax", measured, path))
    old, new = json.loads(path.read_text())["runs"]
    assert [m["case"] for m in old["measurements"]] == ["other-float32"] * 2
    assert [m["case"] for m in new["measurements"]] == ["small-float32"] * 2


@pytest.mark.parametrize(("shape", "axis"), [((6, 40), 0), ((2, 3, 40), -1)])
def test_peers_of_rows_refuse_other_axes(shape: tuple[int, ...], axis: int) -> None:
    with pytest.raises(NotImplementedError, match="only along the last of two"):
        of_last_axis(bind(OPERATOR, spec.Case("toy", "float32", {"x": shape}, {"axis": axis})))


def test_work_follows_the_specs_cost() -> None:
    assert Work.of(OPERATOR, CASE, "backward") == Work(4 * 240, 2 * 240 * 4, 240 * 4)
    forward_only = replace(OPERATOR, backward_cost=None)
    with pytest.raises(NotImplementedError, match="softmax has no backward"):
        Work.of(forward_only, CASE, "backward")


def test_work_of_attention_reads_what_forward_saved_and_no_gradient_of_lse() -> None:
    shapes = {"q": (2, 4, 7, 8), "k": (2, 2, 9, 8), "v": (2, 2, 9, 6), "sinks": (4,), "key_padding_mask": (2, 9)}
    case = spec.Case("toy", "bfloat16", shapes, {"return_lse": True})
    q, k, v, o, lse, sinks, mask = 2 * 448, 2 * 288, 2 * 216, 2 * 336, 4 * 56, 4 * 4, 18
    pairs = 2 * 2 * 4 * 7 * 9
    operator = spec.OPERATORS["flash_attention"]
    assert Work.of(operator, case, "forward") == Work(pairs * 14, q + k + v + sinks + mask, o + lse)
    read = q + k + v + o + lse + o + sinks + mask
    assert Work.of(operator, case, "backward") == Work(pairs * (24 + 12), read, q + k + v + sinks)


def test_work_of_sequences_is_that_of_each() -> None:
    operator = spec.OPERATORS["flash_attention_varlen"]
    shapes = {"q": (30, 2, 8), "k": (30, 1, 8), "v": (30, 1, 8), "cu_seqlens_q": (4,), "cu_seqlens_k": (4,)}
    case = spec.Case("toy", "float32", shapes, {"max_seqlen_q": 20, "max_seqlen_k": 20})
    arrays = operator.generate(operator, case, np.random.default_rng(case.seed))
    pairs = (np.diff(arrays["cu_seqlens_q"]) * np.diff(arrays["cu_seqlens_k"])).sum()
    assert 0 < pairs < 3 * 20 * 20
    assert Work.of(operator, case, "forward").flops == 2 * 2 * pairs * 16
