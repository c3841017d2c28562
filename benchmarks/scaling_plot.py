"""The picture of `python -m benchmarks scaling`: speed and memory against length, from its JSON alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .work import DIRECTIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = {"float32": "--", "bfloat16": "-"}

Measured = dict[str, Any]  # a Point of scaling_run.py


def picture(source: Path, target: Path) -> None:
    """Draw the points of the JSON file `source`. Rows: forward, backward; columns: TFLOP/s, MiB."""
    from matplotlib.figure import Figure

    content = json.loads(source.read_text())
    figure = Figure(figsize=(13.5, 8.4), layout="constrained")
    axes = figure.subplots(len(DIRECTIONS), 2, squeeze=False)
    for (speed, memory), direction in zip(axes, DIRECTIONS):
        points = [point for point in content["points"] if point["direction"] == direction]
        draw(speed, points, teraflops)
        speed.set_yscale("log")
        speed.set(title=f"{direction}: speed", ylabel="TFLOP/s")
        draw(memory, points, mebibytes)
        memory.set_yscale("symlog", linthresh=1 / 64)  # some need no memory: a small margin below 0 shows their markers
        memory.set_ylim(bottom=-1 / 256)
        memory.set(title=f"{direction}: peak memory, without inputs and results", ylabel="MiB")
    axes[0, 0].figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    sizes = f"B=1, H={content['heads']}, D={content['width']}"
    origin = f"on one {content['gpu']}, {content['date']}, commit {content['commit'][:8]}"
    figure.suptitle(f"{content['operator']}, {sizes}, {origin}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)


def table(source: Path) -> str:
    """Return the float32 points as Markdown: a row per length and direction, time and memory of each contestant."""
    content = json.loads(source.read_text())
    points = [point for point in content["points"] if point["dtype"] == "float32"]
    names = list(dict.fromkeys(point["who"] for point in points))
    found = {(point["direction"], point["S"], point["who"]): point for point in points}
    sizes = f"float32, B=1, H={content['heads']}, D={content['width']}"
    lines = [
        f"{sizes}, on one {content['gpu']}, {content['date']}, commit `{content['commit'][:8]}`.",
        "Time of a call, and memory at the peak besides inputs and results.",
        "",
        f"| direction | S | {' | '.join(names)} |",
        f"| --- | --- |{' --- |' * len(names)}",
    ]
    for direction, S in sorted({key[:2] for key in found}, key=lambda row: (DIRECTIONS.index(row[0]), row[1])):
        cells = [cell(found.get((direction, S, name))) for name in names]
        lines.append(f"| {direction} | {S} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(point: Measured | None) -> str:
    """Format "3.41 ms, 1024 MiB", without values that were not measured."""
    if point is None or point["seconds"] is None:
        return ""
    memory = mebibytes(point)
    return f"{short(1e3 * point['seconds'])} ms" + ("" if memory is None else f", {short(memory)} MiB")


def short(value: float) -> str:
    """Format three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def teraflops(point: Measured) -> float | None:
    return None if point["seconds"] is None else point["flops"] / point["seconds"] / 1e12


def mebibytes(point: Measured) -> float | None:
    return None if point["extra_memory"] is None else point["extra_memory"] / 2**20


def draw(axes: Axes, points: Sequence[Measured], value: Callable[[Measured], float | None]) -> None:
    """Draw a curve for each contestant and dtype against length, if `value` is known."""
    for number, who in enumerate(dict.fromkeys(point["who"] for point in points)):
        for dtype, style in LINES.items():
            own = [point for point in points if (point["who"], point["dtype"]) == (who, dtype)]
            curve = sorted((point["S"], found) for point in own if (found := value(point)) is not None)
            if curve:
                x, y = zip(*curve)
                marker = MARKERS[number % len(MARKERS)]
                axes.plot(x, y, label=f"{who}, {dtype}", color=f"C{number}", linestyle=style, marker=marker)
    lengths = sorted({point["S"] for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("length of the sequences")
    axes.grid(alpha=0.3)
