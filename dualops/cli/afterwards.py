"""What to try after the demo: one line per command, with this Python's own path."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

FIRST = {"demo flash_attention -v": "errors, time, memory", "demo softmax --input x.npz": "an array x of yours"}
NEXT = {
    "gpu": FIRST | {"warm flash_attention": "compiled ahead of calls"},
    "simulator": FIRST | {"info": "what a GPU needs here"},
    "reference": FIRST | {"demo --where simulator": "the kernels, as Python"},
}


def afterwards(place: str) -> Iterator[Text]:
    """Suggest commands after a demo in `place`, in 80 columns unless this Python's path is long.

    Try next:
      python -m dualops demo flash_attention -v     errors, time, memory
    """
    program = f"{this_python()} -m dualops"
    width = max(map(len, NEXT[place]))
    yield Text("Try next:")
    for words, gives in NEXT[place].items():
        yield Text(f"  {program} {words:{width}}  {gives}")


def this_python() -> str:
    """Return the shell command for this Python: "python" if that is it, else its path."""
    path = Path(sys.executable)
    if shutil.which("python") == str(path):
        return "python"
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
