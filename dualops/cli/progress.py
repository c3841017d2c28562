"""Progress on stderr: a bar on a terminal, a plain line a step elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Gives a function to call with the name of each of `total` steps as it begins."""
    console = Console(stderr=True)
    if not console.is_terminal:
        steps = iter(range(1, total + 1))
        yield lambda name: print(f"[{next(steps)}/{total}] {name}", file=console.file, flush=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def advance(name: str) -> None:
            nonlocal begun
            bar.update(task, advance=int(begun), description=name)
            begun = True

        yield advance
