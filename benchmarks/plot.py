"""README's table and pictures, drawn from committed JSON: what asv recorded, and the runs beside peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .recorded import Key, PeerRun, Recording, keys, known_cases, work_of
from .tree import spec
from .work import Work, bind, directions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
COLUMNS = ("operator", "case", "direction", "time", "rate", "of the roof", "fastest peer", "its time over ours")
MARKERS = {"dualops": "o", "torch eager": "v", "torch.compile": "^", "Liger": "s", "QuACK": "D"}


def table(newest: Recording, peers: Mapping[str, PeerRun]) -> str:
    """A Markdown table of every known case that `newest` has a time of, and a line on where the figures come from.

    The share of the roof and the ratio are of the run beside the peers, where both sides ran in one process; above 1
    dualops is faster. Slower cases are shown like all others.
    """
    lines = [
        f"Measured {newest.measured:%Y-%m-%d} on one {newest.device} at commit `{newest.commit[:8]}`: asv, median over "
        "bursts of 20 calls.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
    ]
    used: set[str] = set()
    for key in keys():
        if key not in newest.seconds:
            continue
        seconds, work = newest.seconds[key], work_of(key)
        share = peer = ratio = "–"
        run = peers.get(key.operator)
        everybody = run.measurements.get(key, {}) if run else {}
        beside = {name: measurement for name, measurement in everybody.items() if measurement["burst"]}
        if "dualops" in beside:
            used.add(key.operator)
            ours = beside.pop("dualops")
            share = f"{ours['roof'] / ours['burst']:.0%}"
            others = {name: one["burst"] for name, one in beside.items() if not name.startswith("dualops ")}
            if others:  # another rung of ours is no peer
                peer = min(others, key=lambda name: others[name])
                ratio = f"{others[peer] / ours['burst']:.2f}"
        rate = f"{work.rate(seconds):.2f} {work.unit}"
        cells = (key.operator, key.case, key.direction, milliseconds(seconds), rate, share, peer, ratio)
        lines.append("| " + " | ".join(cells) + " |")
    for operator in sorted(used):
        run = peers[operator]
        lines += ["", f"Roof and peers of {operator}: {run.day}, {run.device}, commit `{run.commit[:8]}`, one process."]
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """`0.0314 ms`."""
    return f"{seconds * 1e3:.4g} ms"


def fill(page: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """`page` with `content` between its two markers. Raises ValueError unless each is there once, in order."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"expected {begin} and {end}, once each and in this order")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def row_operators() -> list[str]:
    """The operators whose picture is rate against row length: those whose problems have an N."""
    return [
        name
        for name, operator in spec.OPERATORS.items()
        if all("N" in bind(operator, case).dims for case in known_cases(name).values())
    ]


def picture(operator: str, history: Sequence[Recording], peers: PeerRun | None, target: Path) -> None:
    """Draw an operator's picture: TB/s against row length, forward and backward, and under it one point a commit.

    history: oldest first, at least one; the last is the curve. With `peers`, theirs and the roof are drawn too,
    wherever they win. Raises ValueError if the last recording has no time of the operator.
    """
    from matplotlib.figure import Figure

    newest, ways = history[-1], directions(spec.OPERATORS[operator])
    if not any(key.operator == operator for key in newest.seconds):
        raise ValueError(f"commit {newest.commit[:8]} has no times of {operator}")
    lines = 2 if len(history) > 1 else 1
    figure = Figure(figsize=(6.2 * len(ways), 4.2 * lines), layout="constrained")
    axes = figure.subplots(lines, len(ways), squeeze=False, sharey="row")
    for column, direction in enumerate(ways):
        against_length(axes[0, column], operator, direction, newest, peers)
        if lines == 2:
            across_commits(axes[1, column], operator, direction, history)
    for row in axes:  # from zero to above the highest point of either direction
        row[0].set_ylim(0, 1.05 * max(max(curve.get_ydata()) for one in row for curve in one.get_lines()))
    for last in axes[:, -1]:  # one legend a line, beside it: both directions have the same curves
        last.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    figure.suptitle(f"{operator} on one {newest.device}, {newest.measured:%Y-%m-%d}, commit {newest.commit[:8]}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)


def against_length(axes: Axes, operator: str, direction: str, newest: Recording, peers: PeerRun | None) -> None:
    """TB/s against row length: dualops in every dtype, peers and roof in that of most cases."""
    curves: dict[str, list[tuple[int, float]]] = {}
    cases = known_cases(operator)
    dtypes = [case.dtype for case in cases.values()]
    main = max(dtypes, key=dtypes.count)
    for case_id, case in cases.items():
        key = Key(operator, case_id, direction)
        work, length = work_of(key), bind(spec.OPERATORS[operator], case).N
        if key in newest.seconds:
            curves.setdefault(f"dualops {case.dtype}", []).append((length, work.rate(newest.seconds[key])))
        if peers and case.dtype == main:
            for name, measurement in peers.measurements.get(key, {}).items():
                if name == "dualops":
                    curves.setdefault("roof", []).append((length, work.rate(measurement["roof"])))
                elif measurement["burst"]:
                    curves.setdefault(name, []).append((length, work.rate(measurement["burst"])))
    for label, points in curves.items():
        x, y = zip(*sorted(points))
        ours, is_roof = label.startswith("dualops"), label == "roof"
        axes.plot(
            x,
            y,
            label=label,
            marker="" if is_roof else MARKERS.get(label.split(" float")[0].split(" bfloat")[0], "x"),
            linestyle="--" if is_roof else "-" if len(points) > 1 else "",
            color="0.4" if is_roof else None,
            linewidth=2.4 if ours else 1.3,
        )
    lengths = sorted({bind(spec.OPERATORS[operator], case).N for case in cases.values()})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths], rotation=30)
    axes.set(title=f"{direction}, {main}", xlabel="row length", ylabel="TB/s")
    axes.grid(alpha=0.3)


def across_commits(axes: Axes, operator: str, direction: str, history: Sequence[Recording]) -> None:
    """One curve a case, one point a commit."""
    for case_id in known_cases(operator):
        key = Key(operator, case_id, direction)
        work: Work = work_of(key)
        points = [(i, work.rate(one.seconds[key])) for i, one in enumerate(history) if key in one.seconds]
        if points:
            x, y = zip(*points)
            axes.plot(x, y, marker="o", label=case_id)
    axes.set_xticks(range(len(history)), [one.commit[:8] for one in history], rotation=30)
    axes.set(title=f"{direction}, commit by commit", ylabel="TB/s")
    axes.grid(alpha=0.3)
