"""`python -m benchmarks numbers`: which parts there are, what is measured again, and when a run stops."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import numbers
from benchmarks.comparison import commit
from benchmarks.headlines import HEADLINES
from benchmarks.numbers import Part, Source, missing, parts, run
from benchmarks.recorded import keys

HERE, EARLIER = Source("a" * 40, "NVIDIA H200"), Source("b" * 40, "NVIDIA H200")
Clock = Callable[[float], None]


@pytest.fixture
def elapse(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Lets time go on, for `run` alone."""
    now = [0.0]
    monkeypatch.setattr(numbers, "monotonic", lambda: now[0])

    def on(seconds: float) -> None:
        now[0] += seconds

    return on


def write(part: Part, source: Source) -> None:
    """A file as the command of a part leaves it."""
    part.path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"commit": source.commit, "gpu": source.gpu, "date": "2026-11-29"}
    if part.keys:
        earlier = json.loads(part.path.read_text())["runs"] if part.path.exists() else []
        content["measurements"] = [
            {"case": key.case, "direction": key.direction, "name": "dualops"} for key in part.keys
        ]
        content = {"operator": part.keys[0].operator, "runs": [*earlier, content]}
    part.path.write_text(json.dumps(content))


def ran(
    every: Sequence[Part], elapse: Clock, seconds: float = 100.0, fails: str = ""
) -> tuple[int, list[str], list[str]]:
    """Exit code, parts that were measured in 10 seconds each, and cases whose kernels were built."""
    measured, built = [], []

    def measure(words: Sequence[str]) -> int:
        elapse(10)
        (part,) = (part for part in every if part.words == words)
        measured.append(part.name)
        if part.name == fails:
            return 1
        write(part, HERE)
        return 0

    def warm_peers(some: Sequence[Part], left: float, show: Callable[[str], None]) -> None:
        assert 0 < len(some) <= numbers.AT_ONCE and 0 < left <= seconds
        assert not {part.name for part in some} & {*measured, *warmed}
        warmed.extend(part.name for part in some)

    warmed: list[str] = []
    ways: dict[str, Any] = {"warm": built.extend, "warm_peers": warm_peers}
    code = run(every, HERE, seconds, measure, **ways, show=lambda line: None)
    assert warmed[: len(measured)] == measured
    return code, measured, built


def test_every_case_is_a_part(tmp_path: Path) -> None:
    every = parts(tmp_path, "h200", gpus=1)
    assert sorted(key for part in every for key in part.keys) == sorted(keys())
    others = [part.name for part in every if not part.keys]
    assert others == ["host", "scaling", "ladder softmax", "ladder matmul", "training"]
    assert "context" in [part.name for part in parts(tmp_path, "h200", gpus=2)]
    assert len({part.words for part in every}) == len(every)
    assert [part.keys for part in every[: len(HEADLINES)]] == [tuple(row.keys) for row in HEADLINES]


def test_what_is_there_is_not_measured_again(tmp_path: Path, elapse: Clock) -> None:
    every = parts(tmp_path, "h200", gpus=1)
    one, two, *_ = every
    last = next(part for part in every if not part.keys)
    assert one.path == two.path
    write(one, EARLIER)
    write(two, HERE)
    write(last, HERE)
    code, measured, built = ran([one, two, last], elapse)
    assert (code, measured) == (0, [one.name])
    assert built == [f"{one.keys[0].operator}:{one.keys[0].case}"]
    assert ran([one, two, last], elapse) == (0, [], [])
    write(last, EARLIER)
    assert ran([one, two, last], elapse) == (0, [last.name], [])


def test_a_run_stops_in_time_and_the_next_one_goes_on(tmp_path: Path, elapse: Clock) -> None:
    every = [part for part in parts(tmp_path, "h200", gpus=1) if not part.keys]
    names = [part.name for part in every]
    assert ran(every, elapse, seconds=35)[:2] == (3, names[:3])
    assert ran(every, elapse, seconds=35)[:2] == (0, names[3:])


def test_a_part_that_fails_is_reported_and_skipped(tmp_path: Path, elapse: Clock) -> None:
    every = [part for part in parts(tmp_path, "h200", gpus=1) if not part.keys]
    names = [part.name for part in every]
    assert ran(every, elapse, fails=names[0])[:2] == (1, names)
    assert ran(every, elapse)[:2] == (0, names[:1])


def test_kernels_of_peers_are_built_without_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases alone, in processes that write to another file and are ended in time."""
    every = parts(tmp_path, "h200", gpus=1)
    some = [*every[:2], next(part for part in every if not part.keys)]
    began: list[list[str]] = []
    ended, said = list[int](), list[str]()

    class Process:
        returncode = -9

        def __init__(self, words: list[str], env: dict[str, str], **others: Any) -> None:
            assert env["TORCHINDUCTOR_CACHE_DIR"] != os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            assert others["start_new_session"]
            began.append(words)
            self.pid = len(began)

        def wait(self, timeout: float | None = None) -> None:
            if timeout is not None:
                assert timeout <= 5
                raise subprocess.TimeoutExpired("benchmarks", timeout)

    monkeypatch.setattr(numbers.subprocess, "Popen", Process)
    monkeypatch.setattr(numbers.os, "killpg", lambda pid, _: ended.append(pid))
    numbers.build_kernels_of_peers(some, 5.0, said.append)
    assert [words[1:-1] for words in began] == [["-m", "benchmarks", *part.words[:-1]] for part in some[:2]]
    assert not {words[-1] for words in began} & {part.words[-1] for part in some} and ended == [1, 2]
    assert said == ["kernels of peers: 2 of 2 processes were stopped or failed"] and not any(tmp_path.iterdir())


def test_numbers_are_of_a_commit() -> None:
    assert missing(HERE) is None
    assert "no clone" in (missing(Source("unknown", "NVIDIA H200")) or "")
    assert "commit the changes" in (missing(Source("a" * 40 + "+", "NVIDIA H200")) or "")


def test_new_results_leave_the_commit_as_it_is(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        names = "-c", "user.name=one", "-c", "user.email=one@example.org"
        subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True)

    files = [tmp_path / name for name in ("benchmarks/peer_results/a.json", "benchmarks/run.py", "dualops/a.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    results, *sources = files
    results.write_text("2")
    clean = commit(tmp_path)
    assert len(clean) == 40
    for file in sources:
        file.write_text("2")
        assert commit(tmp_path) == clean + "+"
        file.write_text("1")
