"""What the demo runs: a public function and a problem of it. Its own problems: `own.py`; the user's: `files.py`."""

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

LEAN_BLOCK = 256  # rows and columns of a tile: NumPy's threads wait for one another on a kernel's 64


@dataclass(frozen=True)
class Task:
    """A public function: an operator's forward, or its gradient."""

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
        """The blocked form where there is one: it does not hold all that the plain form writes down (all scores)."""
        blocked = getattr(reference, f"{self.name}_blocked", None)
        return partial(blocked, block_q=LEAN_BLOCK, block_kv=LEAN_BLOCK) if blocked else self.reference

    def bind(self, metas: Mapping[str, ArrayMeta], params: Mapping[str, Any]) -> Problem:
        return self.spec.bind_backward(metas, params) if self.backward else self.spec.bind(metas, params)


def tasks() -> dict[str, Task]:
    """Every landed operator, forward and gradient, in the order in which the demo shows them."""
    both = [Task(spec, backward) for spec in OPERATORS.values() for backward in (False, True)]
    return {task.name: task for task in both if not task.backward or task.spec.backward_cost is not None}


@dataclass(frozen=True, eq=False)
class Job:
    """A problem, which is a row of the demo's table on each rung, and how to come by its arrays."""

    task: Task
    title: str
    problem: Problem
    params: Mapping[str, Any]  # as they are given to the function
    load: Callable[[], Arrays]

    @property
    def returned(self) -> dict[str, ArrayMeta]:
        """The results of the call."""
        return self.problem.outputs(self.task.outputs)

    def named(self, results: Any) -> Arrays:
        """The results of a call by the names of the spec."""
        return dict(zip(self.returned, results if isinstance(results, tuple) else (results,), strict=True))

    @property
    def flops(self) -> int:
        """Of sequences of different lengths more than there are: each counts as the longest. See `flops_of`."""
        return self.task.cost.flops(self.problem)

    def flops_of(self, arrays: Mapping[str, Any]) -> int:
        """With these arrays."""
        if "cu_seqlens_q" not in self.problem.arrays:
            return self.flops
        p, lengths = self.problem, ((q.stop - q.start, k.stop - k.start) for q, k in spans_of(arrays))
        each = ({**p.dims, "B": 1, "Sq": Sq, "Sk": Sk} for Sq, Sk in lengths)
        return sum(self.task.cost.flops(Problem(p.spec, p.dtype, dims, p.params, p.arrays)) for dims in each)

    @property
    def bytes_moved(self) -> int:
        """What must be read and written at the least."""
        return self.task.cost.bytes_read(self.problem) + self.task.cost.bytes_written(self.problem)

    @property
    def compute_bound(self) -> bool:
        """Whether arithmetic, not memory, is what a good kernel waits for: tens of operations a byte, on any GPU."""
        return self.flops > 20 * self.bytes_moved

    @property
    def optional_inputs(self) -> list[str]:
        """Those of its arrays that a call may be without, but for what forward made."""
        made = {output.name for output in self.task.spec.outputs}
        there = self.problem.arrays.keys() - made
        return [given.name for given in self.task.inputs if given.optional and given.name in there]

    def parts(self) -> list[str]:
        """The shapes of the inputs, those that are equal said once, and the parameters that are not as by default:
        "q 1×2×19×16", "k v 1×1×37×16", "causal=True".
        """
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, meta in self.problem.arrays.items():
            by_shape.setdefault(meta.shape, []).append(name)
        shapes = [f"{' '.join(names)} {shape_of(shape)}" for shape, names in by_shape.items()]
        defaults = {param.name: param.default for param in self.task.params}
        return shapes + [f"{name}={_told(x)}" for name, x in self.params.items() if x != defaults[name]]

    def __str__(self) -> str:
        return f"{self.task.name} {self.problem.dtype}, {', '.join(self.parts())}"


def shape_of(shape: Sequence[int]) -> str:
    """ "1×2×19×16", or "()" without axes."""
    return "×".join(map(str, shape)) or "()"


def _told(value: Any) -> str:
    """A value, or the name of a function."""
    return getattr(value, "__name__", None) or str(value)


def parse_params(pairs: Sequence[str], task: Task) -> dict[str, Any]:
    """`["causal=True", "scale=0.1"]` as parameters; what is no Python literal is taken as a string.

    Raises CommandError for a pair without "=", an unknown name, or a name given twice.
    """
    known = [param.name for param in task.params]
    params: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in known or name in params:
            raise CommandError(f"--param {pair}: expected name=value, each once, of {', '.join(known) or 'none'}")
        params[name] = value_of(text)
    return params
