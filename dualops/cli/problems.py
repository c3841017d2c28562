"""What the demo runs: a public function and a problem for it. Built-in problems: `own.py`; the user's: `files.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import reference
from ..spec import OPERATORS, ArrayMeta, Problem, Spec
from ..spec.base import Cost, Input, Output, Param
from ..spec.lengths import spans_of
from ..spec.text import value_of
from .errors import CommandError

Arrays = dict[str, np.ndarray]

LEAN_BLOCK = 256  # rows and columns of a tile; at a kernel's 64, NumPy's threads mostly wait


@dataclass(frozen=True)
class Task:
    """A public function: an operator's forward or its gradient."""

    spec: Spec
    backward: bool

    @property
    def name(self) -> str:
        return f"{self.spec.name}_backward" if self.backward else self.spec.name

    @property
    def inputs(self) -> tuple[Input, ...]:
        return self.spec.gradient_inputs if self.backward else self.spec.inputs

    @property
    def params(self) -> tuple[Param, ...]:
        return self.spec.params + self.spec.gradient_params if self.backward else self.spec.params

    @property
    def outputs(self) -> tuple[Output, ...]:
        return self.spec.gradients if self.backward else self.spec.outputs

    @property
    def cost(self) -> Cost:
        cost = self.spec.backward_cost if self.backward else self.spec.forward_cost
        assert cost is not None  # `tasks` lists no gradient without a cost
        return cost

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(reference, self.name)

    @property
    def lean_reference(self) -> Callable[..., Any]:
        """Return the blocked form if there is one: it does not hold all scores, as the plain form does."""
        blocked = getattr(reference, f"{self.name}_blocked", None)
        return partial(blocked, block_q=LEAN_BLOCK, block_kv=LEAN_BLOCK) if blocked else self.reference

    def bind(self, metas: Mapping[str, ArrayMeta], params: Mapping[str, Any]) -> Problem:
        return self.spec.bind_backward(metas, params) if self.backward else self.spec.bind(metas, params)


def tasks() -> dict[str, Task]:
    """Return every operator, forward and gradient, in the order in which the demo shows them."""
    both = [Task(spec, backward) for spec in OPERATORS.values() for backward in (False, True)]
    return {task.name: task for task in both if not task.backward or task.spec.backward_cost is not None}


@dataclass(frozen=True, eq=False)
class Job:
    """A problem, which is a row of the demo's table on each rung, and how to load its arrays."""

    task: Task
    title: str
    problem: Problem
    params: Mapping[str, Any]  # as the function takes them
    load: Callable[[], Arrays]

    @property
    def returned(self) -> dict[str, ArrayMeta]:
        """Shape, dtype and strides of the call's results."""
        return self.problem.outputs(self.task.outputs)

    def named(self, results: Any) -> Arrays:
        """Name the results of a call as the spec does."""
        return dict(zip(self.returned, results if isinstance(results, tuple) else (results,), strict=True))

    @property
    def flops(self) -> int:
        """Floating-point operations. If sequences differ in length, this is an upper bound: each counts as the longest.
        `flops_of` counts exactly.
        """
        return self.task.cost.flops(self.problem)

    def flops_of(self, arrays: Mapping[str, Any]) -> int:
        """Count the floating-point operations with these arrays, from the lengths of their sequences."""
        if "cu_seqlens_q" not in self.problem.arrays:
            return self.flops
        p, lengths = self.problem, ((q.stop - q.start, k.stop - k.start) for q, k in spans_of(arrays))
        each = ({**p.dims, "B": 1, "Sq": Sq, "Sk": Sk} for Sq, Sk in lengths)
        return sum(self.task.cost.flops(Problem(p.spec, p.dtype, dims, p.params, p.arrays)) for dims in each)

    @property
    def bytes_moved(self) -> int:
        """The bytes that must be read and written at least."""
        return self.task.cost.bytes_read(self.problem) + self.task.cost.bytes_written(self.problem)

    @property
    def compute_bound(self) -> bool:
        """Whether arithmetic, not memory, limits a good kernel: tens of operations per byte, on any GPU."""
        return self.flops > 20 * self.bytes_moved

    @property
    def optional_inputs(self) -> list[str]:
        """The optional inputs that the problem has, without forward's results."""
        made = {output.name for output in self.task.spec.outputs}
        present = self.problem.arrays.keys() - made
        return [given.name for given in self.task.inputs if given.optional and given.name in present]

    def parts(self) -> list[str]:
        """Describe the inputs' shapes, equal ones together, and the parameters that differ from their defaults:
        "q 1×2×19×16", "k v 1×1×37×16", "causal=True".
        """
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, meta in self.problem.arrays.items():
            by_shape.setdefault(meta.shape, []).append(name)
        shapes = [f"{' '.join(names)} {shape_of(shape)}" for shape, names in by_shape.items()]
        defaults = {param.name: param.default for param in self.task.params}
        return shapes + [f"{name}={_value_text(x)}" for name, x in self.params.items() if x != defaults[name]]

    def __str__(self) -> str:
        return f"{self.task.name} {self.problem.dtype}, {', '.join(self.parts())}"


def shape_of(shape: Sequence[int]) -> str:
    """Format a shape: "1×2×19×16", or "()" without axes."""
    return "×".join(map(str, shape)) or "()"


def _value_text(value: Any) -> str:
    """Format a value, or the name of a function."""
    return getattr(value, "__name__", None) or str(value)


def parse_params(pairs: Sequence[str], task: Task) -> dict[str, Any]:
    """Parse `["causal=True", "scale=0.1"]` as parameters. A value that is not a Python literal is read as a string.

    Raises CommandError for a pair without "=", an unknown name, or a repeated name.
    """
    known = [param.name for param in task.params]
    params: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in known or name in params:
            raise CommandError(f"--param {pair}: expected name=value, each once, of {', '.join(known) or 'none'}")
        params[name] = value_of(text)
    return params
