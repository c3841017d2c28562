"""The tables of three pages and the pictures, from committed JSON: asv's results, and the comparisons with peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .recorded import Key, Peers, Recording, keys, known_cases, work_of
from .tree import spec
from .work import DIRECTIONS, Work, bind, directions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
COLUMNS = (
    "operator",
    "case",
    "direction",
    "time",
    "rate",
    "of the roof",
    "fastest peer",
    "its time over ours",
    "at",
    "asv's newest",
)
SUMMARY_COLUMNS = (
    "operator",
    "dtype",
    "of the roof, forward",
    "backward",
    "error / baseline's",
    "fastest peer's time over ours, forward",
    "backward",
)
MARKERS = {"dualops": "o", "torch eager": "v", "torch.compile": "^", "Liger": "s", "QuACK": "D"}


class Comparison(NamedTuple):
    """dualops compared with its peers, on one direction of one case."""

    seconds: float
    share: float | None  # of the roof; None if that is of another precision
    error: float | None  # largest error over the baseline's; None if the baseline has none
    peer: str | None  # the fastest
    ratio: float | None  # its time over ours: above 1 dualops is faster


def comparison(key: Key, peers: Mapping[str, Peers]) -> Comparison | None:
    """Return the recorded comparison, or None."""
    run = peers.get(key.operator)
    everybody = run.measurements.get(key, {}) if run else {}
    timed = {name: measurement for name, measurement in everybody.items() if measurement["burst"]}
    if "dualops" not in timed:
        return None
    ours = timed["dualops"]
    others = {
        name: one["burst"] for name, one in timed.items() if name.split()[0] != "dualops"
    }  # our rungs are no peers
    peer = min(others, key=lambda name: others[name], default=None)
    error = ours["error"] / ours["baseline_error"] if ours["baseline_error"] else None
    share = None if precision_of(key) else ours["roof"] / ours["burst"]
    return Comparison(ours["burst"], share, error, peer, others[peer] / ours["burst"] if peer else None)


def precision_of(key: Key) -> str | None:
    """Return the precision in which tensor cores multiply float32, if the case has one: the roof is plain float32."""
    return known_cases(key.operator)[key.case].params.get("precision")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return head + ["| " + " | ".join(cells) + " |" for cells in rows]


def sources(used: Collection[Key], peers: Mapping[str, Peers]) -> list[str]:
    """Return a line for each comparison: date, GPU, commit, and operators, or the number of cases."""
    runs: dict[str, dict[str, set[Key]]] = {}
    for key in used:
        run = peers[key.operator].runs[key]
        source = f"{run.day}, one {run.device}, commit `{run.short}`"
        runs.setdefault(source, {}).setdefault(key.operator, set()).add(key)
    of_each = Counter(key.operator for key in {*used})

    def name(operator: str, keys: Collection[Key]) -> str:
        if len(keys) == of_each[operator]:
            return operator
        cases, every = {key.case for key in keys}, {key for key in used if key.operator == operator}
        whole = len(keys) == sum(key.case in cases for key in every)
        directions = "" if whole else f", {' and '.join(sorted({key.direction for key in keys}))}"
        return f"{operator} ({len(cases)} of {len({key.case for key in every})} cases{directions})"

    return [f"{', '.join(starmap(name, found.items()))}: {source}." for source, found in runs.items()]


class SummaryRow(NamedTuple):
    """An operator in one dtype: its worst and its best case."""

    operator: str
    dtype: str
    keys: list[Key]
    cells: tuple[str, ...]  # SUMMARY_COLUMNS


def summary_rows(peers: Mapping[str, Peers]) -> list[SummaryRow]:
    """Return a row for each operator and dtype, from the comparisons."""
    found: dict[tuple[str, str], dict[Key, Comparison]] = {}
    for key in keys():
        measured = comparison(key, peers)
        if measured:
            dtype, precision = known_cases(key.operator)[key.case].dtype, precision_of(key)
            label = f"{dtype} as {precision}" if precision else dtype
            found.setdefault((key.operator, label), {})[key] = measured
    rows = []
    for (operator, dtype), timed in found.items():
        ways = [[one for key, one in timed.items() if key.direction == direction] for direction in DIRECTIONS]
        errors = [one.error for way in ways for one in way if one.error is not None]
        shares = [span([one.share for one in way if one.share], ".0%") for way in ways]
        ratios = [span([one.ratio for one in way if one.ratio], ".2f") for way in ways]
        cells = (operator, dtype, *shares, f"{max(errors):.2f}" if errors else "–", *ratios)
        rows.append(SummaryRow(operator, dtype, [*timed], cells))
    return rows


def summary(peers: Mapping[str, Peers]) -> str:
    """Return the table of all operators and dtypes, and the sources of its figures."""
    rows = summary_rows(peers)
    used = {key for row in rows for key in row.keys}
    lines = sources([key for key in keys() if key in used], peers)
    return "\n".join([*markdown(SUMMARY_COLUMNS, [row.cells for row in rows]), "", *lines])


def span(values: Sequence[float], form: str) -> str:
    """Format the range from the smallest to the largest value."""
    ends = dict.fromkeys(format(value, form) for value in (min(values), max(values))) if values else ["–"]
    return " to ".join(ends)


def table(history: Sequence[Recording], peers: Mapping[str, Peers]) -> str:
    """Return the table of every known case that was timed, and the sources of its figures.

    All columns of a row except the last are from the comparison, in which dualops and its peers ran in one process;
    above 1 dualops is faster. For a case without a comparison, the time is asv's. Slower cases are shown like all
    others.
    """
    newest = {key: recording for recording in history for key in recording.seconds}
    rows, used = [], []
    for key in keys():
        work, measured, by_asv = work_of(key), comparison(key, peers), newest.get(key)
        share = peer = ratio = since = "–"
        if measured:
            used.append(key)
            seconds, commit = measured.seconds, peers[key.operator].runs[key].short
            share, peer = f"{measured.share:.0%}" if measured.share else "–", measured.peer or "–"
            ratio = f"{measured.ratio:.2f}" if measured.ratio else "–"
            if by_asv:
                since = f"{milliseconds(by_asv.seconds[key])}, `{by_asv.commit[:8]}`"
        elif by_asv:
            seconds, commit = by_asv.seconds[key], by_asv.commit[:8]
        else:
            continue
        cells = milliseconds(seconds), f"{work.rate(seconds):.2f} {work.unit}", share, peer, ratio, f"`{commit}`", since
        rows.append((key.operator, key.case, key.direction, *cells))
    commits = {f"`{one.commit[:8]}` on {one.measured:%Y-%m-%d}": one.device for one in newest.values()}
    by_asv_at = [f"asv, median over bursts of 20 calls: {text}, one {device}." for text, device in commits.items()]
    lines = ["All but asv's, one process each:", *sources(used, peers), *by_asv_at]
    return "\n".join([*lines, "", *markdown(COLUMNS, rows)])


def milliseconds(seconds: float) -> str:
    """`0.0314 ms`."""
    return f"{seconds * 1e3:.4g} ms"


def fill(page: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """Return `page` with `content` between its two markers. Raises ValueError unless it has each once, in order."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"expected {begin} and {end}, once each and in this order")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def row_operators() -> list[str]:
    """Return the operators whose picture is rate against row length: those whose problems have rows and no K."""
    dims = {name: [bind(op, case).dims for case in known_cases(name).values()] for name, op in spec.OPERATORS.items()}
    return [name for name, each in dims.items() if all({"M", "N"} <= one.keys() and "K" not in one for one in each)]


def picture(operator: str, history: Sequence[Recording], peers: Peers | None, target: Path) -> None:
    """Draw an operator's picture: TB/s against row length, forward and backward, and below it one point per commit.

    history: recordings, oldest first. Those of one GPU are the points, and the newest of each case is the curve. The
    GPU is the one that most of `peers` were timed on, else that of the last recording with the operator. With `peers`,
    their curves and the roof are drawn too, even if they are faster. Raises ValueError if no recording has a time of
    the operator.
    """
    from matplotlib.figure import Figure

    history = [one for one in history if any(key.operator == operator for key in one.seconds)]
    if not history:
        raise ValueError(f"no commit has a time of {operator}")
    device, ways = drawn_gpu(history, peers), directions(spec.OPERATORS[operator])
    history = [one for one in history if one.device == device]
    lines = 2 if len(history) > 1 else 1
    figure = Figure(figsize=(6.2 * len(ways), 4.2 * lines), layout="constrained")
    axes = figure.subplots(lines, len(ways), squeeze=False, sharey="row")
    for column, direction in enumerate(ways):
        against_length(axes[0, column], operator, direction, history, peers)
        if lines == 2:
            across_commits(axes[1, column], operator, direction, history)
    for row in axes:  # from zero to above the highest point of either direction
        row[0].set_ylim(0, 1.05 * max(max(curve.get_ydata()) for one in row for curve in one.get_lines()))
    for last in axes[:, -1]:  # one legend per row, to its right: both directions have the same curves
        last.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    figure.suptitle(f"{operator} on one {device}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)


def drawn_gpu(history: Sequence[Recording], peers: Peers | None) -> str:
    """Return the recordings' GPU on which most cases were compared with peers; without a comparison, the last one."""
    with_peers = Counter(run.device for run in peers.runs.values()) if peers else Counter()
    return max((one.device for one in reversed(history)), key=lambda device: with_peers[device])


def against_length(
    axes: Axes, operator: str, direction: str, history: Sequence[Recording], peers: Peers | None
) -> None:
    """Draw TB/s against row length: dualops in every dtype; peers and roof, timed on the same GPU, in the dtype of most
    cases.

    history: of one GPU, oldest first; each case counts at the newest commit that timed it. Only plain rows: a case with
    a residual moves other bytes.
    """
    newest, device = {key: one for one in history for key in one.seconds}, history[-1].device
    drawn: dict[str, str] = {}
    curves: dict[str, list[tuple[int, float]]] = {}
    cases = {case_id: case for case_id, case in known_cases(operator).items() if "residual" not in case.shapes}
    dtypes = [case.dtype for case in cases.values()]
    main = max(dtypes, key=dtypes.count)
    for case_id, case in cases.items():
        key = Key(operator, case_id, direction)
        work, length = work_of(key), bind(spec.OPERATORS[operator], case).N
        if key in newest:
            one = newest[key]
            curves.setdefault(f"dualops {case.dtype}", []).append((length, work.rate(one.seconds[key])))
            drawn[one.commit[:8]] = f"{one.measured:%Y-%m-%d}, {one.commit[:8]}"
        if peers and case.dtype == main and key in peers.runs and peers.runs[key].device == device:
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
    axes.set(title="; ".join((f"{direction}, {main}", *drawn.values())), xlabel="row length", ylabel="TB/s")
    axes.grid(alpha=0.3)


def across_commits(axes: Axes, operator: str, direction: str, history: Sequence[Recording]) -> None:
    """Draw one curve per case, with one point per commit."""
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
