"""What tests give to the processes that they start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent


# for a program that a file's mode is to stop: root becomes another user. Import all that it needs before
AS_A_USER = """
import os
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""


def python_path(*more: str) -> str:
    """PYTHONPATH on this checkout, with what it held before behind."""
    return os.pathsep.join([str(ROOT), *more, *filter(None, [os.environ.get("PYTHONPATH")])])
