"""A launch passes what its kernel takes: records of the same fields in the same order, scalars where scalars are."""

from collections.abc import Iterator
from typing import Any

import pytest
from numba import types

from dualops.cuda.compiler.offline import steps_to_check
from dualops.spec import OPERATORS


def differences(given: Any, kind: Any, place: str) -> Iterator[str]:
    """Yield where an argument has another shape than its type."""
    known: Any = kind
    parts = [*known] if isinstance(kind, types.BaseTuple) else None
    if parts is None or not isinstance(given, tuple) or len(given) != len(parts):
        if parts is not None or isinstance(given, tuple):
            yield f"{place}: {given!r} for {kind}"
        return
    fields = getattr(kind, "fields", None)
    if fields and getattr(type(given), "_fields", None) != tuple(fields):
        yield f"{place}: {type(given).__name__} for {kind}"
    for number, (own, part) in enumerate(zip(given, parts, strict=True)):
        yield from differences(own, part, f"{place}.{fields[number] if fields else number}")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_arguments_have_the_shape_of_the_signature(operator, arch):
    steps = [*steps_to_check(arch, [operator])]
    assert steps or operator == "rope"
    for step in steps:
        names = step.kernel.function.__code__.co_varnames[: len(step.kernel.argtypes)]
        assert len(step.args) == len(names) == step.kernel.function.__code__.co_argcount, step.kernel.identity
        for name, given, kind in zip(names, step.args, step.kernel.argtypes, strict=True):
            assert not [*differences(given, kind, f"{step.kernel.name} {name}")], step.kernel.identity
