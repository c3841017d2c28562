"""`python -m benchmarks run`: who is timed, what a failing peer leaves, what the JSON holds. Times are made up here."""

from __future__ import annotations

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
from benchmarks.__main__ import main
from benchmarks.contestant import Contestant, dualops_contestant
from benchmarks.recorded import Key, peer_runs
from benchmarks.softmax import eager, of_last_axis
from benchmarks.tree import spec
from benchmarks.work import Work, bind
from dualops.cuda import roof as memory

CASE = spec.Case("small", "float32", {"x": (6, 40)}, tags=frozenset({spec.Tag.BENCH}))
OPERATOR = spec.OPERATORS["softmax"]


def missing(problem: spec.Problem) -> Contestant:
    raise ImportError("No module named 'absent'\nand more")


def inaccurate(problem: spec.Problem) -> Contestant:
    return Contestant("inaccurate", lambda x: torch.softmax(x, -1) * 1.01)


def misshapen(problem: spec.Problem) -> Contestant:
    return Contestant("misshapen", lambda x: torch.softmax(x, -1)[:, :3], lambda y, dy: dy[:, :3])


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A softmax suite of one small case on the CPU, where dualops takes 2 ms and everybody else 3 ms."""
    calls: list[object] = []

    def seconds(call: Any) -> float:
        call()
        calls.append(call)
        return 2e-3 if len(calls) <= 2 else 3e-3

    monkeypatch.setattr(OPERATOR.__class__, "tagged", lambda self, tag: [CASE])
    monkeypatch.setattr(workload, "Workload", partial(workload.Workload, device="cpu"))
    monkeypatch.setattr(workload, "ROTATION_BYTES", 2000)
    monkeypatch.setattr(cases, "dualops_contestant", lambda operator, case: own(bind(operator, case)))
    monkeypatch.setattr(comparison, "dualops_contestant", rung_of)
    monkeypatch.setattr(comparison, "require_gpu", lambda: None)
    monkeypatch.setattr(comparison, "roof", lambda work, dtype: 1e-3)
    monkeypatch.setattr(comparison, "burst", seconds)
    monkeypatch.setattr(comparison, "single", seconds)
    monkeypatch.setattr(comparison, "extra_memory", lambda call: 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a toy")
    peers = {"torch eager": eager, "absent": missing, "inaccurate": inaccurate, "misshapen": misshapen}
    return cases.suite("softmax", sample=cases.find("softmax").sample, peers=peers)


def own(problem: spec.Problem) -> Contestant:
    return eager(problem)._replace(name="dualops")


def rung_of(operator: spec.Spec, case: spec.Case, rung: str) -> Contestant:
    """A rung whose gradient needs more memory than there is."""

    def backward(**arrays: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    return eager(bind(operator, case))._replace(name=f"dualops {rung}", backward=backward)


@pytest.mark.parametrize(("flops", "longer"), [(3000, 10.0), (5000, 12.5)], ids=["memory", "arithmetic"])
def test_the_roof_is_the_longer_of_moving_and_computing(
    flops: int, longer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "stream_roof", lambda read, written: read / 100 + written / 50)
    monkeypatch.setattr(comparison, "matmul_rate", lambda dtype: {torch.bfloat16: 400.0}[dtype])
    assert comparison.roof(Work(flops, 600, 200), "bfloat16") == longer


def test_each_peer_that_has_the_direction_leaves_a_line(suite: Any) -> None:
    shown: list[str] = []
    found = comparison.run(suite, case=None, peers=True, show=shown.append)
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
    assert len(shown) == 1 + len(found)
    assert found[2].failure == "ImportError: No module named 'absent'"
    assert (found[4].failure or "").startswith("ValueError: y: shape (6, 3), expected (6, 40)")
    assert found[3].failure is None
    assert found[3].error == pytest.approx(0.01, rel=1e-3)
    assert shown[3].split()[3:] == ["ImportError:", "No", "module", "named", "'absent'"]


def test_the_columns_are_ratios_to_dualops_in_the_same_run(suite: Any) -> None:
    shown: list[str] = []
    comparison.run(suite, case="small-float32", peers=True, show=shown.append)
    rate = 2 * 6 * 40 * 4 / 1e12
    for text, seconds in ((shown[1], 2e-3), (shown[2], 3e-3)):
        cells = [cell for cell in text.split("  ") if cell.strip()]
        ratio, took = f"{seconds / 2e-3:.2f}", f"{seconds * 1e3:.3f} ms"
        assert [cell.strip() for cell in cells[3:7]] == [took, ratio, took, ratio]
        assert cells[7].strip() == f"{rate / seconds:.2f} TB/s"
        assert cells[8].strip() == f"{1e-3 / seconds:.1%}"
        assert cells[10].strip() == "1.00 MiB"


def test_a_rung_of_dualops_stands_before_the_peers_where_its_memory_fits(suite: Any) -> None:
    suite.rungs = ("naive",)
    found = comparison.run(suite, case=None, peers=True, show=lambda text: None)
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


def test_without_peers_there_is_dualops_alone(suite: Any) -> None:
    found = comparison.run(suite, case="small", peers=False, show=lambda text: None)
    assert [m.name for m in found] == ["dualops", "dualops"]


def test_a_wrong_dualops_stops_the_run_before_anything_is_timed(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "dualops_contestant", lambda operator, case: inaccurate(bind(operator, case)))
    monkeypatch.setattr(comparison, "burst", lambda call: pytest.fail("timed"))
    with pytest.raises(workload.WrongResult, match="softmax forward small-float32: y: max error"):
        comparison.run(suite, case=None, peers=True, show=lambda text: None)


def test_a_case_that_is_not_there_is_named_with_those_that_are(suite: Any) -> None:
    with pytest.raises(ValueError, match="softmax has no BENCH case 'large', it has small-float32"):
        comparison.run(suite, case="large", peers=False, show=lambda text: None)


def test_what_is_written_is_what_plot_reads(suite: Any, tmp_path: Path) -> None:
    found = comparison.run(suite, case=None, peers=True, show=lambda text: None)
    comparison.save(tmp_path / "new" / "softmax.json", comparison.document("softmax", found))
    key, peers = Key("softmax", "small-float32", "forward"), peer_runs(tmp_path / "new")["softmax"]
    assert peers.runs[key].device == "a toy"
    forward = peers.measurements[key]
    assert forward["dualops"]["burst"] == 2e-3
    assert forward["absent"]["burst"] is None
    assert json.loads((tmp_path / "new" / "softmax.json").read_text())["operator"] == "softmax"


def test_a_run_keeps_what_earlier_ones_measured_of_other_cases(suite: Any, tmp_path: Path) -> None:
    path, found = tmp_path / "softmax.json", comparison.run(suite, case=None, peers=False, show=lambda text: None)
    others = [replace(measurement, case="other-float32", burst=1.0) for measurement in found]
    for measured in ([*found, *others], found, found):
        comparison.save(path, comparison.document("softmax", measured, path))
    old, new = json.loads(path.read_text())["runs"]
    assert [m["case"] for m in old["measurements"]] == ["other-float32"] * 2
    assert [m["case"] for m in new["measurements"]] == ["small-float32"] * 2


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["run", "softmax"]) == 1
    assert "benchmarks need a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("shape", "axis"), [((6, 40), 0), ((2, 3, 40), -1)])
def test_peers_of_rows_refuse_other_axes(shape: tuple[int, ...], axis: int) -> None:
    with pytest.raises(NotImplementedError, match="only along the last of two"):
        of_last_axis(bind(OPERATOR, spec.Case("toy", "float32", {"x": shape}, {"axis": axis})))


@pytest.mark.parametrize(("seconds", "text"), [(31.4e-6, "31.4 µs"), (1.2066e-3, "1.207 ms")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert comparison.duration(seconds) == text


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
