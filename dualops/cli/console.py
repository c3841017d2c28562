"""Where the command line writes lines of text."""

from __future__ import annotations

import sys

from rich.console import Console


def lines(*, stderr: bool = False) -> Console:
    """Writes lines as they are; on a terminal a long one is broken between words."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=not terminal)
