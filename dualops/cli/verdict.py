"""The demo's verdict on an operator and on all operators: one line each, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from ..spec import Accuracy
from .estimate import duration, reference_seconds
from .files import contents
from .report import Row, percent, tflops

PLACES_TOLD = {"gpu": "on the GPU", "simulator": "in the simulator", "reference": "as NumPy"}


def operator_line(name: str, width: int, rows: Sequence[Row]) -> Text:
    """Return the verdict on all runs of an operator, its name in `width` columns; on a GPU with the best speed.

    softmax                 12 of 12 within tolerance, worst at 50 % of allowed
    softmax                 12 of 12 within tolerance (worst 50 %), 97 % of roof
    """
    checked, failed = _checked(rows)
    unchecked, best = len(rows) - len(checked), best_speed(rows)
    parts = [f"{unchecked} not checked"] if unchecked else []
    if best and not failed and not (checked and unchecked):  # no room
        parts.append(best)
    if checked:
        worst = percent(max(accuracy.ratio for accuracy in checked))
        parts.insert(0, _count(checked, failed) + (f" (worst {worst})" if parts else f", worst at {worst} of allowed"))
    return Text(f"{name:{width}}  {', '.join(parts) or 'nothing ran'}", "bold red" if failed else "")


def remarks(rows: Sequence[Row], output: Path | None, *, said: bool) -> Iterator[Text]:
    """Yield further messages on an operator's runs: every failure in full, what was not checked and why (if `said`),
    and what was written to `output`.
    """
    for row in rows:
        title = f"{row.job.task.name}, {row.job.title}, {row.run.rung}"
        yield from (Text(f"over its tolerance: {title}: {message}", "bold red") for message in row.failures)
    for job in dict.fromkeys(row.job for row in rows if row.accuracy is None and said):
        needed = duration(reference_seconds(job))
        yield Text(f"{job.task.name} was not checked: the reference needs about {needed}; --check checks anyway")
    if output is not None:
        yield from (Text(f"wrote {output}: {contents(row.run.results)}") for row in rows)


def last_line(rows: Sequence[Row], place: str, seconds: float, *, verbose: bool) -> Text:
    """Return the verdict on all runs: "79 of 79 within tolerance, in the simulator, 22 s. Details: --verbose"."""
    checked, failed = _checked(rows)
    unchecked = len(rows) - len(checked)
    parts = [_count(checked, failed)] if checked else []
    parts += [f"{unchecked} not checked"] if unchecked else []
    end = "" if verbose else ". Details: --verbose"
    return Text(", ".join([*parts, PLACES_TOLD[place], duration(seconds)]) + end, "bold red" if failed else "bold")


def best_speed(rows: Sequence[Row]) -> str:
    """Return the best run's speed: in flops if arithmetic limits any run, else as a share of the roof."""
    arithmetic = [row.operations_a_second for row in rows if row.job.compute_bound and row.run.flops]
    if arithmetic:
        return tflops(max(arithmetic))
    shares = [row.of_roof for row in rows if row.of_roof is not None]
    return f"{percent(max(shares))} of roof" if shares else ""


def _checked(rows: Sequence[Row]) -> tuple[list[Accuracy], int]:
    """Return the accuracies of the checked runs, and how many of them failed."""
    found = [row.accuracy for row in rows if row.accuracy is not None]
    return found, sum(not accuracy.passed for accuracy in found)


def _count(checked: Sequence[Accuracy], failed: int) -> str:
    if failed:
        return f"{failed} of {len(checked)} OVER TOLERANCE"
    return f"{len(checked)} of {len(checked)} within tolerance"
