"""`make test-gpu`: everything that is tested on a GPU, in stages, the last of them in many processes.

    python -m tests.cuda.gpu [--jobs N] [--minutes M] [--only WORDS] [--logs FOLDER]

What is timed runs alone. The bridge's tests on the CPU come next, since they tell which kernels those on the GPU will
need. Then all kernels are compiled, and then the tests run. Exit code 1 if anything failed or did not end.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
GPU, BRIDGE = "tests/cuda/gpu", "tests/torch_bridge"
PROGRESS = re.compile(r"^(\.|[a-zA-Z])*[.sxFE]+ *\[ *\d+%\]$|^(scheduling tests|created: |bringing up nodes)")
LAST_WORD = re.compile(r"^warm: |^[= ]*\d+ (passed|failed|errors?|skipped|deselected)\b")
NOTHING_SELECTED = 5  # pytest's exit code
GRACE = 20  # seconds in which pytest may say what it knows, before it is killed
MOST_LINES = 200  # of a stage that failed; the log has all


class Stage(NamedTuple):
    """One run of pytest."""

    name: str
    arguments: list[str]
    records: bool = False  # calls, or reads what was recorded


def stages(jobs: int, only: str) -> list[Stage]:
    def picked(words: str) -> str:
        return f"{words} and ({only})" if only else words

    spread = ["-n", str(jobs), "--dist", "loadgroup"]
    narrow = ["-k", only] if only else []
    return [
        Stage("what is timed", ["-m", "alone", *narrow, GPU, BRIDGE]),
        Stage("the bridge on the CPU", [*spread, "-m", "not alone", "-k", picked("not cuda"), BRIDGE], records=True),
        Stage("compiling", ["--collect-only", "-qq", *narrow, GPU], records=True),
        Stage("on the GPU", [*spread, "-m", "not alone", "-k", picked("cuda"), GPU, BRIDGE]),
    ]


def run(stage: Stage, environment: dict[str, str], log: Path, seconds: float) -> tuple[bool, str]:
    """Whether a stage passed, and its last word; what failed is printed."""
    words = [sys.executable, "-m", "pytest", "-q", "-rs", "-o", "faulthandler_timeout=180", *stage.arguments]
    with log.open("w") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, process_group=0
        )
        ended = _wait(process, seconds)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line and not PROGRESS.match(line)]
    passed = ended and process.returncode in (0, NOTHING_SELECTED)
    for line in lines[-MOST_LINES:] if not passed else [line for line in lines if line.startswith("SKIPPED")]:
        print(f"    {line}")
    told = [
        line for line in lines if line.startswith("warm: ") or re.search(r"\d (passed|failed|error|deselected)", line)
    ]
    last = told[-1].strip("= ") if told else f"exit code {process.returncode}"
    return passed, last if ended else f"did not end in {seconds:.0f} s: {last}"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process ended in time; else it and its children are stopped."""
    for patience, stop in ((max(seconds, 1), signal.SIGINT), (GRACE, signal.SIGKILL)):
        try:
            process.wait(patience)
            return stop is signal.SIGINT
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, stop)
    process.wait()
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.gpu", description="all tests that need a GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    parser.add_argument("--minutes", type=float, default=30, help="what is not done by then is stopped; default: 30")
    parser.add_argument("--only", default="", metavar="WORDS", help="as pytest's -k")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/test-gpu", help="folder; default: build/test-gpu")
    given = parser.parse_args()
    if find_spec("xdist") is None:
        parser.error("pytest-xdist is missing: pip install -e '.[test]'")
    given.logs.mkdir(parents=True, exist_ok=True)
    began, summary = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as calls:
        # a process a core: libraries that start threads of their own would be in each other's way
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        for number, stage in enumerate(stages(given.jobs, given.only)):
            since = time.perf_counter()
            left, more = 60 * given.minutes - (since - began), {"DUALOPS_TEST_CALLS": calls} if stage.records else {}
            print(f"{stage.name} ...", flush=True)
            log = given.logs / f"{number}.txt"
            passed, told = run(stage, environment | more, log, left) if left > 1 else (False, "not run")
            summary.append((stage.name, time.perf_counter() - since, passed, told))
    print(f"\n{'stage':24}{'s':>6}")
    for name, seconds, passed, told in summary:
        print(f"{name:24}{seconds:6.0f}  {'' if passed else 'FAILED: '}{told}")
    print(f"{'all':24}{time.perf_counter() - began:6.0f}  logs in {given.logs}")
    return 0 if all(passed for _, _, passed, _ in summary) else 1


if __name__ == "__main__":
    sys.exit(main())
