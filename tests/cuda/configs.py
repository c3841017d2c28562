"""Calls by Configs that a test chooses."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from dualops.cuda.launch.operation import OPERATIONS

Change = tuple[ModuleType, Mapping[str, Any]]  # a module, and what it has instead


def alone(rung: ModuleType, config: Any) -> Change:
    """A rung whose `configs` are this one."""
    return rung, {"configs": lambda *_: iter([(config, "alone")])}


@contextmanager
def changed(operator: str, *changes: Change) -> Iterator[None]:
    """Inside the with statement these modules are changed, and the operator's plans are made again."""
    with ExitStack() as stack:
        for module, instead in changes:
            stack.enter_context(mock.patch.multiple(module, **instead))
        for operation in OPERATIONS[operator]:
            stack.enter_context(mock.patch.multiple(operation, plans={}, families={}))
        yield
