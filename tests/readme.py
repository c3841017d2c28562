"""README's blocks of code, by the bold words that introduce them."""

import re
from pathlib import Path

from tests.processes import ROOT, printed

README = (ROOT / "README.md").read_text("utf-8")
# **words** and the rest of their paragraph, then the block
BLOCK = re.compile(r"^\*\*([^*\n]+)\*\*(?:[^\n]+\n)+```(?:python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

BLOCKS: dict[str, str] = dict(BLOCK.findall(README))


def run(words: str, folder: Path, **environment: str) -> str:
    """What a Python block prints, run as it stands by a new process in `folder`. AssertionError if it fails."""
    script = folder / "block.py"
    script.write_text(BLOCKS[words], "utf-8")
    return printed(script, cwd=folder, **environment)
