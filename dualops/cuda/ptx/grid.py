"""Programmatic dependent launch: a grid's blocks may begin before the previous grid has ended (sm_90 and later).

The simulator runs one grid after another, but the twins check that an overlapping grid waits for the previous one
before it ends. Otherwise the grid after it could begin too early.
"""

from __future__ import annotations

from ..simulator import current, waited_for_grid
from .asm import instruction


@instruction("() -> void", "griddepcontrol.launch_dependents;", section="9.7.13.14")
def griddepcontrol_launch_dependents():
    """Let the next, overlapping grid begin, as soon as all blocks of this grid have called this or ended."""
    current()


@instruction("() -> void", "griddepcontrol.wait;", section="9.7.13.14")
def griddepcontrol_wait():
    """Wait until the previous grid has ended and its writes are visible."""
    waited_for_grid()
