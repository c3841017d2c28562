"""Stand-ins for dualops.cuda, so that the command line can be tested without a kernel, and with broken ones."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from dualops import reference
from dualops.spec import OPERATORS

WORKSPACE_BYTES = 3 << 10


def plan(operator: str, *, kernel: str | None = None, backward: bool = False, **arguments: Any) -> SimpleNamespace:
    """One block of 32 threads and 3 KiB of memory, on the rung asked for."""
    spec = OPERATORS[operator]
    inputs, params = (spec.inputs, spec.params)
    if backward:
        inputs, params = spec.gradient_inputs, spec.params + spec.gradient_params
    assert arguments.keys() <= {entry.name for entry in (*inputs, *params)}
    step = SimpleNamespace(grid=(1,), kernel=SimpleNamespace(threads=32))
    workspace = {"scratch": SimpleNamespace(nbytes=WORKSPACE_BYTES)}
    return SimpleNamespace(choice=SimpleNamespace(rung=kernel or "simt", workspace=workspace), steps=[step])


def cuda(spoil: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> SimpleNamespace:
    """`dualops.cuda` whose operators are the references, their results passed through `spoil`; `calls` has the names
    of those that were called.
    """
    calls: list[str] = []

    def operator(name: str) -> Callable[..., Any]:
        def call(*, out: Any = None, kernel: str | None = None, **arguments: Any) -> Any:
            calls.append(name)
            results = getattr(reference, name)(**arguments)
            made = [spoil(x) for x in (results if isinstance(results, tuple) else (results,))]
            if out is not None:
                for given, x in zip(out if isinstance(out, tuple) else (out,), made, strict=True):
                    given[...] = x
            return tuple(made) if len(made) > 1 else made[0]

        return call

    names = [name for op in OPERATORS for name in (op, f"{op}_backward") if hasattr(reference, name)]
    return SimpleNamespace(plan=plan, calls=calls, **{name: operator(name) for name in names})
