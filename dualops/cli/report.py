"""The demo's table: what `--verbose` tells of each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..spec import Accuracy
from .measure import Measurement
from .problems import Job

NOT_CHECKED = "not checked"
ARGUMENTS_WIDTH = 36

WIDEST = 400  # columns

CAPTION = """\
Errors are relative to the largest and to the root mean square value of the float64 truth.
Allowed is twice the baseline's error and a floor of a few eps, for each of the two; {}."""
MEMORY_TOLD = {
    "gpu": "extra memory is what torch's allocator counted,\nwithout torch what the kernels ask for",
    "simulator": "extra memory is what the kernels ask for.\nThe time is the simulator's: it says nothing of a GPU",
    "reference": "extra memory is NumPy's peak",
}


class Row(NamedTuple):
    """One run: what ran, and how far from the truth it came out (None: not held against it)."""

    job: Job
    run: Measurement
    accuracy: Accuracy | None
    failures: Sequence[str] = ()  # what is to be said of the results that are too far from it

    @property
    def operations_a_second(self) -> float:
        return self.run.flops / self.run.seconds

    @property
    def of_roof(self) -> float | None:
        """How near it came to what the memory can do, where that is what counts."""
        return None if self.run.roof_seconds is None else self.run.roof_seconds / self.run.seconds


def print_table(rows: Sequence[Row], place: str) -> None:
    console = Console()
    shown = table(rows, place)
    natural = console.measure(shown, options=console.options.update(width=WIDEST)).maximum
    console.width = max(console.width, natural)  # a narrow window breaks lines, but no cell loses its end
    console.print(shown)


def table(rows: Sequence[Row], place: str) -> Table:
    """Operator, place and rung, arguments, dtype, errors, time, memory, and on a GPU speed and share of the roof."""
    made = Table(caption=CAPTION.format(MEMORY_TOLD[place]), caption_justify="left", box=HORIZONTALS)
    for title in ("operator", "ran in,\nrung", "arguments", "dtype"):
        made.add_column(title, no_wrap=True)
    numbers = ["max error,\nbaseline's", "rms error,\nbaseline's", "of\nallowed", "time", "extra\nmemory"]
    for title in numbers + (["speed", "of\nroof"] if place == "gpu" else []):
        made.add_column(title, justify="right", no_wrap=True)
    for before, row in zip([None, *rows], rows):
        arguments = "" if before and before.job is row.job else _in_lines(row.job.parts())
        cells = [row.job.task.name, f"{place}\n{row.run.rung}", arguments, row.job.problem.dtype]
        cells += [*_errors(row.accuracy), _seconds(row.run.seconds), size(row.run.extra_bytes)]
        if place == "gpu":
            cells += [_speed(row), _roof(row)]
        failed = row.accuracy is not None and not row.accuracy.passed
        made.add_row(*map(Text, cells), style="bold red" if failed else None)
    return made


def _in_lines(parts: Sequence[str]) -> str:
    """As many of the parts in a line as it is wide."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= ARGUMENTS_WIDTH:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def _errors(accuracy: Accuracy | None) -> list[str]:
    if accuracy is None:
        return [NOT_CHECKED, "", ""]
    kernel, baseline = accuracy.kernel, accuracy.baseline
    return [
        f"{kernel.max:.1e}\n{baseline.max:.1e}",
        f"{kernel.rms:.1e}\n{baseline.rms:.1e}",
        percent(accuracy.ratio) if accuracy.passed else f"{percent(accuracy.ratio)} FAILS",
    ]


def _seconds(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.1f} µs"


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.3g} {name}"
    return f"{count:.0f} B"


def percent(share: float) -> str:
    """A share as a person reads it: "50 %"."""
    return f"{100 * share:.0f} %" if share < 10 else "> 999 %"


def tflops(operations_a_second: float) -> str:
    speed = operations_a_second / 1e12
    return f"{speed:.0f} TFLOP/s" if speed >= 100 else f"{speed:.3g} TFLOP/s"


def _speed(row: Row) -> str:
    if row.job.compute_bound:
        return tflops(row.operations_a_second)
    return f"{row.job.bytes_moved / row.run.seconds / 1e12:.3g} TB/s"


def _roof(row: Row) -> str:
    return "–" if row.of_roof is None else percent(row.of_roof)
