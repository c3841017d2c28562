"""An asv plugin that ends a timing command immediately, with one line, if there is no GPU.

Without it, asv would start a process for each benchmark, only to skip it.
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
