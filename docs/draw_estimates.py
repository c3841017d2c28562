"""Compare `dualops.estimate` with measured times: the table of its page, and the picture.

    python docs/draw_estimates.py            fills dualops/estimate/README.md, writes docs/cost_estimates.png
    python docs/draw_estimates.py FOLDER     writes the picture there, and leaves the page as it is

What was measured is committed: of calls in `benchmarks/peer_results`, of kernels in `measured_configs`. Needs no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is run as a script

if __name__ == "__main__":
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # before anything imports Numba

import dualops.cuda  # noqa: F401  registers the operators
from benchmarks.plot import fill
from docs.draw_attention import BLUE, GREEN, HERE, INK, ORANGE, draw, new_figure
from docs.measured_configs import DKV, DQ, FORWARD, MATMUL, RETENTION, Measured
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.retention.sm80.config import Sm80Config
from dualops.estimate import architecture, rankings
from dualops.estimate.attention_work import dkv_work, dq_work, forward_work
from dualops.estimate.candidates import Ranked, Ranking, config_text
from dualops.estimate.model import Work, estimate_of
from dualops.estimate.problems import problem_of
from dualops.estimate.retention import retention_estimate
from dualops.spec import OPERATORS, Case, Problem
from dualops.spec.flash_attention import visible_pairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RED = "#a83e3e"
H200, ROOT = architecture("h200"), HERE.parent
PAGE = ROOT / "dualops" / "estimate" / "README.md"
MARKERS = "<!-- estimates:begin -->", "<!-- estimates:end -->"
RANKED = {"attention forward": ORANGE, "attention gradient": INK, "matmul": BLUE, "retention": GREEN}
ROWS = {"softmax": ORANGE, "rms_norm": BLUE, "layer_norm": GREEN, "rope": INK, "lion": RED}  # in GB/s
# factors that are copied first, and a bias, whose gradient is a sum, have no estimates
WITHOUT = {"forward": ("square4097",), "backward": ("square4097", "linear8192x4096x4096_plain")}


class Pair(NamedTuple):
    """TFLOP/s as estimated and as measured, of rows GB/s. fitted: whether numbers of the model were fitted to it."""

    group: str
    gpu: str
    what: str
    estimated: float
    measured: float
    fitted: bool = False

    @property
    def ratio(self) -> float:
        return self.estimated / self.measured


def pairs(peer_results: Path = ROOT / "benchmarks" / "peer_results") -> list[Pair]:
    """All that there are, by group."""
    both: dict[str, Any] = {"dtypes": ("bfloat16", "float16"), "rungs": ("", "sm80")}
    rows: dict[str, Any] = {"dtypes": ("bfloat16", "float16", "float32")}
    found = [
        *_kernels("attention forward", FORWARD, forward_work, lambda p: p.D + p.Dv, False),
        *_calls("attention forward", "flash_attention", "forward", peer_results),
        *_kernels("attention gradient", DQ, dq_work, lambda p: 2 * p.D + p.Dv, True),
        *_kernels("attention gradient", DKV, dkv_work, lambda p: 2 * (p.D + p.Dv), True),
        *_calls("attention gradient", "flash_attention", "backward", peer_results),
        *_products(),
        *_calls("matmul", "matmul", "forward", peer_results),
        *_calls("matmul", "matmul", "backward", peer_results),
        *_timed(),
        *_calls("retention", "retention", "forward", peer_results, **both),
        *_calls("retention", "retention", "backward", peer_results, **both),
    ]
    for operator, direction in product(ROWS, ("forward", "backward")):
        found += _calls(operator, operator, direction, peer_results, **rows)
    return found


def _kernels(
    group: str, cases: Sequence[Measured], work: Callable[..., Work], width: Callable[[Problem], int], backward: bool
) -> Iterator[Pair]:
    """Of attention's kernels. width: columns of the products that one makes for each pair of a query and a key."""
    for problem, config, tflops, fitted in cases:
        p = absent_problem(*problem_of(f"flash_attention {problem}"), backward=backward)
        seconds = estimate_of(work(config, p, H200), H200).seconds
        flops = 2 * p.B * p.H * visible_pairs(p) * width(p)
        what = f"{problem}: {type(config).__name__} {config_text(config)}"
        yield Pair(group, "h200", what, flops / seconds / 1e12, tflops, fitted)


def _products() -> Iterator[Pair]:
    for problem, config, tflops, fitted in MATMUL:
        (ranking,) = rankings(f"matmul {problem}", H200, backward=False)
        (row,) = [row for row in ranking.rows if row.candidate.configs == (config,)]
        what = f"{problem}: {type(config).__name__} {config_text(config)}"
        yield Pair("matmul", "h200", what, ranking.flops / row.candidate.estimate.seconds / 1e12, tflops, fitted)


def _timed() -> Iterator[Pair]:
    """Of retention's calls, in known Configs."""
    for name, problem, direction, config, milliseconds, fitted in RETENTION:
        gpu, backward = architecture(name), direction == "backward"
        p = absent_problem(*problem_of(f"retention {problem}"), backward=backward)
        cost = p.spec.backward_cost if backward else p.spec.forward_cost
        assert cost is not None
        seconds, text = retention_estimate(config, p, backward, gpu).seconds, config_text(config)
        if isinstance(config, Sm80Config):
            text = f"chunk={config.chunk} {config_text(config.rows)}"
        what = f"{problem}, {direction}: {type(config).__name__} {text}"
        flops = cost.flops(p)
        yield Pair("retention", name, what, flops / seconds / 1e12, flops / milliseconds / 1e9, fitted)


def _calls(
    group: str,
    operator: str,
    direction: str,
    peer_results: Path,
    *,
    dtypes: Sequence[str] = ("bfloat16",),
    rungs: Container[str] = ("",),
) -> Iterator[Pair]:
    """Of calls, in the Config that they take. rungs: also of those that were asked for one of these, in its best."""
    for run in json.loads((peer_results / f"{operator}.json").read_text())["runs"]:
        gpu = architecture("h100" if "H100" in run["gpu"] else "h200")
        for one in run["measurements"]:
            name, _, dtype = one["case"].rpartition("-")
            contestant, _, rung = one["name"].partition(" ")
            ours = (contestant, one["direction"]) == ("dualops", direction) and dtype in dtypes and rung in rungs
            if not ours or name in WITHOUT[direction]:
                continue
            (case,) = [each for each in OPERATORS[operator].cases if (each.name, each.dtype) == (name, dtype)]
            if group in RANKED and (() in case.shapes.values() or any(map(callable, case.params.values()))):
                continue  # a number on the device, as a seed may be, and functions of users have no estimates
            try:
                found = rankings(_text(operator, case), gpu, backward=direction == "backward")
            except NotImplementedError:  # of options that have no estimates
                continue
            found = [each for each in found if each.title.startswith(direction)]
            rows = [_row(each, rung) for each in found]
            if rung and all(row.taken for row in rows):
                continue  # timed as such
            done = sum(each.nbytes / 1e9 if group in ROWS else each.flops / 1e12 for each in found)
            seconds = sum(row.candidate.estimate.seconds for row in rows)
            what = f"{direction} of {one['case'] if len(dtypes) > 1 else name}{f' by {rung}' if rung else ''}"
            yield Pair(group, gpu.name, what, done / seconds, done / one["burst"])


def _row(ranking: Ranking, rung: str) -> Ranked:
    """Return the row that a call uses, or the best of a rung."""
    if rung:
        return next(row for row in ranking.rows if row.candidate.rung == rung)
    (taken,) = [row for row in ranking.rows if row.taken]
    return taken


def _text(operator: str, case: Case) -> str:
    """Numbers on the host are left out."""
    shapes = {name: "x".join(map(str, shape)) for name, shape in case.shapes.items() if shape}
    orders = {name: f"@{''.join(map(str, order))}" for name, order in case.orders.items()}
    dtypes = {next(iter(shapes)): case.dtype, **case.dtypes}
    arrays = [f"{n}={shape}{orders.get(n, '')}{':' * (n in dtypes)}{dtypes.get(n, '')}" for n, shape in shapes.items()]
    return " ".join([operator, *arrays, *(f"{name}={value}".replace(" ", "") for name, value in case.params.items())])


def rank_correlation(found: Sequence[Pair]) -> float:
    """Spearman's."""
    estimated, measured = (_ranks([getattr(pair, name) for pair in found]) for name in ("estimated", "measured"))
    return float(np.corrcoef(estimated, measured)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Of equal ones their mean."""
    array = np.asarray(values)
    return np.array([(array < value).sum() + (array == value).sum() / 2 for value in array])


def groups(found: Sequence[Pair]) -> dict[tuple[str, str], list[Pair]]:
    """By operator and GPU."""
    split: dict[tuple[str, str], list[Pair]] = {}
    for pair in found:
        split.setdefault((pair.group, pair.gpu), []).append(pair)
    return split


def table(found: Sequence[Pair]) -> str:
    """A row for each operator and GPU, and behind it every pair."""
    lines = [
        "| | GPU | figures | rank correlation | median | 80 % within | all within |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (group, gpu), mine in groups(found).items():
        least, low, median, high, most = np.quantile([pair.ratio for pair in mine], (0, 0.1, 0.5, 0.9, 1))
        correlation = f"{rank_correlation(mine):.2f}" if group in RANKED else "–"
        cells = (f"{median:.2f}", f"{low:.2f} to {high:.2f}", f"{least:.2f} to {most:.2f}")
        lines.append(f"| {group} | {gpu} | {len(mine)} | {correlation} | {' | '.join(cells)} |")
    lines += ["", "<details><summary>Every figure, TFLOP/s (operators on rows: GB/s); * used for the fit</summary>", ""]
    lines += ["| | GPU | measured | estimated | ratio |", "| --- | --- | --- | --- | --- |"]
    for pair in found:
        name = f"{pair.group if pair.group in ROWS else ''} {pair.what}{' *' * pair.fitted}".strip()
        lines.append(f"| {name} | {pair.gpu} | {pair.measured:.0f} | {pair.estimated:.0f} | {pair.ratio:.2f} |")
    return "\n".join([*lines, "", "</details>"])


def draw_estimates() -> Figure:
    """Estimated against measured TFLOP/s, and GB/s of rows."""
    found = pairs()
    figure = new_figure(6.4, 3.3)
    for axes, colors, unit in zip(figure.subplots(1, 2), (RANKED, ROWS), ("TFLOP/s", "GB/s"), strict=True):
        shown = [pair for pair in found if pair.group in colors]
        most = 1.05 * max(max(pair.estimated, pair.measured) for pair in shown)
        for share, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
            axes.plot([0, most], [0, share * most], style, color="#999999", linewidth=1)
        for group, color in colors.items():
            for fitted in (False, True):
                mine = [pair for pair in shown if (pair.group, pair.fitted) == (group, fitted)]
                if mine:
                    x, y = [pair.measured for pair in mine], [pair.estimated for pair in mine]
                    label = f"{group}{', fitted to' * fitted}"
                    axes.scatter(x, y, 16, "none" if fitted else color, edgecolors=color, label=label)
        axes.set(xlabel=f"measured, {unit}", ylabel=f"estimated, {unit}", xlim=(0, most), ylim=(0, most))
        axes.legend(frameon=False, fontsize=7)
    return figure


PICTURES = {"cost_estimates.png": draw_estimates}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    if folder == HERE:
        PAGE.write_text(fill(PAGE.read_text("utf-8"), table(pairs()), *MARKERS), "utf-8")
    for written in draw(folder, PICTURES):
        print(written)
