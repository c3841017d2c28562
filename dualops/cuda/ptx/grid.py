"""Grids that overlap: one whose blocks may begin before the grid launched before it has ended (sm_90 and later).

The twins say what is missed: the simulator runs one grid after another, but an overlapping one must have waited for the
one before by the time it ends, or what follows it would not.
"""

from __future__ import annotations

from ..simulator import current, waited_for_grid
from .asm import instruction


@instruction("() -> void", "griddepcontrol.launch_dependents;", section="9.7.13.14")
def griddepcontrol_launch_dependents():
    """Once all blocks of this grid have come here or ended, those of an overlapping grid after it may begin."""
    current()


@instruction("() -> void", "griddepcontrol.wait;", section="9.7.13.14")
def griddepcontrol_wait():
    """Wait until the grid before has ended; what it wrote is then there."""
    waited_for_grid()
