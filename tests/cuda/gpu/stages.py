"""Runs of pytest in a process of their own: timed, logged, stopped when their time is over, summarized in a line."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
GPU, BRIDGE = "tests/cuda/gpu", "tests/torch_bridge"
TIMED = f"{GPU}/test_timed.py"
PROGRESS = re.compile(r"^[.sxXFE]+ *\[ *\d+%\]$|^(scheduling tests|created: |bringing up nodes)")
LAST_WORD = re.compile(r"^warm: |^[= ]*\d+ (passed|failed|errors?|skipped|deselected|tests? collected)\b")
NOTHING_SELECTED = 5  # pytest's exit code
GRACE = 20  # seconds in which pytest may say what it knows, before it is killed
MOST_LINES = 120  # of a stage that failed; the log has all


class Stage(NamedTuple):
    """One run of pytest."""

    name: str
    arguments: list[str]
    environment: Mapping[str, str] = {}
    may_be_empty: bool = False  # nothing selected is no failure


class Outcome(NamedTuple):
    """What came of a stage."""

    name: str
    passed: bool
    seconds: float
    last_word: str
    lines: list[str]  # what is worth reading: why it failed, or what was skipped or left out

    def __str__(self) -> str:
        return f"{self.name:24}{self.seconds:6.0f}  {'' if self.passed else 'FAILED: '}{self.last_word}"


def spread(processes: int) -> list[str]:
    """The arguments for this number of processes."""
    return ["-n", str(processes), "--dist", "loadgroup"] if processes > 1 else []


def picked(words: str) -> list[str]:
    """The arguments for tests whose names fit, all tests if `words` is empty."""
    return ["-k", words] if words else []


def run(stage: Stage, log: Path, seconds: float, root: Path = ROOT) -> Outcome:
    """Run a stage in a tree; what is not done in its time is stopped."""
    if seconds < 1:
        return Outcome(stage.name, False, 0.0, "not run: no time was left", [])
    began = time.perf_counter()
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfEs",
        "--tb=short",
        "-o",
        "faulthandler_timeout=180",
        *stage.arguments,
    ]
    # a process a core: libraries that start threads and processes of their own would be in each other's way
    alone = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "DUALOPS_HELPERS": "0"}
    environment = {**alone, **os.environ, **stage.environment}
    with log.open("w") as file:
        process = subprocess.Popen(
            words, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            ended = _wait(process, seconds)
        finally:
            _stop(process, signal.SIGKILL)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line and not PROGRESS.match(line)]
    passed = ended and process.returncode in (0, *([NOTHING_SELECTED] if stage.may_be_empty else []))
    summaries = [line.strip("= ") for line in lines if LAST_WORD.search(line)]
    last = summaries[-1] if summaries else f"exit code {process.returncode}"
    if not ended:
        last = f"did not end in {seconds:.0f} s: {last}"
    worth_reading = (
        [line for line in lines if line.startswith(("SKIPPED", "chosen: "))] if passed else lines[-MOST_LINES:]
    )
    return Outcome(stage.name, passed, time.perf_counter() - began, last, worth_reading)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process ended in time; one that did not is asked to stop, and is given a while for it."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    _stop(process, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    return False


def _stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """A process and its children, whichever are left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    if how is signal.SIGKILL:
        process.wait()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))
