"""`python -m benchmarks ladder` on the CPU: NumPy in the kernels' place, a profiler that is made up, and its tables."""

import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import dualops.cuda.tuning.roof
from benchmarks import ladder_run, ladder_table, profiler, workload
from benchmarks.__main__ import main
from benchmarks.cases import find
from benchmarks.contestant import Contestant
from benchmarks.ladder_table import MATMUL, PAGES, SOFTMAX
from benchmarks.plot import fill
from benchmarks.profiler import parse, profile
from benchmarks.tree import ROOT, spec

from .test_peers import referee

METRICS = [counter.metric for counter in SOFTMAX.counters]
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


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rows of 8 and 16 elements, NumPy for kernels, of which one does not do 16; gives the names of those timed."""
    timed: list[str] = []
    cases = tuple(spec.Case(f"rows4x{columns}", "bfloat16", {"x": (4, columns)}) for columns in (8, 16))
    operator = replace(spec.OPERATORS["softmax"], cases=cases)
    page = ladder_table.PAGES["softmax"]._replace(cases=tuple(case.id for case in cases), counted=cases[1].id)

    def refuses(**given: torch.Tensor) -> Any:
        if given["x"].shape[1] > 8:
            raise NotImplementedError("no such rows")
        return softmax(**given)

    def softmax(**given: torch.Tensor) -> Any:
        (result,) = referee(operator, cases[0]).forward(**given)
        return result

    def seconds(call: Any) -> float:
        call()
        timed.append("burst")
        return 4e-3

    find("softmax")  # its suite is made of the operator that there is
    monkeypatch.setitem(spec.OPERATORS, "softmax", operator)
    monkeypatch.setitem(ladder_table.PAGES, "softmax", page)
    monkeypatch.setitem(ladder_run.LADDERS, "softmax", ladder_run.LADDERS["softmax"]._replace(operator=operator))
    monkeypatch.setattr(ladder_run, "Workload", partial(workload.Workload, device="cpu"))
    monkeypatch.setattr(workload, "ROTATION_BYTES", 1)
    monkeypatch.setattr(ladder_run, "require_gpu", lambda: None)
    monkeypatch.setattr(
        ladder_run, "contestants", lambda *_: [Contestant("tree", softmax), Contestant("vectors", refuses)]
    )
    monkeypatch.setattr(ladder_run, "burst", seconds)
    monkeypatch.setattr(dualops.cuda.tuning.roof, "stream_roof", lambda read, written: 1e-6 * (read + written))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a toy")
    return timed


def of(operator: str) -> ladder_run.Ladder:
    return ladder_run.LADDERS[operator]


@pytest.mark.parametrize(("operator", "production"), [("softmax", ["rows.py", "ring.py"]), ("matmul", ["sm90"])])
def test_the_contestants_are_the_steps_and_the_production_kernels(operator: str, production: list[str]):
    ladder = of(operator)
    steps = import_module(ladder.steps).STEPS
    names = [contestant.name for contestant in ladder_run.contestants(ladder, ladder.case(ladder.page.counted))]
    assert names == [*steps, *production]


@pytest.mark.parametrize("operator", ladder_table.PAGES)
def test_what_is_timed_is_what_people_run(operator: str):
    """BENCH and COMPARE cases, of which one is watched by the profiler."""
    ladder = of(operator)
    found = {case.id for tag in (spec.Tag.BENCH, spec.Tag.COMPARE) for case in ladder.operator.tagged(tag)}
    assert {*ladder.page.cases} <= found and ladder.page.counted in ladder.page.cases
    assert ladder_run.LADDERS.keys() == ladder_table.PAGES.keys()


def test_every_implementation_is_timed_with_the_roof(toy: list[str]):
    shown: list[str] = []
    found = ladder_run.run(of("softmax"), shown.append)
    assert len(shown) == len(found) == 4 and len(toy) == 3
    roofs = {"rows4x8-bfloat16": 1e-6 * 2 * 4 * 8 * 2, "rows4x16-bfloat16": 1e-6 * 2 * 4 * 16 * 2}  # in and out
    for point in found:
        refused = (point.who, point.case) == ("vectors", "rows4x16-bfloat16")
        assert (point.seconds, point.failure) == ((None, "no such rows") if refused else (4e-3, None))
        assert point.roof == pytest.approx(roofs[point.case])


def test_a_wrong_step_stops_the_run_before_it_is_timed(toy: list[str], monkeypatch: pytest.MonkeyPatch):
    right = ladder_run.contestants(of("softmax"), of("softmax").operator.cases[0])[0].forward
    wrong = Contestant("tree", lambda **given: 1.01 * right(**given))
    monkeypatch.setattr(ladder_run, "contestants", lambda *_: [wrong])
    with pytest.raises(workload.WrongResult, match="tree rows4x8-bfloat16: "):
        ladder_run.run(of("softmax"), lambda text: None)
    assert not toy


def test_under_a_profiler_each_is_launched_once(toy: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert ladder_run.launch_once(of("softmax"), device="cpu") == ["tree"]


def test_the_command_writes_times_and_counters(toy: list[str], ncu: Any, tmp_path: Path):
    calls = ncu(f"cat <<'END'\n{printed(*(row(0, metric, 'one', '64') for metric in METRICS))}END")
    target = tmp_path / "ladder" / "toy.json"
    assert main(["ladder", "softmax", "--json", str(target)]) == 0
    assert "-m benchmarks ladder softmax --once" in calls.read_text()
    content = json.loads(target.read_text())
    assert (content["gpu"], content["dtype"], len(content["points"])) == ("a toy", "bfloat16", 4)
    (kernel,) = content["counters"]["kernels"]
    assert (kernel["who"], kernel["kernel"], kernel["metrics"]) == ("tree", KERNEL, dict.fromkeys(METRICS, 64.0))
    assert "\n4 rows of bfloat16 on one a toy, " in ladder_table.tables("softmax", target)


CASES = {"softmax": SOFTMAX.cases[:2], "matmul": MATMUL.cases[:2]}


def recorded(operator: str) -> dict[str, Any]:
    """As if two steps had been timed on two cases; the second of each does not do the other."""
    first, second = CASES[operator]
    return {
        "operator": operator,
        "dtype": "bfloat16",
        "date": "1970-01-09",
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "commit": "f" * 40,
        "points": [
            {"who": who, "case": case, "roof": 1e-4, "seconds": seconds, "failure": None}
            for who, of_first, of_second in (("one", 4e-4, 2e-4), ("other", None, 1e-4))
            for case, seconds in ((first, of_first), (second, of_second))
        ],
        "counters": {
            "case": second,
            "profiler": "2025.3.1.0",
            "failure": None,
            "kernels": [
                {"who": "one", "metrics": {counter.metric: 6400.0 for counter in PAGES[operator].counters}},
                {"who": "other", "metrics": {"launch__registers_per_thread": 31.0, "dram__bytes_read.sum": None}},
            ],
        },
    }


def rows_of(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {label: values for label, *values in cells}


# 32768 rows of 4096 elements of two bytes; 4096**3 multiplications of two matrices of 4096 x 4096
EXPECTED: dict[str, dict[str, float]] = {
    "softmax": {
        "DRAM reads, in sizes of x": 6400 / 2**28,
        "L2 reads, in sizes of x": 32 * 6400 / 2**28,
        "thread instructions per element": 32 * 6400 / 2**27,
        "shared-memory wavefronts per row": 6400 / 2**15,
    },
    "matmul": {
        "DRAM reads, in sizes of a and b": 6400 / 2**26,
        "thread instructions per thousand multiplications": 32 * 6400 / 2**36 * 1000,
    },
}


@pytest.mark.parametrize("operator", PAGES)
def test_the_tables(operator: str, tmp_path: Path):
    source = tmp_path / "h200.json"
    source.write_text(json.dumps(recorded(operator)))
    text, forms = ladder_table.tables(operator, source), {one.label: one.form for one in PAGES[operator].counters}
    assert "bfloat16 on one NVIDIA H200, 1970-01-09, commit `ffffffff`" in text
    assert "by Nsight Compute 2025.3.1.0" in text
    rows = rows_of(text)
    assert rows["`one`"] == ["0.4 ms, 25%", "0.2 ms, 50%"] and rows["`other`"] == ["–", "0.1 ms, 100%"]
    assert rows["registers per thread"] == ["6400", "31"] and rows["achieved occupancy"] == ["6400%", "–"]
    for label, value in EXPECTED[operator].items():
        assert rows[label] == [f"{value:{forms[label]}}", "–"], label
    assert forms.keys() <= rows.keys()


@pytest.mark.parametrize("operator", PAGES)
def test_the_picture(operator: str, tmp_path: Path):
    source, target = tmp_path / "h200.json", tmp_path / "ladder.png"
    source.write_text(json.dumps(recorded(operator)))
    ladder_table.picture(source, target)
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("operator", PAGES)
def test_the_page_shows_what_is_recorded(operator: str):
    page = (ROOT / "dualops" / "cuda" / operator / "README.md").read_text()
    source = ladder_table.recorded(operator, "h200")
    assert fill(page, ladder_table.tables(operator, source), *ladder_table.MARKERS) == page
    assert (ROOT / "docs" / ladder_table.picture_name(operator)).exists() == source.exists()
