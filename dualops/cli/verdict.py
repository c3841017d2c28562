"""What the demo says of an operator, and of all of them: a line each, in 80 columns."""

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
    """The verdict on all runs of an operator, its name in `width` columns; on a GPU with the best speed.

    softmax                 12 of 12 within tolerance, worst at 50 % of allowed
    softmax                 12 of 12 within tolerance (worst 50 %), 97 % of roof
    """
    checked, failed = _checked(rows)
    unchecked, best = len(rows) - len(checked), best_speed(rows)
    told = [f"{unchecked} not checked"] if unchecked else []
    if best and not failed and not (checked and unchecked):  # no room
        told.append(best)
    if checked:
        worst = percent(max(accuracy.ratio for accuracy in checked))
        told.insert(0, _count(checked, failed) + (f" (worst {worst})" if told else f", worst at {worst} of allowed"))
    return Text(f"{name:{width}}  {', '.join(told) or 'nothing ran'}", "bold red" if failed else "")


def remarks(rows: Sequence[Row], output: Path | None, *, said: bool) -> Iterator[Text]:
    """What else is said of an operator's runs, however short the demo is to be: every failure in full, what was not
    checked and why (`said`: unless the user wanted it so), and what was written to `output`.
    """
    for row in rows:
        told = f"{row.job.task.name}, {row.job.title}, {row.run.rung}"
        yield from (Text(f"over its tolerance: {told}: {message}", "bold red") for message in row.failures)
    for job in dict.fromkeys(row.job for row in rows if row.accuracy is None and said):
        needed = duration(reference_seconds(job))
        yield Text(f"{job.task.name} was not checked: the reference needs about {needed}, --check insists")
    if output is not None:
        yield from (Text(f"wrote {output}: {contents(row.run.results)}") for row in rows)


def last_line(rows: Sequence[Row], place: str, seconds: float, *, verbose: bool) -> Text:
    """The verdict on all runs: "79 of 79 within tolerance, in the simulator, 22 s. Details: --verbose"."""
    checked, failed = _checked(rows)
    unchecked = len(rows) - len(checked)
    told = [_count(checked, failed)] if checked else []
    told += [f"{unchecked} not checked"] if unchecked else []
    end = "" if verbose else ". Details: --verbose"
    return Text(", ".join([*told, PLACES_TOLD[place], duration(seconds)]) + end, "bold red" if failed else "bold")


def best_speed(rows: Sequence[Row]) -> str:
    """That of the best run, where speed is told: arithmetic where any run waits for that, else a share of the roof."""
    arithmetic = [row.operations_a_second for row in rows if row.job.compute_bound and row.run.flops]
    if arithmetic:
        return tflops(max(arithmetic))
    shares = [row.of_roof for row in rows if row.of_roof is not None]
    return f"{percent(max(shares))} of roof" if shares else ""


def _checked(rows: Sequence[Row]) -> tuple[list[Accuracy], int]:
    """How the runs that were checked came out, and how many of them are not as they must be."""
    found = [row.accuracy for row in rows if row.accuracy is not None]
    return found, sum(not accuracy.passed for accuracy in found)


def _count(checked: Sequence[Accuracy], failed: int) -> str:
    if failed:
        return f"{failed} of {len(checked)} OVER TOLERANCE"
    return f"{len(checked)} of {len(checked)} within tolerance"
