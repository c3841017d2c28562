"""`python -m benchmarks run`: who is timed, what a failing peer leaves, what the JSON holds. Times are made up here."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cases, comparison, workload
from benchmarks.__main__ import main
from benchmarks.contestant import Contestant
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
    run = peer_runs(tmp_path / "new")["softmax"]
    assert run.device == "a toy"
    forward = run.measurements[Key("softmax", "small-float32", "forward")]
    assert forward["dualops"]["burst"] == 2e-3
    assert forward["absent"]["burst"] is None
    assert json.loads((tmp_path / "new" / "softmax.json").read_text())["operator"] == "softmax"


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["run", "softmax"]) == 1
    assert "benchmarks need a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("shape", "axis"), [((6, 40), 0), ((2, 3, 40), -1)])
def test_peers_of_rows_refuse_other_axes(shape: tuple[int, ...], axis: int) -> None:
    with pytest.raises(NotImplementedError, match="only along the last of two"):
        of_last_axis(bind(OPERATOR, spec.Case("toy", "float32", {"x": shape}, {"axis": axis})))


@pytest.mark.parametrize(("causal", "Sk"), [(False, 9), (True, 7), ("top_left", 9)])
def test_sdpa_computes_what_the_spec_says(causal: bool | str, Sk: int) -> None:
    """torch has a flash backend for the CPU too; the masks are the same."""
    shapes = {"q": (2, 4, 7, 8), "k": (2, 2, Sk, 8), "v": (2, 2, Sk, 8)}
    case = spec.Case("toy", "float32", shapes, {"causal": causal, "scale": 0.5})
    suite = cases.find("flash_attention")
    work = workload.Workload(suite.operator, case, suite.sample, device="cpu")
    assert work.check(suite.peers["SDPA flash"](work.problem), "forward").passed


def test_sdpa_refuses_a_mask_that_is_aligned_at_the_last_key() -> None:
    shapes = {"q": (1, 1, 7, 8), "k": (1, 1, 9, 8), "v": (1, 1, 9, 8)}
    problem = bind(spec.OPERATORS["flash_attention"], spec.Case("toy", "float32", shapes, {"causal": True}))
    with pytest.raises(NotImplementedError, match="aligns the causal mask at the first key"):
        cases.find("flash_attention").peers["SDPA flash"](problem)


@pytest.mark.parametrize(("seconds", "text"), [(31.4e-6, "31.4 µs"), (1.2066e-3, "1.207 ms")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert comparison.duration(seconds) == text


def test_work_follows_the_specs_cost() -> None:
    assert Work.of(OPERATOR, CASE, "backward") == Work(4 * 240, 2 * 240 * 4, 240 * 4)
    with pytest.raises(NotImplementedError, match="flash_attention has no backward"):
        Work.of(spec.OPERATORS["flash_attention"], CASE, "backward")
