"""Places on the stack that are written before they are read, so without the zero that Numba stores in each.

LLVM removes the zero, after a walk through the kernel's blocks for each.
"""

from __future__ import annotations

from typing import Any


def slot(builder: Any, kind: Any, name: str = "") -> Any:
    """The address of a new one in the function's first block. kind: the type of LLVM's."""
    with builder.goto_entry_block():
        return builder.alloca(kind, name=name)
