"""README's blocks of code, by the bold words that introduce them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT, python_path

README = (ROOT / "README.md").read_text("utf-8")
# **words** and the rest of their paragraph, then the block
BLOCK = re.compile(r"^\*\*([^*\n]+)\*\*(?:[^\n]+\n)+```(?:python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

BLOCKS: dict[str, str] = dict(BLOCK.findall(README))


def run(words: str, folder: Path, **environment: str) -> str:
    """What a Python block prints, run as it stands by a new process in `folder`. AssertionError if it fails."""
    script = folder / "block.py"
    script.write_text(BLOCKS[words], "utf-8")
    return python(folder, str(script), **environment)


def python(folder: Path, *arguments: str, **environment: str) -> str:
    """What a new Python on this checkout prints, Numba's switch unset unless given."""
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": python_path(), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
