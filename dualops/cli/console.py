"""Text output of the command line."""

from __future__ import annotations

import os
import sys

import rich.console


class Console(rich.console.Console):
    """Rich's console, except that a closed pipe (`| head`) raises `BrokenPipeError`, which `main` ends quietly."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def lines(*, stderr: bool = False) -> Console:
    """Write lines unchanged; a terminal breaks long ones between words."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=not terminal)


def let_go() -> None:
    """Discard the output that is left for a closed pipe. Otherwise Python complains about it at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
