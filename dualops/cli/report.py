"""The demo's tables: what `--verbose` shows for each run, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from ..spec import Accuracy
from .console import Console
from .measure import Measurement
from .problems import Job

NOT_CHECKED = "not checked"
# titles and widths: on a GPU 79 columns in total
COLUMNS = {
    "  rung": 8,
    "max error\nbaseline": 9,
    "rms error\nbaseline": 9,
    "of\nallowed": 7,
    "time": 8,
    "extra\nmemory": 8,
}
COLUMNS_OF_GPU = {"speed": 11, "of\nroof": 5}
INDENT, GAP, DEEPER = 2, 2, " " * 4
NO_BREAK = "\N{NO-BREAK SPACE}"

CAPTION = """\
Errors are relative to the largest and to the root mean square value of the
float64 truth. Allowed is twice the baseline's error and a floor of a few eps,
for each of the two; {}."""
MEMORY_TOLD = {
    "gpu": "extra memory is what torch's\nallocator counted, without torch what the kernels ask for",
    "simulator": "extra memory is what the kernels ask\nfor. The time is the simulator's: it says nothing of a GPU",
    "reference": "extra memory is NumPy's peak",
}


class Row(NamedTuple):
    """One run: what ran, and its error compared with the truth (None: not checked)."""

    job: Job
    run: Measurement
    accuracy: Accuracy | None
    failures: Sequence[str] = ()  # messages about results over their tolerance

    @property
    def failed(self) -> bool:
        return self.accuracy is not None and not self.accuracy.passed

    @property
    def operations_a_second(self) -> float:
        return self.run.flops / self.run.seconds

    @property
    def of_roof(self) -> float | None:
        """The share of the memory's best speed, if memory is the limit."""
        return None if self.run.roof_seconds is None else self.run.roof_seconds / self.run.seconds


def print_table(rows: Sequence[Row], place: str) -> None:
    """Print a heading for each problem, with a row for each of its runs below."""
    console = Console(highlight=False)
    for number, (job, runs) in enumerate(groupby(rows, key=lambda row: row.job)):
        console.print(Text("\n".join(heading(job, place, console.width))))
        console.print(table([*runs], place, titles=not number))
    console.print(Text(CAPTION.format(MEMORY_TOLD[place])))


def heading(job: Job, place: str, width: int) -> list[str]:
    """Return "softmax, simulator, float32: x 3×70, axis=0", in lines of this width."""
    parts = ", ".join(part.replace(" ", NO_BREAK) for part in job.parts())  # keeps "q k 2×3" on one line
    lines = textwrap.wrap(
        f"{job.task.name}, {place}, {job.problem.dtype}: {parts}",
        width,
        subsequent_indent=DEEPER,
        break_on_hyphens=False,
    )
    return [line.replace(NO_BREAK, " ") for line in lines]


def table(rows: Sequence[Row], place: str, *, titles: bool = True) -> Table:
    """Build the table of one problem's runs: rung, errors, time, memory, and on a GPU speed and share of the roof."""
    made = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_header=titles)
    columns = {**COLUMNS, **(COLUMNS_OF_GPU if place == "gpu" else {})}
    for title, width in columns.items():
        justify = "left" if "rung" in title else "right"
        made.add_column(title, justify=justify, min_width=width, overflow="fold")  # keep the ends of cells
    for row in rows:
        made.add_row(*map(Text, _cells(row, place)), style="bold red" if row.failed else None)
    return made


def _cells(row: Row, place: str) -> Iterator[str]:
    yield " " * INDENT + row.run.rung
    yield from _errors(row.accuracy)
    yield _seconds(row.run.seconds)
    yield size(row.run.extra_bytes)
    if place == "gpu":
        yield _speed(row)
        yield _roof(row)


def _errors(accuracy: Accuracy | None) -> list[str]:
    if accuracy is None:
        return [NOT_CHECKED.replace(" ", "\n"), "", ""]
    kernel, baseline = accuracy.kernel, accuracy.baseline
    return [
        f"{kernel.max:.1e}\n{baseline.max:.1e}",
        f"{kernel.rms:.1e}\n{baseline.rms:.1e}",
        percent(accuracy.ratio) if accuracy.passed else f"{percent(accuracy.ratio)}\nFAILS",
    ]


def _seconds(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{digits(seconds / unit)} {name}"
    return f"{seconds * 1e6:.1f} µs"


def digits(number: float) -> str:
    """Format a number with three digits or more, without exponent: "1.25", "612", "1023"."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def size(count: float) -> str:
    """Format bytes for a person."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{digits(count / 1024**power)} {name}"
    return f"{count:.0f} B"


def percent(share: float) -> str:
    """Format a share for a person: "50 %"."""
    return f"{100 * share:.0f} %" if share < 10 else "> 999 %"


def tflops(operations_a_second: float) -> str:
    return f"{digits(operations_a_second / 1e12)} TFLOP/s"


def bandwidth(bytes_a_second: float) -> str:
    return f"{digits(bytes_a_second / 1e12)} TB/s"


def _speed(row: Row) -> str:
    if row.job.compute_bound:
        return tflops(row.operations_a_second)
    return bandwidth(row.job.bytes_moved / row.run.seconds)


def _roof(row: Row) -> str:
    return "–" if row.of_roof is None else percent(row.of_roof)
