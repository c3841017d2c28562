"""One BENCH case on a device: its data, the calls that are timed, and the check that comes first.

Data. The spec's generator fills the case. If that would take minutes, and all inputs except weights share axis 0, it
fills only the first few rows, which then repeat along axis 0 (a batch axis in every such BENCH case). `Case.orders` has
the order of axes in memory; gradients of results have the order of the inputs that the results are like. dualops gives
repeated rows the same bits. So a check of the first rows, and a comparison of all others with them, covers the whole
result. For a peer, which may add in any order, only the first rows are checked.

Rotation. Calls use copies of the data in turn, and results are kept until their copy's next turn. So between two uses
of the same memory, more than four times the L2 cache is touched. One additional copy is never passed to a call: some
contestants overwrite their inputs, and the next one must get the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from .contestant import Contestant
from .samples import Part, Sample, Selection, Shapes, shared
from .tree import reference, spec, terms, testing, truth
from .work import bind, gradient_inputs

GENERATED_ELEMENTS = 2**24  # of the largest input
ROTATION_BYTES = 256 * 2**20  # more than four times 60 MB, the largest L2 there is

Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]


class Rotation(NamedTuple):
    """Copies of the same arrays, which calls use in turn, and one that no call gets."""

    sets: list[Tensors]
    pristine: Tensors


class WrongResult(AssertionError):
    """The call that was to be timed gives a wrong result."""


class Workload:
    """A case of an operator, laid out on `device`."""

    def __init__(self, operator: spec.Spec, case: spec.Case, sample: Sample, device: str = "cuda"):
        self.operator, self.case, self.sample, self.device = operator, case, sample, device
        self.problem = bind(operator, case)
        self._shared = shared(operator)
        self._batch = generated_batch(operator, case)
        shapes = {name: self._tile(name, shape) for name, shape in case.shapes.items()}
        self._host = operator.generate(operator, replace(case, shapes=shapes), np.random.default_rng(case.seed))
        self._rotations = {"forward": self._rotation(self._host, case.shapes)}
        self._gradient_host: Arrays = {}
        self._expected: dict[str, tuple[Selection, Arrays, Arrays]] = {}

    def prepare_backward(self, contestant: Contestant) -> None:
        """Make the arrays of backward: the results of this contestant's forward, and random incoming gradients.

        Results that forward returns only on request are requested, since backward needs them.
        """
        requests = self.operator.requests
        returned = contestant.forward(**self._sets("forward")[0], **requests)
        names = self.operator.bind(self.problem.arrays, {**self.case.params, **requests}).outputs()
        results = dict(zip(names, _tuple(returned)))
        rng = np.random.default_rng(self.case.seed + 1)
        shapes, host = {}, {}
        for wanted in gradient_inputs(self.operator, self.case):
            name = wanted.name
            if name in self.case.shapes and self.operator.saved_instead.get(name) not in results:
                shapes[name], host[name] = self.case.shapes[name], self._host[name]
                continue
            result = results[self.operator.saved_instead.get(name, name.removeprefix("d"))]
            shapes[name] = tuple(result.shape)
            host[name] = testing.to_numpy(result[: self._batch])
            if name not in results and name not in self.case.shapes:  # the gradient of a result
                host[name] = rng.standard_normal(host[name].shape, np.float32).astype(host[name].dtype)
        self._gradient_host = host
        self._rotations["backward"] = self._rotation(host, shapes)
        self._expected.pop("backward", None)

    def arguments(self, direction: str) -> Arrays:
        """Return the arguments of a direction's calls, on the host, as far as they were generated."""
        return self._host if direction == "forward" else self._gradient_host

    def call(self, contestant: Contestant, direction: str) -> Callable[[], object]:
        """Return a function without arguments that calls the contestant, each time on the next copy of the data."""
        function, sets = self._function(contestant, direction), self._sets(direction)
        held: list[object] = [None] * len(sets)
        turn = -1

        def call() -> object:
            nonlocal turn
            turn = (turn + 1) % len(sets)
            held[turn] = function(**sets[turn])
            return held[turn]

        return call

    def restore(self, direction: str) -> None:
        """Restore the values of every copy of the data, after a contestant that may have overwritten them."""
        rotation = self._rotations[direction]
        for arrays in rotation.sets:
            for name, tensor in arrays.items():
                tensor.copy_(rotation.pristine[name])

    def lone_call(self, contestant: Contestant, direction: str) -> Callable[[], object]:
        """Return a function without arguments that calls the contestant on the same data, and keeps no result."""
        return partial(self._function(contestant, direction), **self._sets(direction)[0])

    def check(self, contestant: Contestant, direction: str, *, same_bits: bool = True) -> spec.Accuracy:
        """Compare a sample of the result with float64 truth, and the other rows with the rows that they repeat.

        A contestant may return less than dualops does (lse). same_bits: False for one that adds in any order; then only
        the generated rows of its result are checked. Returns the worst accuracy over the results. Raises WrongResult if
        repeated rows differ.
        """
        returned = self._function(contestant, direction)(**self._unspoiled(direction))
        results = dict(zip(self._results(direction), _tuple(returned)))
        picked, truths, baselines = self.expected(direction)
        actual = {}
        for name, result in results.items():
            repeats = self._batch is not None and name not in self._shared
            if repeats and same_bits:
                self._require_repeats(contestant, direction, name, result)
            first = result[: self._batch] if repeats else result
            actual[name] = testing.to_numpy(first)[picked[name]]
        cancelled = partial(self._terms, direction)
        found = truth.held_first_without_terms(self.operator, self.problem.dtype, actual, truths, baselines, cancelled)
        return max(found.values(), key=lambda accuracy: accuracy.ratio)

    def expected(self, direction: str) -> tuple[Selection, Arrays, Arrays]:
        """Return the indices of each result's sample, and its truth and baseline."""
        if direction not in self._expected:
            picked, truths, baselines = Selection(), Arrays(), Arrays()
            for part in self.parts(direction):
                host = self._sampled(part, direction)
                function = partial(self.reference(direction), **part.params)
                both = truth.truth(self.operator, function, host, {}), function(**host)
                for found, results in zip((truths, baselines), both):
                    found |= self._of_all_rows(dict(zip(part.results, _tuple(results))))
                picked |= {name: part.picked[name] for name in part.results}
            self._expected[direction] = picked, truths, baselines
        return self._expected[direction]

    def _terms(self, direction: str) -> dict[str, float]:
        """Return the terms of the samples' results (`spec.compare`); the largest, if a result has several samples."""
        backward, largest = direction == "backward", Counter[str]()
        for part in self.parts(direction):
            host = self._sampled(part, direction)
            problem = truth.bind(self.operator, host, {**self.case.params, **part.params}, backward)
            largest |= Counter(terms.terms_of(self.operator, backward)(host, problem))
        return dict(largest)

    def _sampled(self, part: Part, direction: str) -> Arrays:
        """Return the arguments of a sample's reference."""
        found = {name: array[part.picked[name]] for name, array in self.arguments(direction).items()}
        found.update(part.arrays)
        return {name: np.asarray(array) for name, array in found.items()}  # a seed too, which is then a number

    def parts(self, direction: str) -> list[Part]:
        """Return the samples for the results of a direction, each with some of the results."""
        arguments, results = self.arguments(direction), self._results(direction)
        shapes = {name: array.shape for name, array in arguments.items()}
        shapes |= {name: self._tile(name, meta.shape) for name, meta in results.items()}
        sample = self.sample(self.problem, shapes, np.random.default_rng(self.case.seed + 2))
        return sample if isinstance(sample, list) else [Part(tuple(results), sample, {})]

    def _of_all_rows(self, results: Arrays) -> Arrays:
        """Return the results of the generated rows; sums over rows are multiplied by the number of repeats."""
        if self._batch is None:
            return results
        times = self.problem.arrays[self.operator.inputs[0].name].shape[0] // self._batch
        return {name: x * np.float64(times) if name in self._shared else x for name, x in results.items()}

    def reference(self, direction: str) -> Callable[..., Any]:
        """Return NumPy's function of the case."""
        name = self.operator.name if direction == "forward" else f"{self.operator.name}_backward"
        return partial(getattr(reference, name), **self.case.params)

    def _require_repeats(self, contestant: Contestant, direction: str, name: str, result: torch.Tensor) -> None:
        """Raise WrongResult unless all rows of a result repeat the generated ones."""
        assert self._batch is not None
        first = result[: self._batch]
        for start in range(self._batch, result.shape[0], self._batch):
            piece = result[start : start + self._batch]
            if not torch.equal(piece, first[: piece.shape[0]]):
                raise WrongResult(
                    f"{contestant.name} {direction} {self.case.id}: {name} differs between "
                    f"row 0 on and row {start} on, though their input is the same"
                )

    def _tile(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._batch is None or not shape or name in self._shared:
            return shape
        return min(shape[0], self._batch), *shape[1:]

    def _rotation(self, host: Mapping[str, np.ndarray], shapes: Shapes) -> Rotation:
        like = {f"{d}{output.name}": output.like for output in self.operator.outputs for d in ("", "d")}
        orders = {name: self.case.orders.get(like.get(name, name)) for name in host}
        first = {name: to_torch(array, self.device) for name, array in host.items()}
        if self._batch is not None:
            rows = {name: shape[0] for name, shape in shapes.items() if shape and name not in self._shared}
            first = {name: repeated(x, rows[name]) if name in rows else x for name, x in first.items()}
        first = {name: in_order(tensor, orders[name]) for name, tensor in first.items()}  # repeat makes it row-major
        nbytes = sum(tensor.nbytes for tensor in first.values())
        copies = max(1, -(-ROTATION_BYTES // max(nbytes, 1)))
        pristine, *more = ({name: tensor.clone() for name, tensor in first.items()} for _ in range(copies))
        return Rotation([first, *more], pristine)

    def _function(self, contestant: Contestant, direction: str) -> Callable[..., Any]:
        function = contestant.forward if direction == "forward" else contestant.backward
        if function is None:
            raise NotImplementedError(f"{contestant.name} has no {direction}")
        return function

    def _unspoiled(self, direction: str) -> Tensors:
        """Return the first copy of the data, with copies of the arrays that a call overwrites."""
        overwritten = self.operator.updates.values() if direction == "forward" else ()
        return {name: x.clone() if name in overwritten else x for name, x in self._sets(direction)[0].items()}

    def _sets(self, direction: str) -> list[Tensors]:
        return self._rotations[direction].sets

    def _results(self, direction: str) -> dict[str, spec.ArrayMeta]:
        which = self.operator.outputs if direction == "forward" else self.operator.gradients
        return bind(self.operator, self.case, direction).outputs(which)


def _tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def generated_batch(operator: spec.Spec, case: spec.Case) -> int | None:
    """Return how many indices of axis 0 the generator fills within seconds; None if it fills all.

    All are filled if inputs differ in axis 0: not all of them then have an axis of rows that may repeat. So are all of
    matrices, whose axes 0 may have equal sizes and different meanings. Weights belong to all rows, and so does a number
    without axes, unless it is a seed.
    """
    weights = shared(operator) & case.shapes.keys()
    of_rows = {name: shape for name, shape in case.shapes.items() if name not in weights}
    shapes = {shape for name, shape in of_rows.items() if shape or name == "seed"}
    if len({(len(shape), shape[:1]) for shape in shapes}) > 1:
        return None
    shape = max(shapes, key=prod)
    batch = max(1, GENERATED_ELEMENTS // int(np.prod(shape[1:])))
    if batch >= shape[0] or not rows_stand_alone(operator, case, of_rows, batch):
        return None
    # sums over all rows, gradients of weights, are then a whole number of sums over the generated ones
    return next(count for count in range(batch, 0, -1) if shape[0] % count == 0) if weights else batch


def first_rows(shapes: Shapes, count: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the first `count` indices of axis 0, for arrays with axes."""
    return {name: (min(count, shape[0]), *shape[1:]) if shape else shape for name, shape in shapes.items()}


def rows_stand_alone(operator: spec.Spec, case: spec.Case, of_rows: Shapes, count: int) -> bool:
    """Whether the first rows of these inputs give the first rows of the results. Matrices do not."""
    part = replace(case, shapes={**case.shapes, **first_rows(of_rows, count)})
    try:
        whole, found = ({name: x.shape for name, x in bind(operator, c).outputs().items()} for c in (case, part))
    except ValueError:  # they are not a valid problem
        return False
    return found == first_rows(whole, count)


def repeated(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat `tensor` along axis 0 to `size` indices."""
    times = -(-size // tensor.shape[0])
    return tensor if times == 1 else tensor.repeat(times, *[1] * (tensor.dim() - 1))[:size]


def in_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Return the same tensor with its axes in memory in this order, from the slowest to the fastest."""
    if order is None:
        return tensor
    return tensor.permute(order).contiguous().permute([order.index(axis) for axis in range(len(order))])


def to_torch(array: np.ndarray, device: str) -> torch.Tensor:
    """Copy to `device`; bfloat16 of ml_dtypes becomes torch's."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(array).to(device)
