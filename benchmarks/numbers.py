"""All numbers of one commit on one GPU, in parts: `python -m benchmarks numbers`.

A part is one BENCH or COMPARE case with its peers, or another command of `python -m benchmarks`. README's cases come
first. A part writes a file that names its commit and GPU. A part whose file has this commit and this GPU is not
measured again. So if the time of a run ends, the next run continues. The kernels of all parts are built first, on all
cores. Most of a part's time is spent in the compilers of peers. So some parts first run all at once, without results:
then the kernels of peers that have a cache on the disk (FlashAttention-4, Triton) are there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, NamedTuple

from .headlines import HEADLINES
from .ladder_table import PAGES
from .recorded import Key, keys, peer_runs
from .tree import ROOT

AT_ONCE = 8  # parts that run at once to build the kernels of peers
MOST_SECONDS = 200.0  # for these
CACHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}  # of peers, which the environment must turn on


class Source(NamedTuple):
    """The commit and the GPU of numbers."""

    commit: str
    gpu: str


class Part(NamedTuple):
    """Some numbers: the command that measures them, and their file."""

    name: str
    words: tuple[str, ...]
    path: Path
    keys: tuple[Key, ...] = ()  # for a case with its peers: its directions

    def done(self, source: Source) -> bool:
        """Return whether the file has these numbers of this commit and GPU."""
        if not self.path.exists():
            return False
        if self.keys:
            runs = peer_runs(self.path.parent)[self.keys[0].operator].runs
            return all(key in runs and (runs[key].commit, runs[key].device) == source for key in self.keys)
        content = json.loads(self.path.read_text())
        return (content["commit"], content["gpu"]) == source


def parts(folder: Path, machine: str, gpus: int) -> list[Part]:
    """Return every part: README's cases with their peers, all that is no case, and the other cases.

    folder: of all files; machine: its name in file names.
    """
    cases: dict[tuple[str, str], list[Key]] = {(row.operator, row.case): [] for row in HEADLINES}
    for key in keys():
        cases.setdefault((key.operator, key.case), []).append(key)
    found = []
    for (operator, case), ways in cases.items():
        path = folder / "peer_results" / f"{operator}.json"
        words = ("run", operator, "--peers", "--case", case, "--json", str(path))
        found.append(Part(f"{operator} {case}", words, path, tuple(ways)))
    others = []
    for name in ("host", "scaling", *(("context",) if gpus > 1 else ())):
        path = folder / name / f"{machine}.json"
        others.append(Part(name, (name, "--json", str(path)), path))
    for operator in PAGES:
        path = folder / "ladder" / operator / f"{machine}.json"
        others.append(Part(f"ladder {operator}", ("ladder", operator, "--json", str(path)), path))
    path = folder / "training" / "llama.json"
    others.append(Part("training", ("training", "--json", str(path)), path))
    return [*found[: len(HEADLINES)], *others, *found[len(HEADLINES) :]]


def run(
    every: Sequence[Part],
    source: Source,
    seconds: float,
    measure: Callable[[Sequence[str]], int],
    *,
    warm: Callable[[Sequence[str]], object],
    warm_peers: Callable[[Sequence[Part], float, Callable[[str], None]], object],
    show: Callable[[str], None],
) -> int:
    """Measure the missing parts until the time ends. measure: a command line -> its exit code. warm: builds the kernels
    of cases, "operator:case". warm_peers: `build_kernels_of_peers`.

    A part begins only if one as long as the longest so far would end in time. Returns 0 if all parts are done, 1 if one
    failed, 3 if the time was over.
    """
    began, longest, failed = monotonic(), 0.0, []
    left = [part for part in every if not part.done(source)]
    show(f"{len(every) - len(left)} of {len(every)} parts are there, of {source.commit[:8]} on {source.gpu}")
    if cases := [f"{part.keys[0].operator}:{part.keys[0].case}" for part in left if part.keys]:
        warm(cases)
    for number, part in enumerate(left):
        if number % AT_ONCE == 0 and monotonic() - began < seconds:
            warm_peers(left[number : number + AT_ONCE], began + seconds - monotonic(), show)
        if monotonic() - began + longest > seconds:
            show(f"{len(left) - number} parts are left: run the same command again")
            return 3
        show(part.name)
        start = monotonic()
        if measure(part.words):
            failed.append(part.name)
        longest = max(longest, monotonic() - start)
    if failed:
        show(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def build_kernels_of_peers(some: Sequence[Part], seconds: float, show: Callable[[str], None]) -> None:
    """Run the cases among these parts at once, in processes, for at most `seconds`; discard their results.

    torch.compile gets a folder that is removed: it would keep which kernels were fastest while others ran.
    """
    end, quiet, started = monotonic() + min(seconds, MOST_SECONDS), subprocess.DEVNULL, list["subprocess.Popen[str]"]()
    with TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        try:
            for number, part in enumerate(part for part in some if part.keys):
                words = [sys.executable, "-m", "benchmarks", *part.words[:-1], f"{folder}/{number}.json"]
                ways: dict[str, Any] = {"stdout": quiet, "stderr": quiet, "cwd": ROOT, "env": environment}
                started.append(subprocess.Popen(words, **ways, start_new_session=True))
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - monotonic()))
        finally:
            for process in started:
                with suppress(ProcessLookupError):  # its compilers, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if failed := sum(process.returncode != 0 for process in started):
        show(f"kernels of peers: {failed} of {len(started)} processes were stopped or failed")


def missing(source: Source) -> str | None:
    """Return why numbers of this source could not be distinguished from others, or None."""
    if source.commit == "unknown":
        return "this is no clone with its history: nobody could tell which commit the numbers are of"
    if source.commit.endswith("+"):
        return "dualops or benchmarks differ from the commit: commit the changes first"
    return None
