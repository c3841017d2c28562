"""One BENCH case on a device: its data, the calls that are timed, and the check that comes first.

Data. The spec's generator fills the case, or where that would take minutes the first few rows of it, which then repeat
along axis 0 (a batch axis in every BENCH case). A kernel must give repeated rows the same bits, so the check of the
first rows, and the comparison of all others with them, covers the whole result.

Rotation. Calls take turns over copies of the data, and results are kept as long as their copy waits, so that what one
call touches is more than four times the L2 cache away from what touched it last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

from .contestant import Contestant
from .samples import Sample, Shapes
from .tree import reference, spec
from .work import bind

GENERATED_ELEMENTS = 2**24  # of the largest input
ROTATION_BYTES = 256 * 2**20  # more than four times 60 MB, the largest L2 there is

Tensors = dict[str, torch.Tensor]


class WrongResult(AssertionError):
    """What was to be timed gives a wrong result."""


class Workload:
    """A case of an operator, laid out on `device`."""

    def __init__(self, operator: spec.Spec, case: spec.Case, sample: Sample, device: str = "cuda"):
        self.operator, self.case, self.sample, self.device = operator, case, sample, device
        self.problem = bind(operator, case)
        self._batch = generated_batch(case)
        shapes = {name: self._tile(shape) for name, shape in case.shapes.items()}
        self._host = operator.generate(operator, replace(case, shapes=shapes), np.random.default_rng(case.seed))
        self._inputs = self._rotation(self._host, case.shapes)
        self._gradient_inputs: list[Tensors] = []

    def prepare_backward(self, contestant: Contestant) -> None:
        """Make what backward takes: the results of this contestant's forward, and random incoming gradients."""
        results = self._named(contestant.forward(**self._inputs[0]))
        rng = np.random.default_rng(self.case.seed + 1)
        shapes, host = {}, {}
        for wanted in self.operator.gradient_inputs:
            name = wanted.name
            if name in self.case.shapes:
                shapes[name], host[name] = self.case.shapes[name], self._host[name]
                continue
            result = results[name.removeprefix("d")]
            shapes[name] = tuple(result.shape)
            host[name] = to_numpy(result[: self._batch])
            if name not in results:  # the gradient of a result
                host[name] = rng.standard_normal(host[name].shape, np.float32).astype(host[name].dtype)
        self._host = {**self._host, **host}
        self._gradient_inputs = self._rotation(host, shapes)

    def call(self, contestant: Contestant, direction: str) -> Callable[[], object]:
        """A call without arguments, on the next copy of the data each time."""
        function, sets = self._function(contestant, direction), self._sets(direction)
        held: list[object] = [None] * len(sets)
        turn = -1

        def call() -> object:
            nonlocal turn
            turn = (turn + 1) % len(sets)
            held[turn] = function(**sets[turn])
            return held[turn]

        return call

    def lone_call(self, contestant: Contestant, direction: str) -> Callable[[], object]:
        """A call without arguments, on the same data each time, that keeps no result."""
        return partial(self._function(contestant, direction), **self._sets(direction)[0])

    def check(self, contestant: Contestant, direction: str) -> spec.Accuracy:
        """Hold a sample of the result against float64 truth, and the rest against the rows that it repeats.

        Returns the worst accuracy over the results. Raises WrongResult where rows that repeat differ.
        """
        function, arguments = self._function(contestant, direction), self._sets(direction)[0]
        results = self._named(function(**arguments), direction)
        shapes = {name: self._tile(tuple(array.shape)) for name, array in (arguments | results).items()}
        picked = self.sample(shapes, np.random.default_rng(self.case.seed + 2))
        host = {name: self._host[name][picked[name]] for name in arguments}
        truth, baseline = (self._named(values, direction) for values in self._reference(direction, host))
        found = []
        for name, result in results.items():
            first = result[: self._batch]
            for start in range(self._batch, result.shape[0], self._batch):
                piece = result[start : start + self._batch]
                if not torch.equal(piece, first[: piece.shape[0]]):
                    raise WrongResult(
                        f"{contestant.name} {direction} {self.case.id}: {name} differs between "
                        f"row 0 on and row {start} on, though their input is the same"
                    )
            actual = to_numpy(first)[picked[name]]
            dtype, floor = self.problem.dtype, self.operator.floor
            found.append(spec.compare(actual, truth[name], baseline[name], dtype=dtype, floor=floor, name=name))
        return max(found, key=lambda accuracy: accuracy.ratio)

    def _tile(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (min(shape[0], self._batch), *shape[1:])

    def _rotation(self, host: Mapping[str, np.ndarray], shapes: Shapes) -> list[Tensors]:
        first = {name: repeated(to_torch(array, self.device), shapes[name][0]) for name, array in host.items()}
        nbytes = sum(tensor.nbytes for tensor in first.values())
        copies = max(1, -(-ROTATION_BYTES // max(nbytes, 1)))
        return [first] + [{name: tensor.clone() for name, tensor in first.items()} for _ in range(copies - 1)]

    def _reference(self, direction: str, host: dict[str, np.ndarray]) -> tuple[Any, Any]:
        name = self.operator.name if direction == "forward" else f"{self.operator.name}_backward"
        function = getattr(reference, name)
        wide = {key: array.astype(np.float64) for key, array in host.items()}
        return function(**wide, **self.case.params), function(**host, **self.case.params)

    def _function(self, contestant: Contestant, direction: str) -> Callable[..., Any]:
        function = contestant.forward if direction == "forward" else contestant.backward
        if function is None:
            raise NotImplementedError(f"{contestant.name} has no {direction}")
        return function

    def _sets(self, direction: str) -> list[Tensors]:
        return self._inputs if direction == "forward" else self._gradient_inputs

    def _results(self, direction: str) -> tuple[spec.base.Output, ...]:
        return self.operator.outputs if direction == "forward" else self.operator.gradients

    def _named(self, results: Any, direction: str = "forward") -> dict[str, Any]:
        values = results if isinstance(results, tuple) else (results,)
        return {output.name: value for output, value in zip(self._results(direction), values)}


def generated_batch(case: spec.Case) -> int:
    """How many indices of axis 0 the generator fills in good time."""
    largest = max(case.shapes.values(), key=lambda shape: int(np.prod(shape)))
    return min(largest[0], max(1, GENERATED_ELEMENTS // int(np.prod(largest[1:]))))


def repeated(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """`tensor` repeated along axis 0 to `size` indices."""
    times = -(-size // tensor.shape[0])
    return tensor if times == 1 else tensor.repeat(times, *[1] * (tensor.dim() - 1))[:size]


def to_torch(array: np.ndarray, device: str) -> torch.Tensor:
    """A copy on `device`; bfloat16 of ml_dtypes becomes torch's."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(array).to(device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy on the host; torch's bfloat16 becomes that of ml_dtypes."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()
