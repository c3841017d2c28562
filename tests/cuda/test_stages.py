"""Runs of pytest that `make test-gpu` consists of: what is said of them, and that each ends."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.cuda.gpu import __main__ as main, stages
from tests.cuda.gpu.__main__ import stages as of_everything
from tests.cuda.gpu.stages import Outcome, Stage, picked, run, spread

TESTS = """
import os, time, pytest
def test_good(): assert os.environ["OMP_NUM_THREADS"] == "1"
@pytest.mark.skip("needs two of them")
def test_omitted(): pass
def test_bad(): assert 1 == 2
def test_endless(): time.sleep(60)
def test_deadly(): os.abort()
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(words, seconds) -> what came of the tests of such names, which no folder of theirs has."""
    monkeypatch.setattr(stages, "GRACE", 5)
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)

    def start(only: str, seconds: float = 60, processes: int = 1, may_be_empty: bool = False) -> Outcome:
        plugins = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # whose import takes longer than all else
        arguments = [*plugins, *spread(processes), "-k", only, str(file)]
        return run(Stage("a stage", arguments, may_be_empty=may_be_empty), tmp_path / "log.txt", seconds)

    return start


def test_what_passes(ran):
    outcome = ran("good or omitted", processes=2)
    assert outcome.passed and outcome.last_word.startswith("1 passed, 1 skipped")
    assert [line.partition(": ")[2] for line in outcome.lines] == ["needs two of them"]


def test_what_fails(ran):
    outcome = ran("good or bad or omitted")
    assert not outcome.passed and outcome.last_word.startswith("1 failed, 1 passed, 1 skipped")
    assert any(line.startswith("FAILED ") for line in outcome.lines)
    assert any(line.endswith(": needs two of them") for line in outcome.lines)
    assert "FAILED: 1 failed" in str(outcome)


def test_what_does_not_end(ran):
    outcome = ran("good or endless", seconds=5)
    assert not outcome.passed and "did not end in 5 s" in outcome.last_word


def test_what_dies(ran):
    assert not ran("deadly").passed
    outcome = ran("good or deadly", processes=2)
    assert not outcome.passed and any("crashed" in line for line in outcome.lines)


def test_no_time_and_no_tests(ran):
    assert ran("good", seconds=0).last_word == "not run: no time was left"
    assert not ran("nothing_of_that_name").passed
    assert ran("nothing_of_that_name", may_be_empty=True).passed


def test_every_test_is_in_one_stage():
    """What is timed is in the first alone. The last compiles nothing first, and takes the choice of the second."""
    timed, compiling, others = of_everything(4, "softmax", {"DUALOPS_TEST_LEFT_OUT": "list"})
    assert picked("") == [] and picked("softmax") == ["-k", "softmax"] == timed.arguments[:2]
    assert timed.arguments[-1] == stages.TIMED and (stages.ROOT / stages.TIMED).exists()
    assert others.arguments[-5:] == ["-k", "softmax", f"--ignore={stages.TIMED}", stages.GPU, stages.BRIDGE]
    assert compiling.environment == others.environment == {"DUALOPS_TEST_LEFT_OUT": "list"}


def test_the_modules_that_were_edited(tmp_path, monkeypatch):
    files = [
        tmp_path / "dualops" / name
        for name in ("cuda/__init__.py", "cuda/launch/device.py", "cuda/launch/step.py", "py.typed")
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    who = {f"GIT_{role}_{what}": "test" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for words in (["init", "--quiet"], ["add", "dualops"], ["commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, env={**os.environ, **who})
    for file in (files[0], files[2], files[3]):
        file.write_text("edited")
    monkeypatch.setattr(main, "ROOT", tmp_path)
    assert main.edited("HEAD") == ["dualops.cuda", "dualops.cuda.launch.step"]
