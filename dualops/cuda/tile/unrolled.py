"""Loops over registers that are written out when a kernel is built: the compiler leaves a long one as it is, and what
it indexes then lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..compiler.backend import verb

Verb = Callable[[Any, Any, Any, Any], None]


def one_after_another(verbs: Sequence[Verb]) -> Verb:
    """A verb that calls each of these, which take four arguments."""
    if len(verbs) == 1:
        return verbs[0]
    half = len(verbs) // 2
    first, second = one_after_another(verbs[:half]), one_after_another(verbs[half:])

    @verb
    def both(a, b, c, d):
        first(a, b, c, d)
        second(a, b, c, d)

    return both
