"""The picture of `python -m benchmarks training`: losses, their differences, time and memory, from its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXACT = "eager, float32"  # the run that others are compared with
STYLES = {0: ("C0", "-", "o"), 1: ("C1", "--", "s"), 2: ("0.35", ":", "^")}  # color, line and marker of each run


def picture(source: Path, target: Path) -> None:
    """Draw the JSON file `source`: loss, its distance from float32's, and time, against the step; memory as text."""
    from matplotlib.figure import Figure

    content = json.loads(source.read_text())
    runs: list[dict[str, Any]] = content["runs"]
    exact = next(run for run in runs if run["who"] == EXACT)
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    loss, apart, time = figure.subplots(1, 3)
    for number, run in enumerate(runs):
        color, style, marker = STYLES[number]
        drawn: dict[str, Any] = {"color": color, "linestyle": style, "marker": marker, "markersize": 3.5}
        steps = range(1, len(run["losses"]) + 1)
        memory = "" if run["peak_memory"] is None else f", {run['peak_memory'] / 2**30:.1f} GiB"
        loss.plot(steps, run["losses"], label=run["who"], **drawn)
        if run is not exact:
            differences = [abs(x - y) for x, y in zip(run["losses"], exact["losses"], strict=True)]
            apart.plot(steps, differences, label=run["who"], **drawn)
        label = f"{run['who']}: {1e3 * run['step']:.0f} ms{memory}"
        time.plot(steps, [1e3 * seconds for seconds in run["seconds"]], label=label, **drawn)
    loss.axhline(content["floor"], color="0.7", linewidth=1)
    loss.annotate("entropy of the data", (1, content["floor"]), textcoords="offset points", xytext=(0, 3), color="0.5")
    loss.set(title="loss", ylim=(0, None))
    apart.set(title="distance from float32's loss", ylim=(0, None))
    time.set(title="time a step, and memory at the peak", ylabel="ms", yscale="log")
    for axes in (loss, apart, time):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    where = f"on one {content['gpu']}" if content["gpu"] else "without a GPU"
    origin = f"{where}, {content['date']}, commit {content['commit'][:8]}"
    tokens = f"{content['batch']} × {content['length']} tokens a step"
    figure.suptitle(f"Llama of {content['parameters'] / 1e6:,.0f} M parameters, {tokens}, Lion: {origin}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
