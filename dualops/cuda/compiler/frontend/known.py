"""The versions of numba-cuda whose internals this package uses: the one place that checks them."""

from __future__ import annotations

from importlib.metadata import version

FIRST, BEYOND = (0, 30, 4), (0, 31)  # of numba-cuda, as in pyproject.toml


def check(found: str) -> None:
    """Raises ImportError for a version of numba-cuda whose passes may be others."""
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not FIRST <= numbers < BEYOND:
        expected = " and < ".join(".".join(map(str, each)) for each in (FIRST, BEYOND))
        raise ImportError(f"dualops.cuda.compiler.frontend: numba-cuda is {found}, expected >= {expected}")


check(version("numba-cuda"))
