"""asv end to end, with the repository's own configuration: three commits of a toy project are timed and published."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from asv.util import UserError

from benchmarks import needs_gpu
from benchmarks.recorded import Key, recordings
from benchmarks.tree import ROOT
from tests.processes import python_path

COMMITS = (0.5, 0.25, 2.0)  # what the toy says it takes at each commit

SUITE = """
import dualops
from .clock import VirtualClock

CLOCK = VirtualClock()

class Softmax:
    params = ["rows32768x1024-bfloat16"]
    timer, number, rounds, repeat, warmup_time, version = CLOCK, 1, 1, 3, 0.0, "1"

    def time_forward(self, case):
        import settings  # a package that only PYTHONPATH knows
        CLOCK.advance(dualops.SECONDS * settings.FACTOR)
"""


def command(folder: Path, *words: str, home: Path) -> str:
    """Run it in `folder`, with a home of its own and no path but that of `settings`; its output."""
    env = {
        **os.environ,
        "HOME": str(home),
        "PYTHONPATH": str(home / "packages"),
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{f"GIT_{who}_{what}": "toy" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    done = subprocess.run(words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with three recorded commits; its working tree holds a fourth version that must not be timed."""
    home = tmp_path_factory.mktemp("home")
    root = home / "toy"
    (root / "benchmarks").mkdir(parents=True)
    (root / "dualops").mkdir()
    (home / "packages").mkdir()
    (home / "packages" / "settings.py").write_text("FACTOR = 4\n")
    command(root, "git", "init", "--quiet", home=home)
    for day, seconds in enumerate(COMMITS, 1):
        (root / "dualops" / "__init__.py").write_text(f"SECONDS = {seconds}\n")
        command(root, "git", "add", "dualops", home=home)
        command(root, "git", "commit", "--quiet", f"--date=2026-01-0{day}T00:00", "-m", "a commit", home=home)
    (root / "dualops" / "__init__.py").write_text("SECONDS = 1000.0\n")
    conf = json.loads((ROOT / "asv.conf.json").read_text("utf-8"))
    conf["plugins"].remove(".benchmarks.needs_gpu")  # toys are timed on a CPU
    (root / "asv.conf.json").write_text(json.dumps(conf))
    for name in ("__init__.py", "environment.py", "clock.py"):
        shutil.copy(ROOT / "benchmarks" / name, root / "benchmarks")
    (root / "benchmarks" / "softmax.py").write_text(SUITE)
    asv = (sys.executable, "-m", "asv")
    command(root, *asv, "machine", "--machine", "toy", "--cpu", "a toy", home=home)
    command(root, *asv, "run", "--machine", "toy", "--record-samples", "HEAD -3", home=home)
    command(root, *asv, "publish", home=home)
    return root


def test_each_commit_is_timed_as_it_was(toy: Path) -> None:
    history = recordings(toy / "benchmarks" / "results", "toy")
    key = Key("softmax", "rows32768x1024-bfloat16", "forward")
    assert [one.seconds for one in history] == [{key: 4 * seconds} for seconds in COMMITS]
    assert {one.device for one in history} == {"a toy"}


def test_the_graph_has_a_point_for_each_commit(toy: Path) -> None:
    (graph,) = (toy / "benchmarks" / "html" / "graphs").rglob("machine-toy/**/softmax.Softmax.time_forward.json")
    points = json.loads(graph.read_text())
    assert [value for _, value in points] == [[4 * seconds] for seconds in COMMITS]  # a list a case


def test_the_tree_is_left_as_it_was(toy: Path) -> None:
    assert (toy / "dualops" / "__init__.py").read_text() == "SECONDS = 1000.0\n"


def asv(*words: str) -> subprocess.CompletedProcess[str]:
    """asv on this very checkout, where no GPU is seen."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
    return subprocess.run(
        [sys.executable, "-m", "asv", *words],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize("words", [("run", "HEAD^!"), ("run", "--machine", "nowhere"), ("continuous", "HEAD~1")])
def test_without_a_gpu_nothing_is_begun(words: tuple[str, ...]) -> None:
    """Not even a machine is asked for, and no benchmark is discovered."""
    done = asv(*words)
    assert done.returncode == 1, done.stdout
    (output,) = [line for line in done.stdout.splitlines() if line]
    assert "benchmarks need a GPU that torch can use. " in output and output.endswith("Nothing was timed.")


def test_what_times_nothing_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for word in ("check", "publish", "preview", "machine"):
        monkeypatch.setattr(sys, "argv", ["asv", word])
        needs_gpu.setup()
    monkeypatch.setattr(sys, "argv", ["asv", "--verbose", "run"])
    with pytest.raises(UserError, match=r"^benchmarks need a GPU that torch can use\. .*Nothing was timed\.$"):
        needs_gpu.setup()


def test_the_extra_has_what_the_suite_imports() -> None:
    """asv imports every module of the suite when it lists the benchmarks: what these import is a dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    provided, left = {"dualops"}, [*project["dependencies"], *project["optional-dependencies"]["bench"]]
    while left:
        name, extras = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?.*", left.pop()).groups()  # type: ignore[union-attr]
        provided.add(name)
        left += [
            each for extra in (extras or "").split(",") if extra for each in project["optional-dependencies"][extra]
        ]
    imported = set()
    for path in (ROOT / "benchmarks").glob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").partition(".")[0])
    assert {"asv", "torch"} <= imported
    assert imported - set(sys.stdlib_module_names) <= provided | {"asv_runner"}  # which asv brings
