"""What the results of operators are differences of, for `spec.compare`.

What needs NumPy alone is a field of the spec, `terms` or `gradient_terms`. What needs the reference's own functions is
a module here of the operator's name, or its parent's, with `result_terms`, `gradient_terms` or both.
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
    """(arrays, problem) -> by name, how large the terms are that a result, or with `backward` a gradient, adds up."""
    own = spec.gradient_terms if backward else spec.terms
    module = module_of(spec)
    return own or getattr(module, "gradient_terms" if backward else "result_terms", _nothing)


def module_of(spec: Spec) -> ModuleType | None:
    """The module here of the operator's name, else of its parent's."""
    name = next((name for name in (spec.name, spec.parent) if name in _modules()), None)
    return import_module(f"{__name__}.{name}") if name else None


@cache
def _modules() -> frozenset[str]:
    return frozenset(module.name for module in iter_modules(__path__))


def _nothing(arrays: Mapping[str, np.ndarray], problem: Problem) -> dict[str, float]:
    """Nothing cancels that the truth would not show."""
    return {}
