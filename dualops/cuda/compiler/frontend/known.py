"""numba-cuda as this package uses it: a version whose internals it knows, imported without SciPy's linear algebra."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

FIRST, BEYOND = (0, 30, 4), (0, 31)  # of numba-cuda, as in pyproject.toml


def check(found: str) -> None:
    """Raises ImportError for a version of numba-cuda whose passes may be others."""
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not FIRST <= numbers < BEYOND:
        expected = " and < ".join(".".join(map(str, each)) for each in (FIRST, BEYOND))
        raise ImportError(f"dualops.cuda.compiler.frontend: numba-cuda is {found}, expected >= {expected}")


def _no_blas() -> NoReturn:
    raise ImportError


def _import_array_functions() -> None:
    """Import numba-cuda's functions of arrays, which look for a BLAS in SciPy. No kernel can call it.

    On an H200's host, the import of SciPy took 0.4 s.
    """
    linalg = import_module("numba.cuda.np.linalg")
    ensure_blas, linalg.ensure_blas = linalg.ensure_blas, _no_blas
    try:
        import_module("numba.cuda.np.arraymath")
    finally:
        linalg.ensure_blas = ensure_blas


check(version("numba-cuda"))
_import_array_functions()
