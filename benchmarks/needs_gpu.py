"""asv's plugin that ends a command which times something, where there is no GPU to time it on: at once, with a line.

Without it asv would begin each benchmark in a process of its own, to hear from each that it is to be skipped.
"""

from __future__ import annotations

import sys
from importlib import import_module

from asv.util import UserError

from .cases import require_gpu

TIMING = {"run", "continuous", "find", "profile"}  # asv's commands


def setup() -> None:
    """Asv calls this when it has read its configuration. Raises UserError: asv prints it and ends with exit code 1."""
    if not TIMING & {*sys.argv[1:]}:
        return
    try:
        require_gpu()
    except NotImplementedError as error:
        lacking = import_module("dualops.machine").missing()
        raise UserError(" ".join([f"{error}.", *lacking, "Nothing was timed."])) from None
