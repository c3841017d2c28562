"""The picture of attention beside its peers, against the length of its sequences, from the runs beside peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .recorded import Key, Peers, known_cases, work_of
from .tree import spec
from .work import DIRECTIONS, bind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPERATOR, DTYPE = "flash_attention", "bfloat16"
WIDTH, HEADS, TOKENS = 128, 16, 16384  # of a head; query and key heads; of all batches together
COLORS = {
    "dualops": "#d62728",
    "SDPA cuDNN": "#7f9ab8",
    "FlashAttention-4": "#4a4a4a",
    "SDPA flash": "#c9c9c9",
}  # of those that are drawn, in order
LABELS = {"SDPA cuDNN": "cuDNN", "SDPA flash": "FlashAttention-2"}


def lengths(causal: bool) -> dict[int, str]:
    """The cases that are drawn, by the length of their sequences."""
    found = {}
    for case_id, case in known_cases(OPERATOR).items():
        problem = bind(spec.OPERATORS[OPERATOR], case)
        plain = case.params.keys() <= {"causal"} and case.shapes.keys() == {"q", "k", "v"}
        same = (problem.H, problem.Hkv, problem.D, problem.Dv) == (HEADS, HEADS, WIDTH, WIDTH)
        drawn = plain and same and case.dtype == DTYPE and problem.B * problem.Sq == TOKENS
        if drawn and bool(case.params.get("causal")) == causal:
            found[problem.Sq] = case_id
    return dict(sorted(found.items()))


def rates(direction: str, causal: bool, peers: Peers) -> dict[int, dict[str, float]]:
    """TFLOP/s of each contestant that was timed, by length; of the lengths that dualops was timed at."""
    found = {}
    for length, case_id in lengths(causal).items():
        key = Key(OPERATOR, case_id, direction)
        everybody = peers.measurements.get(key, {})
        bursts = {name: everybody[name]["burst"] for name in COLORS if everybody.get(name, {}).get("burst")}
        if "dualops" in bursts:
            found[length] = {name: work_of(key).rate(burst) for name, burst in bursts.items()}
    return found


def picture(peers: Peers, target: Path) -> bool:
    """Draw it: forward above backward, all keys beside those that a causal mask leaves. False if nothing was timed."""
    from matplotlib.figure import Figure

    ways = [
        (direction, causal, rates(direction, causal, peers)) for direction in DIRECTIONS for causal in (False, True)
    ]
    if not any(found for *_, found in ways):
        return False
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row")
    for place, (direction, causal, found) in zip(axes.flat, ways):
        _bars(place, found)
        place.set_title(f"{direction}, {'causal' if causal else 'full'}", fontsize=11)
    for row in axes:
        row[0].set_ylabel("TFLOP/s")
    axes[1, 0].set_xlabel("length of the sequences")
    axes[1, 1].set_xlabel("length of the sequences")
    handles = {label: bar for place in axes.flat for bar, label in zip(*place.get_legend_handles_labels())}
    figure.legend([*handles.values()], [*handles], loc="outside upper center", ncols=len(COLORS), frameon=False)
    figure.supxlabel(_told(peers), fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    return True


def _bars(axes: Axes, found: dict[int, dict[str, float]]) -> None:
    """A group of bars for each length, a bar for each contestant; dualops' figure above its own."""
    share = 0.8 / len(COLORS)
    for place, (name, color) in enumerate(COLORS.items()):
        at = [n + share * (place - (len(COLORS) - 1) / 2) for n in range(len(found))]
        values = [found[length].get(name, 0.0) for length in found]
        bars = axes.bar(at, values, share, color=color, label=LABELS.get(name, name))
        if name == "dualops":
            axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
    axes.set_xticks(range(len(found)), [str(length) for length in found])
    axes.grid(axis="y", alpha=0.3)
    axes.margins(y=0.1)
    axes.set_axisbelow(True)


def _told(peers: Peers) -> str:
    """What was timed, where, when, and of which commits."""
    used: Sequence[Key] = [
        Key(OPERATOR, case_id, direction)
        for direction in DIRECTIONS
        for causal in (False, True)
        for case_id in lengths(causal).values()
    ]
    runs = dict.fromkeys(peers.runs[key] for key in used if key in peers.runs)
    where = "; ".join(f"one {run.device}, {run.day}, commit {run.commit[:8]}" for run in runs)
    return f"{DTYPE}, {TOKENS} tokens, {HEADS} heads of {WIDTH}; {where}"
