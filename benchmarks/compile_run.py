"""The CPU time that a kernel takes to build, without a GPU: Numba's front end, then NVVM's and ptxas' link.

    python -m benchmarks compile --json benchmarks/compile/ratios.json

Seconds depend on the machine and its load. So the committed figures are ratios to `reference`, a fixed program in
Python that is measured before and after each build. A figure is the least of several builds in one process. The first
build of a process also does work that later ones share, and is shown separately.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

from .tree import ROOT

ARCH = "sm_90a"
COMMITTED = ROOT / "benchmarks" / "compile" / "ratios.json"
_HEADS = "q=2x8x2048x128:bfloat16 k=2x8x2048x128 v=2x8x2048x128"
_ATTENTION = f"flash_attention {_HEADS} causal=True"


class Case(NamedTuple):
    """Kernels of a problem: those whose identity contains one of `parts`, or all."""

    name: str
    problem: str
    parts: tuple[str, ...] = ("",)


CASES = (
    Case("attention forward, causal", f"{_ATTENTION} return_lse=True", ("sm90.forward",)),
    Case("attention forward, causal, softcap", f"{_ATTENTION} softcap=30 return_lse=True", ("sm90.forward",)),
    Case("attention fused gradient, causal", f"{_ATTENTION} return_lse=True", ("sm90.fused",)),
    Case("attention fused gradient, causal, softcap", f"{_ATTENTION} softcap=30 return_lse=True", ("sm90.fused",)),
    Case("attention with softcap and window, all kernels", f"{_ATTENTION} softcap=50 window=(1023,0) return_lse=True"),
    Case("retention rows", "retention q=2x4x2048x128:bfloat16 k=2x4x2048x128 v=2x4x2048x128", ("sm80.rows",)),
    Case("norm gradient ring", "rms_norm x=4096x4096:bfloat16 w=4096", ("ring_backward",)),
    Case("norm rows", "rms_norm x=4096x4096:bfloat16 w=4096", ("rows.registers",)),
    Case("matmul sm90", "matmul a=4096x4096:bfloat16 b=4096x4096", ("sm90.persistent",)),
)


@dataclass(frozen=True)
class Row:
    """CPU seconds of a case for the front end and the link, those of the first front end, and the ratios."""

    name: str
    kernels: int
    front: float
    link: float
    first: float
    front_ratio: float
    link_ratio: float


def reference() -> float:
    """Measure the CPU seconds of a fixed program like the front end: with objects, dictionaries, strings, calls."""

    class Node:
        def __init__(self, name: str, value: int):
            self.name, self.value = name, value

    began = process_time()
    for _ in range(5):
        found: dict[str, Any] = {}
        for number in range(20_000):
            node = Node(f"v{number & 1023}", number)
            before = found.get(node.name)
            if isinstance(before, Node) and before.value & 1:
                node.value += len([before.value, number])
            found[node.name] = node
        sorted(found, key=lambda name: found[name].value)
    return process_time() - began


def kernels(case: Case) -> list[Any]:
    """Return the case's kernels, each once."""
    from dualops.cuda.compiler.offline import to_warm
    from dualops.cuda.launch.device import every

    found = [wanted.kernel for wanted in to_warm([case.problem], every(ARCH))]
    if case.parts != ("",):
        # forward builds one kernel for calls that keep lse and one for those that don't: the last is the former
        found = [each for each in found if any(part in each.identity for part in case.parts)][-1:]
    if not found:
        raise ValueError(f"compile: {case.problem} has no kernel of {', '.join(case.parts)} on {ARCH}")
    return found


def measure(case: Case, runs: int = 3) -> Row:
    """Measure the least of `runs` builds of each kernel, summed, and the reference before and after each build."""
    from dualops.cuda.compiler.compile import link, lto_ir

    front = links = first = 0.0
    references = []
    wanted = kernels(case)
    for kernel in wanted:
        fronts, linked = [], []
        for _ in range(runs):
            gc.collect()  # garbage of earlier builds must not count
            references.append(reference())
            began = process_time()
            code = lto_ir(kernel, ARCH)
            made = process_time()
            link(code, ARCH)
            fronts.append(made - began)
            linked.append(process_time() - made)
            references.append(reference())
        front, links, first = front + min(fronts), links + min(linked), first + fronts[0]
    unit = min(references)
    return Row(case.name, len(wanted), front, links, first, front / unit, links / unit)


def run(names: Iterable[str], runs: int, show: Callable[[str], None]) -> list[Row]:
    """Measure these cases, or all if there is no name, and show each when it is done."""
    from dualops.cuda.compiler.frontend import prepare

    prepare()
    chosen = tuple(names)
    cases = [case for case in CASES if not chosen or any(name in case.name for name in chosen)]
    show(f"{'':46s} {'kernels':>7s} {'front end':>10s} {'link':>6s} {'first':>6s} {'ratios':>14s}")
    found = []
    for case in cases:
        row = measure(case, runs)
        found.append(row)
        times = f"{row.front:8.2f} s {row.link:4.2f} s {row.first:4.2f} s"
        show(f"{row.name:46s} {row.kernels:7d} {times} {row.front_ratio:7.1f} {row.link_ratio:6.1f}")
    return found


def save(path: Path, rows: Iterable[Row]) -> None:
    """Write the ratios; keep those of cases that were not measured now."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    for row in rows:
        numbers = asdict(row)
        kept[row.name] = {name: round(numbers[name], 1) for name in ("front_ratio", "link_ratio")}
    path.write_text(json.dumps(kept, indent=2) + "\n")


def committed() -> dict[str, dict[str, float]]:
    """Return the committed ratios, by case."""
    return json.loads(COMMITTED.read_text())
