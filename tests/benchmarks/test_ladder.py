"""`python -m benchmarks ladder` on the CPU: NumPy in the kernels' place, a profiler that is made up, and its tables."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dualops.cuda.roof
from benchmarks import ladder_run, ladder_table, profiler, workload
from benchmarks.__main__ import main
from benchmarks.contestant import Contestant
from benchmarks.ladder_run import METRICS, Point, line
from benchmarks.plot import fill
from benchmarks.profiler import NoCounters, parse, profile
from benchmarks.tree import ROOT, spec

from .test_peers import referee

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
KERNEL = "dualops::cuda::softmax::ladder::build_keep::_3clocals_3e::softmax_keep[abi:v1](uint16_2a, uint16_2a, int)"


def row(launch: int, metric: str, unit: str, value: str, kernel: str = KERNEL) -> str:
    cells = [str(launch), "4242", "python3.12", "127.0.0.1", kernel, "1", "7", "(256, 1, 1)", "(32768, 1, 1)", "0"]
    cells += ["9.0", "Command line profiler metrics", metric, unit, value]
    return ",".join(f'"{cell}"' for cell in cells)


def printed(*rows: str) -> str:
    before = '==PROF== Connected to process 4242 (/usr/bin/python3.12)\n==PROF== Profiling "softmax_keep": 0%....100%'
    return "\n".join([f"{before} - 12 passes", "thread_a_row, tree", "==PROF== Disconnected", HEAD, *rows, ""])


# --- what ncu prints -----------------------------------------------------------------------------


def test_a_launch_has_its_metrics():
    output = printed(
        row(0, "dram__bytes_read.sum", "byte", "268,435,456"),
        row(0, "launch__registers_per_thread", "register/thread", "48"),
        row(1, "dram__bytes_read.sum", "Mbyte", "268.44", 'another "kernel", quoted'.replace('"', '""')),
        row(1, "launch__registers_per_thread", "register/thread", "n/a"),
        row(1, "smsp__issue_active.avg.per_cycle_active", "inst/cycle", "nan"),
    )
    first, second = parse(output)
    assert first == profiler.Profiled(
        KERNEL,
        "(32768, 1, 1)",
        "(256, 1, 1)",
        {"dram__bytes_read.sum": 268435456.0, "launch__registers_per_thread": 48.0},
    )
    assert second.kernel == 'another "kernel", quoted'
    assert second.metrics == {
        "dram__bytes_read.sum": pytest.approx(268.44e6),
        "launch__registers_per_thread": None,
        "smsp__issue_active.avg.per_cycle_active": None,
    }


@pytest.mark.parametrize("output", ["", "==ERROR== nothing\n", '"quoted",but\n"no","head"\n', HEAD])
def test_no_launches(output: str):
    assert parse(output) == []


# --- the profiler --------------------------------------------------------------------------------

SCRIPT = """#!/bin/sh
case "$*" in
    *--version*) echo 'NVIDIA (R) Nsight Compute Command Line Profiler'; echo 'Version 2025.3.1.0 (build 1)'; exit;;
esac
echo "$*" >> "$0.calls"
{0}
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a profiler on PATH that is this piece of shell."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(shell: str) -> Path:
        place = tmp_path / "ncu"
        place.write_text(SCRIPT.format(shell))
        place.chmod(0o755)
        return tmp_path / "ncu.calls"

    return install


def test_the_command_runs_under_the_profiler(ncu: Any):
    calls = ncu(f"cat <<'END'\n{printed(row(0, 'smsp__inst_executed.sum', 'inst', '1,024'))}END")
    (found,) = profile(["python", "-m", "something"], "softmax", ["smsp__inst_executed.sum", "b"])
    assert found.metrics == {"smsp__inst_executed.sum": 1024.0}
    words = calls.read_text().split()
    assert words[-3:] == ["python", "-m", "something"]
    for option, value in (
        ("--clock-control", "none"),
        ("--print-units", "base"),
        ("--kernel-name", "regex:softmax"),
        ("--metrics", "smsp__inst_executed.sum,b"),
    ):
        assert words[words.index(option) + 1] == value
    assert profiler.version() == "2025.3.1.0"


def test_a_metric_that_the_profiler_does_not_know_is_left_out(ncu: Any):
    good = f"cat <<'END'\n{printed(row(0, 'good', 'inst', '1'))}END"
    calls = ncu(f'case "$*" in *,odd*) echo "==ERROR== Failed to find metric odd"; exit 1;; *) {good}\n;; esac')
    (found,) = profile(["true"], "softmax", ["good", "odd"])
    assert found.metrics == {"good": 1.0}
    assert len(calls.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("shell", "reason"),
    [
        ('echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"; exit 1', "ERR_NVGPUCTRPERM"),
        ('echo "==WARNING== No kernels were profiled."', "No kernels were profiled"),
        ('echo "Traceback"  >&2; echo "ValueError: wrong" >&2; exit 3', "ncu ended with 3: ValueError: wrong"),
        ("exit 4", "ncu ended with 4: it said nothing"),
    ],
)
def test_why_nothing_was_counted(ncu: Any, shell: str, reason: str):
    ncu(shell)
    with pytest.raises(NoCounters, match=reason):
        profile(["true"], "softmax", ["a"])


def test_without_a_profiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoCounters, match="not on PATH"):
        profile(["true"], "softmax", METRICS)
    assert profiler.version() is None


# --- the run -------------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rows of 8 and 16 elements, NumPy for kernels, of which one does not do 16; gives the names of those timed."""
    timed: list[str] = []

    def refuses(**given: torch.Tensor) -> Any:
        if given["x"].shape[1] > 8:
            raise NotImplementedError("no such rows")
        return softmax(**given)

    def softmax(out: Any = None, **given: torch.Tensor) -> Any:
        (result,) = referee(ladder_run.OPERATOR, ladder_run.case_of(8)).forward(**given)
        return result if out is None else out.copy_(result)

    def seconds(call: Any) -> float:
        call()
        timed.append("burst")
        return 4e-3

    monkeypatch.setattr(ladder_run, "ROWS", 4)
    monkeypatch.setattr(ladder_run, "COLUMNS", (8, 16))
    monkeypatch.setattr(ladder_run, "COUNTED", 16)
    monkeypatch.setattr(ladder_run, "Workload", partial(workload.Workload, device="cpu"))
    monkeypatch.setattr(workload, "ROTATION_BYTES", 1)
    monkeypatch.setattr(ladder_run, "require_gpu", lambda: None)
    monkeypatch.setattr(
        ladder_run, "contestants", lambda case: [Contestant("tree", softmax), Contestant("vectors", refuses)]
    )
    monkeypatch.setattr(ladder_run, "burst", seconds)
    monkeypatch.setattr(dualops.cuda.roof, "stream_roof", lambda read, written: 1e-6 * (read + written))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a toy")
    return timed


def test_the_contestants_are_the_steps_and_the_production_kernels():
    from dualops.cuda.softmax.ladder import STEPS

    names = [contestant.name for contestant in ladder_run.contestants(ladder_run.case_of(1024))]
    assert names == [*STEPS, "rows.py", "ring.py"]


def test_what_is_timed_is_what_people_run():
    cases = {case.id: dict(case.shapes) for case in ladder_run.OPERATOR.tagged(spec.Tag.BENCH)}
    for columns in ladder_run.COLUMNS:
        case = ladder_run.case_of(columns)
        assert cases[case.id] == case.shapes


def test_everybody_is_timed_beside_the_roof(toy: list[str]):
    shown: list[str] = []
    found = ladder_run.run(shown.append)
    assert len(shown) == len(found) == 4 and len(toy) == 3
    roofs = {8: 1e-6 * 2 * 4 * 8 * 2, 16: 1e-6 * 2 * 4 * 16 * 2}  # read and written, two bytes each
    for point in found:
        refused = (point.who, point.columns) == ("vectors", 16)
        assert (point.seconds, point.failure) == ((None, "no such rows") if refused else (4e-3, None))
        assert point.roof == pytest.approx(roofs[point.columns])


def test_a_wrong_step_stops_the_run_before_it_is_timed(toy: list[str], monkeypatch: pytest.MonkeyPatch):
    right = ladder_run.contestants(ladder_run.case_of(8))[0].forward
    wrong = Contestant("tree", lambda **given: 1.01 * right(**given))
    monkeypatch.setattr(ladder_run, "contestants", lambda case: [wrong])
    with pytest.raises(workload.WrongResult, match="tree rows4x8-bfloat16: "):
        ladder_run.run(lambda text: None)
    assert not toy


def test_a_line_reads_well():
    assert " ".join(line(Point("vectors", 4096, 1.2e-4, 1.5e-4)).split()) == "4096 vectors 150.0 µs 80% of the roof"
    assert line(Point("vectors", 4096, 1.2e-4, failure="no such rows")).endswith("vectors        no such rows")


def test_under_a_profiler_each_is_launched_once(toy: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert ladder_run.launch_once(device="cpu") == ["tree"]


def test_the_command_writes_times_and_counters(toy: list[str], ncu: Any, tmp_path: Path):
    calls = ncu(f"cat <<'END'\n{printed(*(row(0, metric, 'one', '64') for metric in METRICS))}END")
    target = tmp_path / "ladder" / "toy.json"
    assert main(["ladder", "softmax", "--json", str(target)]) == 0
    assert "-m benchmarks ladder softmax --once" in calls.read_text()
    content = json.loads(target.read_text())
    assert (content["gpu"], content["dtype"], content["rows"], len(content["points"])) == ("a toy", "bfloat16", 4, 4)
    (kernel,) = content["counters"]["kernels"]
    assert (kernel["who"], kernel["kernel"], kernel["metrics"]) == ("tree", KERNEL, dict.fromkeys(METRICS, 64.0))
    assert ladder_table.tables(target).startswith("4 rows of bfloat16 on one a toy, ")


def test_without_counters_the_times_are_kept(toy: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ladder_run, "profile", lambda *_: [])
    target = tmp_path / "toy.json"
    assert main(["ladder", "softmax", "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert content["counters"]["failure"] == "ncu saw 0 kernels, expected 1: tree"
    assert "Counters: none were recorded. ncu saw 0 kernels" in ladder_table.tables(target)


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in (["ladder", "softmax"], ["ladder", "softmax", "--once"]):
        assert main(words) == 1
        assert "benchmarks need a GPU" in capsys.readouterr().err


# --- the tables ----------------------------------------------------------------------------------

RECORDED: dict[str, Any] = {
    "operator": "softmax",
    "dtype": "bfloat16",
    "rows": 100,
    "date": "1970-01-09",
    "gpu": "NVIDIA H200",
    "torch": "2.11",
    "commit": "f" * 40,
    "points": [
        {"who": who, "columns": columns, "roof": 1e-4, "seconds": seconds, "failure": None}
        for who, seconds32, seconds64 in (("tree", 4e-4, 2e-4), ("vectors", None, 1e-4))
        for columns, seconds in ((32, seconds32), (64, seconds64))
    ],
    "counters": {
        "rows": 100,
        "columns": 64,
        "profiler": "2025.3.1.0",
        "failure": None,
        "kernels": [
            {"who": "tree", "metrics": dict.fromkeys(METRICS, 6400.0)},
            {"who": "vectors", "metrics": {"launch__registers_per_thread": 31.0, "dram__bytes_read.sum": None}},
        ],
    },
}


def test_the_tables(tmp_path: Path):
    source = tmp_path / "h200.json"
    source.write_text(json.dumps(RECORDED))
    text = ladder_table.tables(source)
    assert "100 rows of bfloat16 on one NVIDIA H200, 1970-01-09, commit `ffffffff`" in text
    assert "by Nsight Compute 2025.3.1.0" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    rows = {label: values for label, *values in cells}
    assert rows["`tree`"] == ["0.4 ms, 25%", "0.2 ms, 50%"] and rows["`vectors`"] == ["–", "0.1 ms, 100%"]
    # 100 rows of 64 elements of two bytes are 12800 bytes
    expected = {
        "read from memory, sizes of x": ["0.50", "–"],
        "read from L2, sizes of x": ["16.00", "–"],
        "memory busy": ["6400%", "–"],
        "instructions an element": ["32.0", "–"],
        "turns of shared memory, a row": ["64.0", "–"],
        "registers a thread": ["6400", "31"],
    }
    assert {label: rows[label] for label in expected} == expected
    assert {counter.label for counter in ladder_table.COUNTERS} <= rows.keys()


def test_nothing_recorded(tmp_path: Path):
    assert ladder_table.COMMAND in ladder_table.tables(tmp_path / "h200.json")


def test_the_page_shows_what_is_recorded():
    page = (ROOT / "dualops" / "cuda" / "softmax" / "README.md").read_text()
    assert fill(page, ladder_table.tables(ROOT / "benchmarks" / "ladder" / "h200.json"), *ladder_table.MARKERS) == page
