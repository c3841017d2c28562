"""Local arrays, and loops over them that are unrolled when a kernel is built.

The compiler does not unroll a long loop, and then the arrays that the loop indexes are in local memory, not in
registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..compiler.backend import cuda, f32, verb

Verb = Callable[[Any, Any, Any, Any], None]


@verb
def _nothing(a, b, c, d):
    pass


def one_after_another(verbs: Sequence[Verb]) -> Verb:
    """Return a verb that calls these verbs in order, each with the same four arguments."""
    if not verbs:
        return _nothing
    if len(verbs) == 1:
        return verbs[0]
    half = len(verbs) // 2
    first, second = one_after_another(verbs[:half]), one_after_another(verbs[half:])

    @verb
    def both(a, b, c, d):
        first(a, b, c, d)
        second(a, b, c, d)

    return both


def local_array(size: int, number: Any) -> Callable[..., Any]:
    """Return the verb () -> a local array of `size` numbers of this type."""

    @verb
    def make():
        return cuda.local.array(size, number)

    return make


def zeros(size: int) -> Callable[..., Any]:
    """Return the verb () -> a local array of `size` sums, all 0."""
    ZERO = f32(0)

    @verb
    def make():
        sums = cuda.local.array(size, f32)
        for e in range(size):
            sums[e] = ZERO
        return sums

    return make
