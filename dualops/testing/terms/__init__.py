"""The magnitudes of the terms in each operator's results, for `spec.compare`.

Terms that need only NumPy are a field of the spec, `terms` or `gradient_terms`. Those that need the reference's own
functions are in a module here with the operator's name, or its parent's, as `result_terms`, `gradient_terms` or both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

import numpy as np

from ...spec import Problem, Spec
from ...spec.base import Terms


def terms_of(spec: Spec, backward: bool) -> Terms:
    """Return a function (arrays, problem) -> by name, the magnitude of the terms of each result, or gradient with
    `backward`.
    """
    own = spec.gradient_terms if backward else spec.terms
    module = module_of(spec)
    return own or getattr(module, "gradient_terms" if backward else "result_terms", _nothing)


def module_of(spec: Spec) -> ModuleType | None:
    """Return the module here for the operator, else for its parent."""
    name = next((name for name in (spec.name, spec.parent) if name in _modules()), None)
    return import_module(f"{__name__}.{name}") if name else None


@cache
def _modules() -> frozenset[str]:
    return frozenset(module.name for module in iter_modules(__path__))


def _nothing(arrays: Mapping[str, np.ndarray], problem: Problem) -> dict[str, float]:
    """No terms: nothing cancels without the truth showing it."""
    return {}
