"""`make sanitize` with a tool that only pretends: who gets which cases, and what is said of what goes wrong."""

import os
import shutil
import subprocess
import sys

import pytest

from dualops.cuda.launch import device as devices
from dualops.spec import OPERATORS, Tag
from tests.checks import Rejected
from tests.cuda.gpu import edge, sanitize
from tests.cuda.gpu.cover import covered_by
from tests.cuda.gpu.warm import kernels_of_tests
from tests.cuda.operators import DIRECTIONS, Direction

SIMULATED = {"NUMBA_ENABLE_CUDASIM": "1"}
# plays compute-sanitizer and the process under it; what a case is called says what becomes of it
TOOL = f"""#!{sys.executable}
import os, sys, time
tool, given = sys.argv[sys.argv.index("--tool") + 1], sys.argv
assert given[3:7] == ["--report-api-errors", "no", "--error-exitcode", "9"]
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
if "--mistake" in given:
    blind = os.environ.get("BLIND") == tool
    print("========= ERROR SUMMARY:", "0 errors" if blind else "1 error")
    sys.exit(0 if blind else 1 if tool == "memcheck" else 9)
if os.environ.get("FIRST") == "dies":
    sys.exit("no device")
complaints, code = 0, 0
for place, case in enumerate(open(given[given.index("--from") + 1]).read().split()):
    if place and time.time() > float(given[given.index("--until") + 1]):
        break
    print("begins", case, flush=True)
    if "dies" in case:
        os.abort()
    if "races" in case and tool == "racecheck":
        complaints += 2
        print("========= Error: Race reported between Write access at f and Read access at f")
        print("========= Error: Race reported between Write access at f and Read access at f")
    if "wrong" in case:
        code = 1
        print("wrong", case, "Rejected: y: max error", flush=True)
    if "broken" in case:
        print("broke", case, "RuntimeError: CUDA error")
        code = 1
        break
    print("done", case, flush=True)
name = "RACECHECK" if tool == "racecheck" else "ERROR"
print(f"========= {{name}} SUMMARY: {{complaints}} errors")
sys.exit(9 if complaints else code)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """(cases, arguments) -> exit code and what was printed."""
    tool = tmp_path / "tool"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize, "warm", lambda *given: None)
    monkeypatch.setattr(sanitize, "fewer", lambda cases: cases[:-1] if "too-many" in cases else cases)
    monkeypatch.setattr(sanitize, "STARTING", 1.0)

    def start(cases: str, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(sanitize, "names", cases.split)
        logs = ["--sanitizer", str(tool), "--logs", str(tmp_path / "logs"), "--jobs", "2"]
        code = sanitize.main([*words, *logs])
        return code, capsys.readouterr().out

    return start


def row(out: str, tool: str) -> list[int]:
    """Cases, errors, not ended, not run."""
    (found,) = [line for line in out.splitlines() if line.startswith(tool) and "cases" not in line]
    return [int(word) for word in found.split()[1:5]]


def test_all_is_well(run):
    code, out = run("softmax-a softmax-b norm-c")
    assert code == 0
    for tool in sanitize.TOOLS:
        assert row(out, tool) == [3, 0, 0, 0]


def test_words_pick_cases_and_tools_are_picked(run):
    for words in (
        ["softmax", "backward", "--tools", "memcheck"],
        ["--tools", "memcheck", "--jobs", "1", "softmax_back"],
    ):
        code, out = run("softmax-a softmax_backward-a norm-a", *words)
        assert code == 0 and row(out, "memcheck") == [1, 0, 0, 0] and "racecheck" not in out


def test_a_complaint_is_an_error_of_its_tool_alone(run):
    code, out = run("softmax-a softmax-races", "--tools", "racecheck", "memcheck")
    assert code == 1 and row(out, "racecheck") == [2, 2, 0, 0] and row(out, "memcheck") == [2, 0, 0, 0]
    assert "2 x Error: Race reported between Write access at f and Read access at f, about softmax-races" in out


def test_a_wrong_result_and_a_broken_case(run):
    code, out = run("a-wrong b-broken c d", "--tools", "synccheck")
    assert code == 1 and row(out, "synccheck") == [3, 2, 0, 0]
    assert "wrong a-wrong Rejected: y: max error" in out and "broke b-broken RuntimeError" in out


def test_a_process_that_dies_takes_no_other_case_with_it(run):
    code, out = run("a b-dies c", "--tools", "memcheck")
    assert code == 1 and row(out, "memcheck") == [2, 1, 0, 0]
    assert "broke b-dies exit code -6" in out


def test_nothing_runs_where_nothing_starts(run, monkeypatch):
    monkeypatch.setenv("FIRST", "dies")
    code, out = run("a b", "--tools", "memcheck")
    assert code == 1 and row(out, "memcheck") == [0, 1, 0, 0]
    assert "exit code 1: no device" in out


def test_a_tool_that_sees_no_mistake_is_not_believed(run, monkeypatch):
    monkeypatch.setenv("BLIND", "racecheck")
    code, out = run("a")
    assert code == 1 and "racecheck said nothing of a mistake" in out and "cases  errors" not in out


@pytest.mark.parametrize(
    ("names", "until", "code", "expected"),
    [
        ("a b", 1e99, 0, ["begins a", "done a", "begins b", "done b"]),
        ("a b", 0, 0, ["begins a", "done a"]),
        ("wrong b", 1e99, 1, ["begins wrong", "wrong wrong Rejected: y: no", "done wrong", "begins b", "done b"]),
        ("a broken b", 1e99, 1, ["begins a", "done a", "begins broken", "broke broken RuntimeError: CUDA error"]),
    ],
)
def test_cases_one_after_another(names, until, code, expected, monkeypatch, capsys):
    direction = Direction(OPERATORS["softmax"], False)

    def check(spec, case, function, **options):
        if case == "wrong":
            raise Rejected("y:\n no")
        if case == "broken":
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(edge, "check", check)
    monkeypatch.setattr(edge, "cases", lambda: {name: (direction, "simt", name) for name in names.split()})
    assert edge.run(names.split(), until) == code
    assert capsys.readouterr().out.splitlines() == expected


def test_fewer_cases_without_words(run):
    assert row(run("a b too-many")[1], "memcheck")[0] == 2
    assert row(run("a b too-many", "--all")[1], "memcheck")[0] == 3
    assert row(run("an b too-many", "n")[1], "memcheck")[0] == 2


def test_the_cases_that_have_all_pairs(monkeypatch):
    """Of an operator: each kernel's values and pairs are those of a kernel of a case that is left."""
    device = devices.known("sm_90a")
    monkeypatch.setattr(devices, "current", lambda: device)
    direction = next(direction for direction in DIRECTIONS if direction.name == "layer_norm")
    every = {case.id: (direction, None, case) for case in direction.spec.tagged(Tag.EDGE)}
    monkeypatch.setattr(edge, "cases", lambda: every)
    few = sanitize.fewer([*every])
    assert 0 < len(few) < len(every)
    needs, kernels = kernels_of_tests(edge.calls_of([*every]))
    found = [
        set().union(*(covered_by(kernels[each]) for name in names for each in needs[name])) for names in (few, every)
    ]
    assert found[0] == found[1]


def test_in_the_copy_all_lanes_arrive(tmp_path):
    """racecheck's kernels differ in nothing else, and are not those that are on the disk. Their mbarriers count as many
    arrivals as there are.
    """
    tree = sanitize.where_all_lanes_arrive(tmp_path)
    pipeline = "import dualops.cuda.tile.pipeline as p; print(p.ARRIVING_LANES, p.arrivals(4))"
    key = "; from dualops.cuda.compiler.sources import digest; print(digest(frozenset([p.__name__])))"
    lanes, digests = zip(
        *(
            subprocess.run(
                [sys.executable, "-c", pipeline + key], cwd=cwd, text=True, stdout=-1, check=True
            ).stdout.split("\n", 1)
            for cwd in (sanitize.ROOT, tree)
        )
    )
    assert lanes == ("1 4", "32 128") and digests[0] != digests[1]
    changed = [
        path
        for path in (tree / "dualops").rglob("*.py")
        if path.read_text() != (sanitize.ROOT / path.relative_to(tree)).read_text()
    ]
    assert changed == [tree / "dualops/cuda/tile/pipeline.py"]
    shutil.copy(sanitize.ROOT / "pyproject.toml", tree)
    for file, word in (
        ("test_retention_sm90.py", "each_row and steps and 130"),
        ("test_attention_gradients.py", "own and 66"),
        ("test_norm_configs.py", "test_ring and float32"),
    ):
        words = ["-m", "pytest", "-q", "-p", "no:xdist", f"tests/cuda/simulator/{file}", "-k", word]
        done = subprocess.run(
            [sys.executable, *words], cwd=tree, env=os.environ | SIMULATED, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
