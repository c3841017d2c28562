"""The table of `python -m benchmarks host` for benchmarks/README.md, from its JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .plot import markdown

MARKERS = "<!-- host:begin -->", "<!-- host:end -->"


def table(path: Path) -> str:
    """When and where, and a line a row: dualops, torch, the ratio, what was aimed at."""
    document = json.loads(path.read_text())
    where = f"{document['date']}, one {document['gpu']}, {document['cpus']} cores, torch {document['torch']}"
    titles = ("what", "dualops", "torch", "ratio", "aim", "reached")
    rows = [_cells(row) for row in document["rows"]]
    return "\n".join([f"{where}, commit `{document['commit'][:8]}`.", "", *markdown(titles, rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    theirs, times, most = row["torch"], row["times"], row["most"]
    aim = f"at most {times}" if times is not None else "–" if most is None else f"at most {_duration(most)}"
    ratio = "–" if theirs is None else f"{row['seconds'] / theirs:.2f}"
    reached = {None: "–", True: "yes", False: "**no**"}[row["reached"]]
    return [row["name"], _duration(row["seconds"]), "–" if theirs is None else _duration(theirs), ratio, aim, reached]


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds:.2f} s"
