"""The error that ends a command with one line and exit code 2."""

from __future__ import annotations


class CommandError(Exception):
    """The user's call is wrong or can't be served here; the message says what to do."""
