"""Overlapping grids (`Step.overlaps`): the first grid lets the next one begin, which waits for its inputs."""

from __future__ import annotations

from ..ptx.grid import (
    griddepcontrol_launch_dependents as let_next_grid_begin,
    griddepcontrol_wait as wait_for_grid_before,
)

__all__ = ["let_next_grid_begin", "wait_for_grid_before"]
