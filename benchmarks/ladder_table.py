"""The tables of `python -m benchmarks ladder` for softmax's page, from its JSON alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .plot import markdown
from .tree import spec

MARKERS = "<!-- ladder:begin -->", "<!-- ladder:end -->"
SECTOR, LANES = 32, 32  # bytes of a sector, threads of a warp
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COMMAND = "python -m benchmarks ladder softmax --json benchmarks/ladder/h200.json"


class Counter(NamedTuple):
    """A line of the table: a metric, in units that a reader can hold against the kernel's source."""

    metric: str
    label: str
    unit: str  # "percent", or what it is counted for each of; "one" is the launch
    form: str = ".2f"
    factor: float = 1.0


COUNTERS = (
    Counter("dram__bytes_read.sum", "read from memory, sizes of x", "sizes of x"),
    Counter("dram__bytes_write.sum", "written to memory, sizes of x", "sizes of x"),
    Counter("dram__throughput.avg.pct_of_peak_sustained_elapsed", "memory busy", "percent", ".0f"),
    Counter("lts__t_sectors_srcunit_tex_op_read.sum", "read from L2, sizes of x", "sizes of x", factor=SECTOR),
    Counter("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio", "sectors a load", "one", ".1f"),
    Counter("smsp__inst_executed.sum", "instructions an element", "elements", ".1f", LANES),
    Counter("smsp__issue_active.avg.per_cycle_active", "instructions a cycle, of one scheduler", "one"),
    Counter(STALLED.format("long_scoreboard"), "cycles for memory, between two instructions of a warp", "one", ".1f"),
    Counter(STALLED.format("barrier"), "cycles at barriers, between two instructions of a warp", "one", ".1f"),
    Counter("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "turns of shared memory, a row", "rows", ".1f"),
    Counter("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "of them for bank conflicts", "rows", ".1f"),
    Counter("sm__warps_active.avg.pct_of_peak_sustained_active", "warps there, of the most", "percent", ".0f"),
    Counter("launch__registers_per_thread", "registers a thread", "one", ".0f"),
)


def tables(source: Path) -> str:
    """Times and counters as Markdown; where nothing was recorded, how to."""
    if not source.exists():
        return f"Nothing has been recorded yet. On a GPU: `{COMMAND}`, then `python -m benchmarks plot`."
    content = json.loads(source.read_text())
    lines = [
        f"{content['rows']} rows of {content['dtype']} on one {content['gpu']}, {content['date']}, commit "
        f"`{content['commit'][:8]}`: the time of a call,",
        "and which share of it a plain kernel needs that reads and writes as many bytes.",
        "",
        *times(content),
        "",
    ]
    counted = content["counters"]
    if counted["failure"]:
        return "\n".join([*lines, f"Counters: none were recorded. {counted['failure']}"])
    told = f"Counted in one launch of each at {counted['columns']} columns, by Nsight Compute {counted['profiler']}:"
    return "\n".join([*lines, told, "", *counts(content)])


def times(content: Mapping[str, Any]) -> list[str]:
    """A row for each kernel, a column for each length: `0.133 ms, 98%`."""
    points = {(point["who"], point["columns"]): point for point in content["points"]}
    names, lengths = (list(dict.fromkeys(key[part] for key in points)) for part in (0, 1))
    rows = [[f"`{name}`", *(cell(points.get((name, length))) for length in lengths)] for name in names]
    return markdown(["", *(f"{length} columns" for length in lengths)], rows)


def cell(point: Mapping[str, Any] | None) -> str:
    """`0.133 ms, 98%`, or a dash for what was not timed."""
    if point is None or point["seconds"] is None:
        return "–"
    return f"{1e3 * point['seconds']:.3g} ms, {point['roof'] / point['seconds']:.0%}"


def counts(content: Mapping[str, Any]) -> list[str]:
    """A row for each counter, a column for each kernel."""
    counted = content["counters"]
    elements = counted["rows"] * counted["columns"]
    nbytes = elements * spec.meta.itemsize(content["dtype"])
    units = {"one": 1, "percent": 1, "rows": counted["rows"], "elements": elements, "sizes of x": nbytes}
    rows = []
    for counter in COUNTERS:
        values = [kernel["metrics"].get(counter.metric) for kernel in counted["kernels"]]
        sign = "%" if counter.unit == "percent" else ""
        scale = counter.factor / units[counter.unit]
        rows.append([counter.label, *("–" if v is None else f"{v * scale:{counter.form}}{sign}" for v in values)])
    return markdown(["", *(f"`{kernel['who']}`" for kernel in counted["kernels"])], rows)
