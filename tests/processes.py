"""What tests give to the processes that they start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python_path(*more: str) -> str:
    """PYTHONPATH on this checkout, with what it held before behind."""
    return os.pathsep.join([str(ROOT), *more, *filter(None, [os.environ.get("PYTHONPATH")])])
