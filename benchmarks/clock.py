"""A clock that stands still until it is told how much time has passed.

asv reads a benchmark's `timer` before and after the body. A body that launches kernels would be charged the host's
time; with this clock as the timer it is charged the seconds that the GPU's own events measured.
"""

from __future__ import annotations


class VirtualClock:
    """Calling it gives the seconds that `advance` has been told of since it was made."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Raises ValueError where time would go backwards."""
        if not seconds >= 0.0:
            raise ValueError(f"the clock was told that {seconds} seconds have passed")
        self._seconds += seconds
