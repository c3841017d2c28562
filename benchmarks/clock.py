"""A clock that advances only on request.

asv reads a benchmark's `timer` before and after the body. With an ordinary timer, a body that launches kernels would
count the host's time. With this clock, it counts the seconds that the GPU's events measured.
"""

from __future__ import annotations


class VirtualClock:
    """Calling it returns the sum of the seconds passed to `advance`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`. Raises ValueError for a negative number."""
        if not seconds >= 0.0:
            raise ValueError(f"advance got {seconds} seconds, expected 0 or more")
        self._seconds += seconds
