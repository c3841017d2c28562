"""Where the command line writes lines of text."""

from __future__ import annotations

import os
import sys

import rich.console


class Console(rich.console.Console):
    """Rich's, but that a reader who has seen enough (`| head`) is `BrokenPipeError`, which `main` ends quietly."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def lines(*, stderr: bool = False) -> Console:
    """Writes lines as they are; on a terminal a long one is broken between words."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=not terminal)


def let_go() -> None:
    """Let what is left for a pipe that nobody reads go nowhere: Python would complain of it as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
