"""Plan a call by the operator's name and its arguments, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...spec.named import refusal
from ..launch.operation import OPERATIONS, Operation, results_of
from ..launch.plans import Plan


class NamedCall(NamedTuple):
    """An operation and its arguments."""

    operation: Operation
    arrays: tuple[Any, ...]
    params: tuple[Any, ...]
    out: tuple[Any, ...] | None


def named_call(
    who: str, operator: str, arrays: Sequence[Any], out: Any, backward: bool, params: Mapping[str, Any]
) -> NamedCall:
    """Return the call of an operator's name and arguments. who: the public function, for messages.

    Raises ValueError for an unknown operator, TypeError for a parameter, NotImplementedError for a missing gradient.
    """
    if operator not in OPERATIONS:
        raise ValueError(f"{who}: operator is {operator!r}, expected one of {', '.join(OPERATIONS)}")
    directions = OPERATIONS[operator]
    if backward and len(directions) < 2:
        raise NotImplementedError(f"{who}: {operator} has no backward yet")
    operation = directions[1 if backward else 0]
    inputs = dict(zip(operation.inputs, arrays))
    accepted = dict.fromkeys(operation.inputs) | operation.defaults
    known = [name for name in accepted if name not in inputs]
    if unknown := params.keys() - known:
        raise refusal(operation.op, sorted(unknown), known)
    call = {**accepted, **inputs, **params}
    values = [tuple(call[name] for name in names) for names in (operation.inputs, operation.defaults)]
    return NamedCall(operation, values[0], values[1], None if out is None else results_of(out))


def plan(
    operator: str, *arrays: Any, out: Any = None, kernel: str | None = None, backward: bool = False, **params: Any
) -> Plan:
    """Return how a call would be computed: `print(plan("softmax", x, axis=0))` shows rung, Config and reason.

    Launches nothing. operator: "softmax", "flash_attention", ...; arrays, params, out, kernel: the operator's
    arguments. Raises the errors of the call itself.
    """
    call = named_call("plan", operator, arrays, out, backward, params)
    return call.operation.plan(call.arrays, call.params, call.out, kernel)
