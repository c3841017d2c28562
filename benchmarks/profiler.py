"""Counters of the kernels that a command launches, by Nsight Compute (`ncu`).

Clocks are not changed; caches are flushed before each kernel. The profiler runs a kernel several times to count
everything. So its times differ from those of a plain run, and are not recorded.
"""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from .tree import ROOT

MOST_SECONDS = 300
SCALES = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}  # for an old ncu without base units


class NoCounters(RuntimeError):
    """Nothing was counted; the message says why."""


class Profiled(NamedTuple):
    """One launch of a kernel."""

    kernel: str
    grid: str
    block: str
    metrics: dict[str, float | None]  # None: not available for this kernel


def profile(command: Sequence[str], kernels: str, metrics: Sequence[str]) -> list[Profiled]:
    """Return the launches, in order, of the kernels whose names match the regular expression `kernels`.

    Metrics that this profiler does not know are left out. Raises NoCounters if there is no profiler, if it has no
    permission, or if the command fails.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoCounters("ncu (Nsight Compute) is not on PATH")
    options = ["--csv", "--print-units", "base", "--clock-control", "none", "--target-processes", "all"]
    options += ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{kernels}"]
    words = [ncu, *options, "--metrics", ",".join(metrics), *command]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired as slow:
        raise NoCounters(f"ncu did not end in {MOST_SECONDS} s") from slow
    found = parse(done.stdout)
    if found:
        return found
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("==ERR", "==WARN"))]
    known = [metric for metric in metrics if not any(metric in line for line in complaints)]
    if known and len(known) < len(metrics):
        return profile(command, kernels, known)
    reasons = complaints or (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
    raise NoCounters(f"ncu ended with {done.returncode}: {'; '.join(reasons[:3])}")


def version() -> str | None:
    """Return the profiler's version, None if there is none."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return None
    output = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version (\S+)", output)
    return found[1] if found else None


def parse(output: str) -> list[Profiled]:
    """Parse the launches from the output of `ncu --csv --metrics ...`, which has a line per launch and metric.

    Lines that are not CSV are the profiler's own (`==PROF== ...`), or the command's.
    """
    rows = list(csv.reader(line for line in output.splitlines() if line.startswith('"')))
    heads = [i for i, row in enumerate(rows) if row[0] == "ID" and "Metric Name" in row]
    if not heads:
        return []
    found: dict[int, Profiled] = {}
    for values in rows[heads[0] + 1 :]:
        row: dict[str, Any] = dict(zip(rows[heads[0]], values))
        if row["ID"].isdigit() and "Metric Value" in row:
            new = Profiled(row["Kernel Name"], row.get("Grid Size", ""), row.get("Block Size", ""), {})
            launch = found.setdefault(int(row["ID"]), new)
            launch.metrics[row["Metric Name"]] = number(row["Metric Value"], row["Metric Unit"])
    return [found[launch] for launch in sorted(found)]


def number(text: str, unit: str) -> float | None:
    """Parse `268,435,456` as a number; None for a text that is not a number (`n/a`)."""
    try:
        value = float(text.replace(",", "")) * SCALES.get(unit, 1)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
