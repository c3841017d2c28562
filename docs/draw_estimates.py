"""`dualops.estimate` held against what was measured: the table of its page, and the picture.

    python docs/draw_estimates.py            fills dualops/estimate/README.md, writes docs/cost_estimates.png
    python docs/draw_estimates.py FOLDER     writes the picture there, and leaves the page as it is

What was measured is committed: of calls in `benchmarks/peer_results`, of kernels in `measured_configs` and
`benchmarks/configs`. Needs no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is run as a script

if __name__ == "__main__":
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # before anything imports Numba

import dualops.cuda  # noqa: F401  registers the operators
from benchmarks.plot import fill
from docs.draw_attention import BLUE, GREEN, HERE, INK, ORANGE, draw, new_figure
from docs.measured_configs import DKV, DQ, FORWARD, MATMUL, RETENTION, SOFTMAX, Measured
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.flash_attention.sm80.config import Sm80Config
from dualops.cuda.norm.staging import RingConfig
from dualops.cuda.retention.sm80.config import Sm80Config as RetentionSm80Config
from dualops.cuda.rows.cluster import ClusterRowsConfig
from dualops.cuda.rows.registers import RowsConfig
from dualops.cuda.tile.storage import storage
from dualops.estimate import Architecture, architecture, block_rows, cluster_rows, rankings, row_gradients
from dualops.estimate.attention import sm80_work, sm90_work
from dualops.estimate.attention_gradient import dkv_work, dq_work
from dualops.estimate.candidates import Ranked, Ranking, config_text
from dualops.estimate.model import REACHED, Work, estimate_of
from dualops.estimate.problems import problem_of
from dualops.estimate.retention_passes import sm80_estimate, sm90_estimate
from dualops.spec import OPERATORS, Case, Problem
from dualops.spec.flash_attention import visible_pairs
from dualops.spec.meta import itemsize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

H200, ROOT = architecture("h200"), HERE.parent
PAGE = ROOT / "dualops" / "estimate" / "README.md"
MARKERS = "<!-- estimates:begin -->", "<!-- estimates:end -->"
COLORS = {"attention forward": ORANGE, "attention gradient": INK, "matmul": BLUE, "retention": GREEN}
AT_ROOF = "softmax, short rows"  # in blocks: all are at the roof, so that their order is chance
ROWS = {"softmax": ORANGE, AT_ROOF: INK, "rms_norm": BLUE, "layer_norm": GREEN}  # in percents of the roof
GROUPS, WEIGHTS = (*COLORS, *ROWS), {"softmax": (), "rms_norm": ("w",), "layer_norm": ("w", "b")}
# factors that are copied first, and a bias, whose gradient is a sum, have no estimates
WITHOUT = {"forward": ("square4097",), "backward": ("square4097", "linear8192x4096x4096_plain")}


class Pair(NamedTuple):
    """TFLOP/s as estimated and as measured, of rows percents of the roof. fitted: whether numbers of the model were
    fitted to it.
    """

    group: str
    what: str
    estimated: float
    measured: float
    fitted: bool = False


def pairs(peer_results: Path = ROOT / "benchmarks" / "peer_results") -> list[Pair]:
    """All that there are, by group."""
    both: dict[str, Any] = {"dtypes": ("bfloat16", "float16"), "rungs": ("", "sm80")}
    return [
        *_kernels("attention forward", FORWARD, _forward_work, lambda p: p.D + p.Dv, False),
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
        *_clusters(peer_results.with_name("configs") / "rows_h100.json"),
        *_softmax(),
        *_blocks(peer_results.with_name("configs") / "blocks_h100.json"),
    ]


def _forward_work(config: Any, p: Problem, gpu: Any) -> Work:
    return sm80_work(config, p, gpu) if isinstance(config, Sm80Config) else sm90_work(config, p, gpu)


def _kernels(
    group: str, cases: Sequence[Measured], work: Callable[..., Work], width: Callable[[Problem], int], backward: bool
) -> Iterator[Pair]:
    """Of attention's kernels. width: columns of the products that one makes for each pair of a query and a key."""
    for problem, config, tflops, fitted in cases:
        p = absent_problem(*problem_of(f"flash_attention {problem}"), backward=backward)
        seconds = estimate_of(work(config, p, H200), H200).seconds
        flops = 2 * p.B * p.H * visible_pairs(p) * width(p)
        what = f"{problem}: {type(config).__name__} {config_text(config)}"
        yield Pair(group, what, flops / seconds / 1e12, tflops, fitted)


def _products() -> Iterator[Pair]:
    for problem, config, tflops, fitted in MATMUL:
        (ranking,) = rankings(f"matmul {problem}", H200, backward=False)
        (row,) = [row for row in ranking.rows if row.candidate.configs == (config,)]
        what = f"{problem}: {type(config).__name__} {config_text(config)}"
        yield Pair("matmul", what, ranking.flops / row.candidate.estimate.seconds / 1e12, tflops, fitted)


def _timed() -> Iterator[Pair]:
    """Of retention's calls, in known Configs."""
    for name, problem, direction, config, milliseconds, fitted in RETENTION:
        gpu, backward = architecture(name), direction == "backward"
        p = absent_problem(*problem_of(f"retention {problem}"), backward=backward)
        cost = p.spec.backward_cost if backward else p.spec.forward_cost
        assert cost is not None
        if isinstance(config, RetentionSm80Config):
            seconds, text = sm80_estimate(config, p, backward, gpu).seconds, f"chunk={config.chunk} "
            text += config_text(config.rows)
        else:
            seconds, text = sm90_estimate(config, p, backward, gpu).seconds, config_text(config)
        what = f"{problem}, {direction}, {name}: {type(config).__name__} {text}"
        flops = cost.flops(p)
        yield Pair("retention", what, flops / seconds / 1e12, flops / milliseconds / 1e9, fitted)


def _clusters(path: Path) -> Iterator[Pair]:
    """Of rows in clusters, with weights of x's dtype."""
    recorded, gpu = json.loads(path.read_text()), architecture("h100")
    for one in recorded["figures"]:
        if one["config"] is None:
            continue  # a ring
        operator, backward, columns = one["operator"], one["direction"] == "backward", one["columns"]
        rows = f"{recorded['bytes_of_an_array'] // itemsize(one['dtype']) // columns}x{columns}"
        arrays = {"x": rows} | {name: str(columns) for name in WEIGHTS[operator]}
        arrays |= {"residual": rows} if one.get("residual") else {}
        text = " ".join([operator, *(f"{name}={shape}:{one['dtype']}" for name, shape in arrays.items())])
        threads, (vectors, cluster, blocks) = recorded["threads"], one["config"].values()
        if operator == "softmax":
            config = ClusterRowsConfig(threads, vectors, cluster, blocks)
        else:
            config = ClusterRowsConfig(threads, vectors, cluster, blocks, one["rows"])
        share = _moved(text, backward) / one["seconds"] / recorded["roof_bytes_per_second"]
        p = absent_problem(*problem_of(text), backward=backward)
        seconds = cluster_rows.rows_estimate(config, p, backward, gpu).seconds
        yield _of_rows(text, config, backward, gpu, seconds, share)


def _softmax() -> Iterator[Pair]:
    for kib, dtype, config, share in SOFTMAX:
        columns = kib * 1024 // itemsize(dtype)
        text = f"softmax x={2**30 // itemsize(dtype) // columns}x{columns}:{dtype}"
        seconds = cluster_rows.rows_estimate(config, absent_problem(*problem_of(text)), False, H200).seconds
        yield _of_rows(text, config, False, H200, seconds, share)


def _blocks(path: Path) -> Iterator[Pair]:
    """Of rows in blocks, and gradients of norms, with weights of x's dtype."""
    gpu = architecture("h100")
    for run in json.loads(path.read_text())["runs"]:
        text, backward = run["problem"], run["backward"]
        p = absent_problem(*problem_of(text), backward=backward)
        softmax, both = p.spec.name == "softmax", "b" in p.arrays
        configs: list[tuple[Any, float]] = []
        for row_threads, vectors, rows, blocks, time in run.get("rows", ()):
            configs.append((RowsConfig(row_threads, vectors, rows, min_blocks=blocks), time))
        for *shape, overlap, time in run.get("rings", ()):
            configs.append((RingConfig(*shape, w_shared=both, overlap=overlap), time))
        for config, time in configs:
            if backward and not softmax:
                seconds = row_gradients.rows_estimate(config, p, gpu).seconds
                yield _of_rows(text, config, backward, gpu, seconds, run["roof"] / time)
            elif config.vectors * storage(p.dtype).vector <= block_rows.MOST_OF_A_THREAD:
                seconds = block_rows.rows_estimate(config, p, backward, gpu).seconds
                pair = _of_rows(text, config, backward, gpu, seconds, run["roof"] / time)
                yield pair._replace(group=AT_ROOF) if softmax else pair


def _of_rows(text: str, config: Any, backward: bool, gpu: Architecture, seconds: float, share: float) -> Pair:
    """share: measured, of the roof."""
    p = absent_problem(*problem_of(text), backward=backward)
    estimated = _moved(text, backward) / (REACHED * gpu.memory_bandwidth) / seconds
    fitted = p.spec.name != "rms_norm" or (isinstance(config, (RingConfig, RowsConfig)) and backward)
    return Pair(p.spec.name, f"{text}: {config_text(config)}", 100 * estimated, 100 * share, fitted)


def _moved(text: str, backward: bool) -> int:
    """Bytes of the rows that are read and written."""
    p = absent_problem(*problem_of(text), backward=backward)
    arrays = 3 if backward else 2
    added = "dsummed" in p.arrays if backward else 2 * ("residual" in p.arrays)
    return (arrays + added) * p.M * p.N * itemsize(p.dtype)


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
            if () in case.shapes.values() or any(map(callable, case.params.values())):
                continue  # a number on the device, as a seed may be, and functions of users have no estimates
            try:
                found = rankings(_text(operator, case), gpu, backward=direction == "backward")
            except NotImplementedError:  # of options that have no estimates
                continue
            found = [each for each in found if each.title.startswith(direction)]
            rows = [_row(each, rung) for each in found]
            if rung and all(row.taken for row in rows):
                continue  # timed as such
            flops = sum(each.flops for each in found)
            seconds = sum(row.candidate.estimate.seconds for row in rows)
            what = f"{direction} of {one['case'] if len(dtypes) > 1 else name}{f' by {rung}' if rung else ''}"
            yield Pair(group, what, flops / seconds / 1e12, flops / one["burst"] / 1e12)


def _row(ranking: Ranking, rung: str) -> Ranked:
    """What a call takes, or the best of a rung."""
    if rung:
        return next(row for row in ranking.rows if row.candidate.rung == rung)
    (taken,) = [row for row in ranking.rows if row.taken]
    return taken


def _text(operator: str, case: Case) -> str:
    arrays = [f"{name}={'x'.join(map(str, shape))}" for name, shape in case.shapes.items()]
    arrays[0] += f":{case.dtype}"
    return " ".join([operator, *arrays, *(f"{name}={value}".replace(" ", "") for name, value in case.params.items())])


def rank_correlation(found: Sequence[Pair]) -> float:
    """Spearman's."""
    estimated, measured = (_ranks([getattr(pair, name) for pair in found]) for name in ("estimated", "measured"))
    return float(np.corrcoef(estimated, measured)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Of equal ones their mean."""
    array = np.asarray(values)
    return np.array([(array < value).sum() + (array == value).sum() / 2 for value in array])


def listed(found: Sequence[Pair]) -> list[Pair]:
    """Those that the page names one by one: of rows a file has hundreds."""
    return [pair for pair in found if pair.group not in ROWS]


def table(found: Sequence[Pair]) -> str:
    """A row a group, and behind it every pair."""
    lines = [
        "| | figures | rank correlation | without those fitted to | median | four of five in | all in |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for group in GROUPS:
        mine = [pair for pair in found if pair.group == group]
        least, low, median, high, most = np.quantile([p.estimated / p.measured for p in mine], (0, 0.1, 0.5, 0.9, 1))
        others = [pair for pair in mine if not pair.fitted]
        without = f"{rank_correlation(others):.2f}" if others else "–"
        cells = (f"{rank_correlation(mine):.2f}", without, f"{median:.2f}", f"{low:.2f} to {high:.2f}")
        lines.append(f"| {group} | {len(mine)} | {' | '.join(cells)} | {least:.2f} to {most:.2f} |")
    lines += ["", "<details><summary>Every figure but of rows, TFLOP/s; * those fitted to</summary>", ""]
    lines += ["| | measured | estimated | ratio |", "| --- | --- | --- | --- |"]
    for pair in listed(found):
        name, ratio = f"{pair.what}{' *' * pair.fitted}", pair.estimated / pair.measured
        lines.append(f"| {name} | {pair.measured:.0f} | {pair.estimated:.0f} | {ratio:.2f} |")
    return "\n".join([*lines, "", "</details>"])


def draw_estimates() -> Figure:
    """Estimated against measured TFLOP/s, and percents of the roof; of the norms' figures one of forty."""
    found = pairs()
    figure = new_figure(6.4, 3.3)
    for axes, groups, unit in zip(figure.subplots(1, 2), (COLORS, ROWS), ("TFLOP/s", "% of the roof"), strict=True):
        shown = [pair for pair in found if pair.group in groups]
        ends = [value for pair in shown for value in (pair.estimated, pair.measured)]
        least, most = 0 if groups is COLORS else 0.95 * min(ends), 1.05 * max(ends)
        for share, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
            axes.plot([least, most], [share * least, share * most], style, color="#999999", linewidth=1)
        for group, color in groups.items():
            for fitted in (False, True):
                mine = [pair for pair in shown if (pair.group, pair.fitted) == (group, fitted)]
                if mine:
                    step = 1 if len(mine) < MANY else EACH
                    x, y = [pair.measured for pair in mine[::step]], [pair.estimated for pair in mine[::step]]
                    label = f"{group}{', fitted to' * fitted}"
                    axes.scatter(x, y, 16, "none" if fitted else color, edgecolors=color, label=label)
        axes.set(xlabel=f"measured, {unit}", ylabel=f"estimated, {unit}", xlim=(least, most), ylim=(least, most))
        axes.legend(frameon=False, fontsize=7)
    return figure


MANY, EACH = 500, 40  # of more figures than so many, one of so many is drawn
PICTURES = {"cost_estimates.png": draw_estimates}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    if folder == HERE:
        PAGE.write_text(fill(PAGE.read_text("utf-8"), table(pairs()), *MARKERS), "utf-8")
    for written in draw(folder, PICTURES):
        print(written)
