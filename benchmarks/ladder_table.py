"""The results of `python -m benchmarks ladder` as tables and a picture for an operator's page, from the JSON alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .plot import markdown
from .tree import ROOT, spec
from .work import bind

FOLDER = ROOT / "benchmarks" / "ladder"
MARKERS = "<!-- ladder:begin -->", "<!-- ladder:end -->"
SECTOR, LANES = 32, 32  # bytes of a sector, threads of a warp
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


class Counter(NamedTuple):
    """A line of the table: a metric, in units that a reader can compare with the source of the kernel."""

    metric: str
    label: str
    unit: str  # "percent", or the unit that it is divided by; "one" is the launch
    form: str = ".2f"
    factor: float = 1.0


class Page(NamedTuple):
    """The texts and units of an operator's tables."""

    cases: tuple[str, ...]  # the timed cases, by the spec's names
    counted: str  # the profiled case
    column: Callable[[spec.Problem], str]  # the heading of a case
    timed: Callable[[spec.Problem], str]  # what is timed, on what
    share: str  # the meaning of a share, as a sentence's end
    counters: tuple[Counter, ...]
    units: Callable[[spec.Problem], Mapping[str, float]]  # in addition to "one" and "percent"


# --- the operators -------------------------------------------------------------------------------

ISSUED = "instructions per cycle and scheduler"
FROM_L2 = "lts__t_sectors_srcunit_tex_op_read.sum"
INSTRUCTIONS, ISSUES = "smsp__inst_executed.sum", "smsp__issue_active.avg.per_cycle_active"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
STALLS = (
    Counter(STALLED.format("long_scoreboard"), "stall cycles per instruction: memory", "one", ".1f"),
    Counter(STALLED.format("barrier"), "stall cycles per instruction: barrier", "one", ".1f"),
)
OCCUPANCY = (
    Counter("sm__warps_active.avg.pct_of_peak_sustained_active", "achieved occupancy", "percent", ".0f"),
    Counter("launch__registers_per_thread", "registers per thread", "one", ".0f"),
)

SOFTMAX = Page(
    cases=tuple(f"rows32768x{columns}-bfloat16" for columns in (1024, 4096, 16384)),
    counted="rows32768x4096-bfloat16",
    column=lambda p: f"{p.N} columns",
    timed=lambda p: f"{p.M} rows of {p.dtype}",
    share="a plain kernel needs that reads and writes as many bytes",
    counters=(
        Counter("dram__bytes_read.sum", "DRAM reads, in sizes of x", "sizes of x"),
        Counter("dram__bytes_write.sum", "DRAM writes, in sizes of x", "sizes of x"),
        Counter("dram__throughput.avg.pct_of_peak_sustained_elapsed", "DRAM utilization", "percent", ".0f"),
        Counter(FROM_L2, "L2 reads, in sizes of x", "sizes of x", factor=SECTOR),
        Counter(
            "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
            "sectors per load request",
            "one",
            ".1f",
        ),
        Counter(INSTRUCTIONS, "thread instructions per element", "elements", ".1f", LANES),
        Counter(ISSUES, ISSUED, "one"),
        *STALLS,
        Counter(WAVEFRONTS, "shared-memory wavefronts per row", "rows", ".1f"),
        Counter(CONFLICTS, "of these, for bank conflicts", "rows", ".1f"),
        *OCCUPANCY,
    ),
    units=lambda p: {"rows": p.M, "elements": p.M * p.N, "sizes of x": p.nbytes("x")},
)

MATMUL = Page(
    cases=("square1024-bfloat16", "square4096-bfloat16", "square8192_nn-bfloat16"),
    counted="square4096-bfloat16",
    column=lambda p: f"M = N = K = {p.M}",
    timed=lambda p: p.dtype,
    share="cuBLAS needs, which was timed right before",
    counters=(
        Counter(
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
            "tensor-core utilization",
            "percent",
            ".0f",
        ),
        Counter(
            "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active", "CUDA-core utilization", "percent", ".0f"
        ),
        Counter("dram__bytes_read.sum", "DRAM reads, in sizes of a and b", "sizes of a and b"),
        Counter(FROM_L2, "L2 reads, in sizes of a and b", "sizes of a and b", ".1f", SECTOR),
        Counter(INSTRUCTIONS, "thread instructions per thousand multiplications", "thousands", ".3g", LANES),
        Counter(ISSUES, ISSUED, "one"),
        *STALLS,
        Counter(WAVEFRONTS, "shared-memory wavefronts per thousand multiplications", "thousands", ".3g"),
        Counter(CONFLICTS, "of these, for bank conflicts", "thousands", ".3g"),
        *OCCUPANCY,
    ),
    units=lambda p: {"thousands": p.M * p.N * p.K / 1e3, "sizes of a and b": p.nbytes("a", "b")},
)

PAGES = {"softmax": SOFTMAX, "matmul": MATMUL}


def recorded(operator: str, machine: str, folder: Path = FOLDER) -> Path:
    """Where the figures of a ladder on a machine are kept."""
    return folder / operator / f"{machine}.json"


def command(operator: str) -> str:
    """What makes the file for the H200."""
    target = recorded(operator, "h200").relative_to(ROOT)
    return f"python -m benchmarks ladder {operator} --json {target}"


def problem(operator: str, case_id: str) -> spec.Problem:
    """The case of that name. Raises KeyError where there is none."""
    found = spec.OPERATORS[operator]
    return bind(found, {case.id: case for case in found.cases}[case_id])


# --- tables --------------------------------------------------------------------------------------


def tables(operator: str, source: Path) -> str:
    """Picture, times and counters as Markdown; where nothing was recorded, how to."""
    if not source.exists():
        return f"Nothing has been recorded yet. On a GPU: `{command(operator)}`, then `python -m benchmarks plot`."
    content, page = json.loads(source.read_text()), PAGES[operator]
    counted = content["counters"]
    of_counters = problem(operator, counted["case"])
    lines = [
        f"![the share of each step, by size](../../../docs/{picture_name(operator)})",
        "",
        f"{page.timed(of_counters)} on one {content['gpu']}, {content['date']}, commit `{content['commit'][:8]}`: "
        "the time of a call,",
        f"and the share of it that {page.share}.",
        "",
        *times(content),
        "",
    ]
    if counted["failure"]:
        return "\n".join([*lines, f"Counters: none were recorded. {counted['failure']}"])
    column = page.column(of_counters)
    caption = f"Counted in one launch of each at {column}, by Nsight Compute {counted['profiler']}:"
    return "\n".join([*lines, caption, "", *counts(content)])


def columns(content: Mapping[str, Any]) -> dict[str, str]:
    """What each case that was timed is called, by its name."""
    operator = content["operator"]
    names = dict.fromkeys(point["case"] for point in content["points"])
    return {name: PAGES[operator].column(problem(operator, name)) for name in names}


def times(content: Mapping[str, Any]) -> list[str]:
    """A row for each kernel, a column for each case: `0.133 ms, 98%`."""
    points = {(point["who"], point["case"]): point for point in content["points"]}
    headings = columns(content)
    names = dict.fromkeys(who for who, _ in points)
    rows = [[f"`{name}`", *(cell(points.get((name, case))) for case in headings)] for name in names]
    return markdown(["", *headings.values()], rows)


def cell(point: Mapping[str, Any] | None) -> str:
    """`0.133 ms, 98%`, or a dash for what was not timed."""
    if point is None or point["seconds"] is None:
        return "–"
    return f"{1e3 * point['seconds']:.3g} ms, {point['roof'] / point['seconds']:.0%}"


def counts(content: Mapping[str, Any]) -> list[str]:
    """A row for each counter that any kernel has, a column for each kernel."""
    counted, page = content["counters"], PAGES[content["operator"]]
    units = {"one": 1, "percent": 1, **page.units(problem(content["operator"], counted["case"]))}
    rows = []
    for counter in page.counters:
        values = [kernel["metrics"].get(counter.metric) for kernel in counted["kernels"]]
        if all(value is None for value in values):
            continue
        sign = "%" if counter.unit == "percent" else ""
        scale = counter.factor / units[counter.unit]
        rows.append([counter.label, *("–" if v is None else f"{v * scale:{counter.form}}{sign}" for v in values)])
    return markdown(["", *(f"`{kernel['who']}`" for kernel in counted["kernels"])], rows)


# --- the picture ---------------------------------------------------------------------------------


def picture_name(operator: str) -> str:
    return f"{operator}_ladder.png"


def picture(source: Path, target: Path) -> None:
    """Draw the points of the JSON file `source`: a bar for each step and case, as high as its share."""
    from matplotlib.figure import Figure

    content = json.loads(source.read_text())
    headings, names = columns(content), list(dict.fromkeys(point["who"] for point in content["points"]))
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    wide = 0.8 / len(headings)
    for place, (case, column) in enumerate(headings.items()):
        points = [point for point in content["points"] if point["case"] == case and point["seconds"] is not None]
        at = [names.index(point["who"]) + (place - (len(headings) - 1) / 2) * wide for point in points]
        axes.bar(at, [100 * point["roof"] / point["seconds"] for point in points], wide, label=column)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.axhline(100, color="#222222", linewidth=1)
    axes.grid(axis="y", alpha=0.4)
    axes.set_axisbelow(True)
    axes.set_ylabel("%")
    axes.legend(loc="upper left", fontsize=9)
    axes.set_title(f"Of a call's time, what {PAGES[content['operator']].share}", fontsize=11)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=100, pil_kwargs={"optimize": True})
