"""Progress on stderr: on a terminal a bar with the time left, elsewhere a plain line per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from .console import Console


class Steps:
    """Prints a plain line per step: call it with the step's name when the step begins."""

    def __init__(self, total: int, console: Console):
        self.total, self.console = total, console
        self.begun = 0

    def __call__(self, name: str) -> None:
        self.begun += 1
        print(f"[{self.begun}/{self.total}] {name}", file=self.console.file, flush=True)

    def aside(self) -> AbstractContextManager[None]:
        """Pause the display, so that lines may be written, to stdout too."""
        return nullcontext()


class StepsOnBar(Steps):
    """Shows the steps on a bar, which is as long as the estimated time of all steps."""

    def __init__(self, seconds: Sequence[float], console: Console, bar: Progress):
        super().__init__(len(seconds), console)
        self.seconds, self.bar = seconds, bar
        self.task: TaskID = bar.add_task("", total=sum(seconds), step=0, steps=self.total)

    def __call__(self, name: str) -> None:
        done = self.seconds[self.begun - 1] if self.begun else 0
        self.begun += 1
        self.bar.update(self.task, advance=done, description=name, step=self.begun, refresh=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.bar.stop()
        yield
        self.bar.start()


@contextmanager
def progress(steps: int | Sequence[float]) -> Iterator[Steps]:
    """Yield the `Steps` to call at the beginning of each step.

    steps: their number, or a rough estimate of the seconds of each. The time left follows from these and from the time
    passed.
    """
    seconds = [1.0] * steps if isinstance(steps, int) else steps
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Steps(len(seconds), console)
        return
    columns = (
        BarColumn(bar_width=20, table_column=Column(min_width=20)),
        TextColumn("{task.fields[step]}/{task.fields[steps]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    everything = 24 * 3600  # measure speed over the whole run, not the last half minute: steps differ
    with Progress(*columns, console=console, transient=True, speed_estimate_period=everything) as bar:
        yield StepsOnBar(seconds, console, bar)
