"""`make sanitize`: NVIDIA's compute-sanitizer over the EDGE cases of every operator on each rung.

    python -m tests.cuda.gpu.sanitize [WORD …] [--all] [--tools memcheck racecheck …] [--jobs N] [--minutes M]
                                      [--continue]

Cases whose name holds all words run under each tool; without words those whose kernels have all pairs of values that
kernels are built with (`cover`), or with --all every one. Many run in a process, several processes at a time, what
takes longest first. A process stops after a while and the cases that it has left are given to another, so that only a
single case can run out of its time; that one is killed and named. Before, each tool must complain of a kernel with a
mistake. racecheck gets kernels in which all lanes of a warp arrive at mbarriers (`where_all_lanes_arrive`). Exit code
1 for any complaint, wrong result, or case that did not end; cases for which the time did not suffice are listed, and
are no error.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.cuda.gpu import edge
from tests.cuda.gpu.cover import choose
from tests.cuda.gpu.edge import BEGINS, BROKE, DONE, WRONG, names, picked
from tests.gpus import first_gpu

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("racecheck", "initcheck", "memcheck", "synccheck")  # the slowest first
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
COMPLAINED = 9  # the exit code that a tool is asked for where Python's is 0
# cases that a process is given; and the directions of which a case takes longest, in that order
CASES_OF_A_PART = {"racecheck": 80, "initcheck": 150, "memcheck": 250, "synccheck": 250}
SLOWEST = ("retention_backward", "retention", "flash_attention", "matmul", "norm")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) ", re.MULTILINE)
COMPLAINT = re.compile(
    r"=+ (Host API|Invalid|Error|Warning|Race|Uninitialized|Barrier|Program hit|Misaligned|Potential)"
)
STARTUP = "before-any-case"
STARTING = 90  # seconds that a process may take before its first case, and a case beyond its part's time


@dataclass
class Part:
    """Cases that one process runs under a tool, and what came of them."""

    tool: str
    cases: list[str]
    log: Path = Path()
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    until: float = 0.0  # no case begins after it
    seconds: float = 0.0
    done: list[str] = field(default_factory=list)
    errors: int = 0
    faults: list[str] = field(default_factory=list)  # what went wrong
    unended: str = ""  # the case that was killed, or STARTUP
    tree: Path = ROOT

    def start(self, command: list[str], log: Path, seconds: float, number: int) -> None:
        self.log, self.began = log, time.time()
        self.until = self.began + seconds
        listed = log.with_suffix(".cases")
        listed.write_text("\n".join(self.cases))
        words = ["-m", "tests.cuda.gpu.edge", "--from", str(listed), "--until", str(self.until)]
        if self.tool == "initcheck":  # it does not see what copies of boxes write, and takes a new result for unwritten
            words.append("--given")
        # memory of its own for every tensor, so that what lies behind one belongs to nobody; a core for each process
        alone = {"OMP_NUM_THREADS": "1", "DUALOPS_HELPERS": "0"}
        environment = {**alone, **os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **first_gpu(number)}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, sys.executable, *words],
                cwd=self.tree,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def ended(self, case_seconds: float) -> bool:
        """Whether it is over; one whose last case takes too long is killed."""
        assert self.process is not None
        if self.process.poll() is None:
            if time.time() < self.until + case_seconds:
                return False
            kill(self.process)
            self.unended = self._last(BEGINS) or STARTUP
        self.seconds = time.time() - self.began
        self._judge()
        return True

    def left(self) -> list[str]:
        """The cases that are still to be run, by another process."""
        over = {*self.done, self.unended, *(line.split()[1] for line in self.faults if line.startswith(BROKE))}
        return [] if STARTUP in over else [case for case in self.cases if case not in over]

    def _judge(self) -> None:
        """Read its log. What a tool that was killed had not said yet is not known: then no case counts as done."""
        assert self.process is not None
        text = self.log.read_text(errors="replace")
        lines = text.splitlines()
        found = SUMMARY.findall(text)
        self.errors = sum(map(int, found))
        self.faults = [line for line in lines if line.startswith((WRONG, BROKE))]
        if found or self.errors:
            self.done = [line.split()[1] for line in lines if line.startswith(DONE)]
        code = self.process.returncode
        if self.errors:
            self.faults += complaints(lines)
        elif self.unended:
            self.faults.append(f"{self.unended} did not end in its time")
        elif not found or code not in (0, 1) or (code == 1 and not self.faults):
            case = self._last(BEGINS) or STARTUP
            self.faults.append(f"{BROKE} {case} exit code {code}: {lines[-1] if lines else 'nothing was said'}")
        self.errors += sum(line.startswith((WRONG, BROKE)) for line in self.faults)

    def _last(self, word: str) -> str:
        found = [line.split()[1] for line in self.log.read_text(errors="replace").splitlines() if line.startswith(word)]
        return found[-1] if found else ""


def complaints(lines: list[str]) -> list[str]:
    """The first line of what a tool complained of, with the case that was running, each once."""
    running, found = "", Counter[str]()
    for line in lines:
        if line.startswith(BEGINS):
            running = line.split()[1]
        elif COMPLAINT.match(line):
            found[f"{line.lstrip('= ')}, about {running}"] += 1
    return [f"{count} x {line}" for line, count in found.items()]


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_sanitizer(given: str | None) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    return shutil.which(given or "compute-sanitizer", path=path)


def command_of(sanitizer: str, tool: str) -> list[str]:
    # cuda.core's first question to the driver is answered by a harmless error, which is no kernel's
    return [sanitizer, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", str(COMPLAINED)]


def parts_of(tools: list[str], cases: list[str], over: set[str]) -> list[Part]:
    """Every case under every tool but those that are over, the slowest first."""
    speed = {case: next((i for i, word in enumerate(SLOWEST) if word in case), len(SLOWEST)) for case in cases}
    ordered = sorted(cases, key=speed.__getitem__)
    parts = []
    for tool in sorted(tools, key=TOOLS.index):
        left, size = [case for case in ordered if f"{tool} {case}" not in over], CASES_OF_A_PART[tool]
        parts += [Part(tool, left[place : place + size]) for place in range(0, len(left), size)]
    return parts


def blind(sanitizer: str, tools: list[str], logs: Path) -> list[str]:
    """The tools that do not complain of a kernel with a mistake, and why."""
    running, found = {}, []
    for tool in tools:
        words = [*command_of(sanitizer, tool), sys.executable, "-m", "tests.cuda.gpu.edge", "--mistake", tool]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        with (logs / f"mistake-{tool}.txt").open("wb") as log:
            running[tool] = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
    for tool, process in running.items():
        try:
            code = process.wait(2 * STARTING)
        except subprocess.TimeoutExpired:
            kill(process)
            code = None
        log = logs / f"mistake-{tool}.txt"  # the exit code may be that of Python, which had an error of CUDA's
        if not sum(map(int, SUMMARY.findall(log.read_text(errors="replace")))):
            found.append(f"{tool} said nothing of a mistake (exit code {code}): {log}")
    return found


class Campaign:
    """Parts that wait, that run, and that are over."""

    def __init__(self, sanitizer: str, logs: Path, jobs: int, part_seconds: float, deadline: float):
        self.sanitizer, self.logs, self.jobs = sanitizer, logs, jobs
        self.part_seconds, self.deadline = part_seconds, deadline
        self.over: list[Part] = []

    def run(self, waiting: list[Part]) -> list[Part]:
        """Run the parts. Returns those that there was no time for."""
        running: list[Part] = []
        try:
            return self._run(waiting, running)
        finally:
            for part in running:  # who was interrupted leaves nothing behind
                if part.process is not None:
                    kill(part.process)

    def _run(self, waiting: list[Part], running: list[Part]) -> list[Part]:
        while waiting or running:
            while waiting and len(running) < self.jobs and time.time() < self.deadline - STARTING:
                part = waiting.pop(0)
                seconds = min(self.part_seconds, self.deadline - time.time() - STARTING / 2)
                number = len(self.over) + len(running)
                log = self.logs / f"{part.tool}-{number:03}.txt"
                part.start(command_of(self.sanitizer, part.tool), log, seconds, number)
                running.append(part)
            if not running:
                return waiting
            time.sleep(0.05)
            for part in [part for part in running if part.ended(STARTING)]:
                running.remove(part)
                self.over.append(part)
                self.tell(part)
                if left := part.left():
                    waiting.insert(0, Part(part.tool, left, tree=part.tree))
        return []

    def tell(self, part: Part) -> None:
        """One line of a part, and what went wrong in it; which cases are over is kept."""
        span = f"{part.cases[0]} … {part.done[-1] if part.done else ''}"
        print(f"{part.tool:10}{len(part.done):5} cases{part.errors:4} errors{part.seconds:6.0f} s  {span}", flush=True)
        for line in part.faults:
            print(f"    {line}", flush=True)
        if not part.errors:
            with (self.logs / "passed.txt").open("a") as file:
                file.writelines(f"{part.tool} {case}\n" for case in part.done)


def summary(parts: list[Part], waiting: list[Part]) -> int:
    """A table with a line a tool, what did not end or was not run, and the exit code."""
    bad = 0
    print(f"\n{'tool':10}{'cases':>7}{'errors':>8}{'not ended':>11}{'not run':>9}{'process s':>11}")
    for tool in TOOLS:
        mine = [part for part in parts if part.tool == tool]
        left = Counter(case.partition("-")[0] for part in waiting if part.tool == tool for case in part.cases)
        if not mine and not left:
            continue
        errors, unended = sum(part.errors for part in mine), [part.unended for part in mine if part.unended]
        done, seconds = sum(len(part.done) for part in mine), sum(part.seconds for part in mine)
        print(f"{tool:10}{done:7}{errors:8}{len(unended):11}{left.total():9}{seconds:11.0f}")
        for name in unended:
            print(f"    did not end: {name}")
        if left:
            print("    not run: " + ", ".join(f"{count} of {name}" for name, count in left.items()))
        bad += errors + len(unended)
    return 1 if bad else 0


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.gpu.sanitize", description="EDGE cases, sanitized")
    parser.add_argument("words", nargs="*", help="in the name of each case that is run, as retention_backward-simt")
    parser.add_argument("--all", action="store_true", help="every case, not those alone that have all pairs of values")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=120, help="for all; what is left by then is not run")
    parser.add_argument("--part-minutes", type=float, default=3, help="after which a process begins no other case")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="without what passed before")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/sanitize", help="folder; default: build/sanitize")
    parser.add_argument("--sanitizer", help="the program, if it is not compute-sanitizer on PATH or under /usr/local")
    parsed = parser.parse_intermixed_args(given)
    parsed.sanitizer = find_sanitizer(parsed.sanitizer)
    if parsed.sanitizer is None:
        parser.error("compute-sanitizer was not found: it is part of the CUDA toolkit; --sanitizer says where it is")
    parsed.cases = list(picked(names(), parsed.words))
    if not parsed.cases:
        parser.error(f"no EDGE case is named like {' '.join(parsed.words)}")
    return parsed


def where_all_lanes_arrive(folder: Path) -> Path:
    """Copy the library and its tests to a folder; there all lanes of a warp arrive at mbarriers. Return the copy."""
    tree = folder / "all-lanes-arrive"
    for package in ("dualops", "tests"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = tree / "dualops/cuda/tile/pipeline.py"
    text, line = file.read_text(), "\nARRIVING_LANES = 1 "
    if line not in text:
        raise ValueError(f"{file}: expected one line that begins with {line.strip()!r}")
    file.write_text(text.replace(line, "\nARRIVING_LANES = 32 "))
    return tree


def fewer(cases: list[str]) -> list[str]:
    """Those of the cases whose kernels have all pairs of values."""
    from tests.cuda.gpu.warm import kernels_of_tests

    needs, kernels = kernels_of_tests(edge.calls_of(cases))
    return choose(needs, kernels, (), len(kernels)).tests


def warm(cases: list[str], trees: Iterable[Path], logs: Path) -> None:
    """Compile what the cases need, so that no process does so under a tool."""
    listed = logs / "warm.cases"
    listed.write_text("\n".join(cases))
    for tree in trees:
        words = ["-m", "tests.cuda.gpu.edge", "--from", str(listed), "--warm"]
        subprocess.run([sys.executable, *words], cwd=tree, check=True)


def main(given: list[str] | None = None) -> int:
    wanted = arguments(given)
    deadline = time.time() + 60 * wanted.minutes
    passed = wanted.logs / "passed.txt"
    over = set(passed.read_text().splitlines()) if wanted.goes_on and passed.exists() else set()
    if not wanted.goes_on:
        shutil.rmtree(wanted.logs, ignore_errors=True)
    wanted.logs.mkdir(parents=True, exist_ok=True)
    if not (wanted.all or wanted.words):
        count = len(wanted.cases)
        wanted.cases = fewer(wanted.cases)
        print(f"{len(wanted.cases)} of {count} cases have all pairs of values that their kernels are built with")
    parts = parts_of(wanted.tools, wanted.cases, over)
    print(f"{len(wanted.cases)} cases under {', '.join(wanted.tools)}: {len(parts)} parts, {wanted.jobs} at a time")
    if unseen := blind(wanted.sanitizer, wanted.tools, wanted.logs):
        print("\n".join(unseen))
        return 1
    copy = where_all_lanes_arrive(wanted.logs) if "racecheck" in wanted.tools else ROOT
    for part in parts:
        part.tree = copy if part.tool == "racecheck" else ROOT
    warm(wanted.cases, sorted({part.tree for part in parts}), wanted.logs)
    campaign = Campaign(wanted.sanitizer, wanted.logs, wanted.jobs, 60 * wanted.part_minutes, deadline)
    waiting = campaign.run(parts)
    return summary(campaign.over, waiting)


if __name__ == "__main__":
    sys.exit(main())
