"""Import numba-cuda's functions of arrays without SciPy's linear algebra.

Numba imports it to find out whether there is a BLAS, which no kernel can call. On an H200's host that took 0.4 s.
"""

from __future__ import annotations

from importlib import import_module
from typing import NoReturn

from numba.cuda.np import linalg


def _no_blas() -> NoReturn:
    raise ImportError


_ensure_blas, linalg.ensure_blas = linalg.ensure_blas, _no_blas
try:
    import_module("numba.cuda.np.arraymath")
finally:
    linalg.ensure_blas = _ensure_blas
