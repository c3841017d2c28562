"""README's picture: attention against the length of its sequences, and matrix products, compared with their peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .recorded import Key, Peers, known_cases, work_of
from .tree import spec
from .work import DIRECTIONS, bind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "<!-- peers:begin -->", "<!-- peers:end -->"
DTYPE = "bfloat16"
WIDTH, HEADS, TOKENS = 128, 16, 16384  # of a head; query and key heads; of all batches together
COLORS = {
    "dualops": "#d62728",
    "SDPA cuDNN": "#7f9ab8",
    "FlashAttention-4": "#4a4a4a",
    "SDPA flash": "#c9c9c9",
    "torch eager": "#5a9e6f",
    "torch.compile": "#b7d7bf",
}  # the drawn contestants, in order
LABELS = {
    "SDPA cuDNN": "cuDNN",
    "SDPA flash": "FlashAttention-2",
    "torch eager": "cuBLAS",
    "torch.compile": "torch.compile, the best that it finds",
}

Rates = dict[str, dict[str, float]]  # TFLOP/s of each contestant, by the words below its bars


class Panel(NamedTuple):
    """One of the picture's axes."""

    title: str
    operator: str
    cases: Mapping[str, str]  # the words below a group of bars, and its case
    direction: str

    def rates(self, peers: Mapping[str, Peers]) -> Rates:
        """Return the rates of the cases that dualops was timed on."""
        found = {}
        for words, case_id in self.cases.items():
            key = Key(self.operator, case_id, self.direction)
            run = peers.get(self.operator)
            everybody = run.measurements.get(key, {}) if run else {}
            bursts = {name: everybody[name]["burst"] for name in COLORS if everybody.get(name, {}).get("burst")}
            if "dualops" in bursts:
                found[words] = {name: work_of(key).rate(burst) for name, burst in bursts.items()}
        return found


def panels() -> list[Panel]:
    """Return the panels: forward in the first row, backward in the second; columns: full, causal, matrix products."""
    return [
        panel
        for direction in DIRECTIONS
        for panel in (
            Panel(f"attention, {direction}, full", "flash_attention", lengths(False), direction),
            Panel(f"attention, {direction}, causal", "flash_attention", lengths(True), direction),
            Panel(f"matmul, {direction}", "matmul", products(), direction),
        )
    ]


def lengths(causal: bool) -> dict[str, str]:
    """Return the drawn cases of attention, by the length of their sequences."""
    found = {}
    for case_id, case in known_cases("flash_attention").items():
        problem = bind(spec.OPERATORS["flash_attention"], case)
        plain = case.params.keys() <= {"causal"} and case.shapes.keys() == {"q", "k", "v"}
        same = (problem.H, problem.Hkv, problem.D, problem.Dv) == (HEADS, HEADS, WIDTH, WIDTH)
        drawn = plain and same and case.dtype == DTYPE and problem.B * problem.Sq == TOKENS
        if drawn and bool(case.params.get("causal")) == causal:
            found[problem.Sq] = case_id
    return {str(length): case_id for length, case_id in sorted(found.items())}


def products() -> dict[str, str]:
    """Return the drawn cases of matmul, row-major matrices and a linear layer, by their sizes."""
    found = {}
    for case_id, case in known_cases("matmul").items():
        problem, linear = bind(spec.OPERATORS["matmul"], case), "bias" in case.shapes
        as_they_lie = linear or not (problem.transpose_a or problem.transpose_b)
        if case.dtype == DTYPE and as_they_lie and problem.activation is None:
            batches = f"{case.shapes['a'][0]} of\n" if len(case.shapes["a"]) > 2 else ""
            found[f"{batches}{problem.M}\n{problem.N}\n{problem.K}" + "\n+ bias" * linear] = case_id
    return found


def picture(peers: Mapping[str, Peers], target: Path) -> bool:
    """Draw the picture. Return False if nothing was timed."""
    from matplotlib.figure import Figure

    drawn = [(panel, panel.rates(peers)) for panel in panels()]
    if not any(found for _, found in drawn):
        return False
    figure = Figure(figsize=(15, 7.4), layout="constrained")
    axes = figure.subplots(2, 3, sharey="row")
    for place, (panel, found) in zip(axes.flat, drawn):
        _bars(place, found)
        place.set_title(panel.title, fontsize=11)
    for row in axes:
        row[0].set_ylabel("TFLOP/s")
    for place, words in zip(axes[1], ("length of the sequences", "length of the sequences", "M, N, K")):
        place.set_xlabel(words)
    handles = {label: bar for place in axes.flat for bar, label in zip(*place.get_legend_handles_labels())}
    order = [LABELS.get(name, name) for name in COLORS]
    named = sorted(handles, key=order.index)
    figure.legend(
        [handles[name] for name in named], named, loc="outside upper center", ncols=len(COLORS), frameon=False
    )
    figure.supxlabel(measured_runs(drawn, peers), fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    return True


def _bars(axes: Axes, found: Rates) -> None:
    """Draw a group of bars per case, with a bar per contestant, and dualops' figure above its bar."""
    names = [name for name in COLORS if any(name in each for each in found.values())]
    share = 0.8 / max(len(names), 1)
    for place, name in enumerate(names):
        at = [n + share * (place - (len(names) - 1) / 2) for n in range(len(found))]
        values = [each.get(name, 0.0) for each in found.values()]
        bars: Any = axes.bar(at, values, share, color=COLORS[name], label=LABELS.get(name, name))
        if name == "dualops":
            axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
    axes.set_xticks(range(len(found)), [*found], fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.margins(y=0.1)
    axes.set_axisbelow(True)


def caption(peers: Mapping[str, Peers]) -> str:
    """Name the GPUs of the picture: "Attention on one NVIDIA H100 80GB HBM3, matmul on one NVIDIA H200."."""
    devices: dict[str, dict[str, None]] = {}
    for panel in panels():
        for words in panel.rates(peers):
            run = peers[panel.operator].runs[Key(panel.operator, panel.cases[words], panel.direction)]
            devices.setdefault(panel.operator, {})[run.device] = None
    names = {"flash_attention": "attention", "matmul": "matmul"}
    parts = [f"{names[operator]} on one {' or one '.join(found)}" for operator, found in devices.items()]
    text = ", ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def measured_runs(drawn: Iterable[tuple[Panel, Rates]], peers: Mapping[str, Peers]) -> str:
    """Describe what was timed, on which GPUs, when, and at which commits."""
    runs: dict[str, None] = {}
    for panel, found in drawn:
        for words in found:
            run = peers[panel.operator].runs[Key(panel.operator, panel.cases[words], panel.direction)]
            runs[f"{panel.operator}: one {run.device}, {run.day}, commit {run.short}"] = None
    return f"{DTYPE}; attention: {TOKENS} tokens, {HEADS} heads of {WIDTH}\n" + "; ".join(runs)
