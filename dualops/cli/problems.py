"""What the demo runs: problems of its own, made from the specs, or the user's arrays out of a file."""

from __future__ import annotations

import ast
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import reference
from ..spec import OPERATORS, ArrayMeta, Case, Problem, Spec, Tag
from ..spec.base import FLOATS, Cost, Input, Output, contiguous_strides, numpy_dtype
from .errors import CommandError

Arrays = dict[str, np.ndarray]

SHOWN_DTYPES = ("float32", "bfloat16")


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
        return getattr(reference, f"{self.name}_blocked", self.reference)

    def bind(self, metas: Mapping[str, ArrayMeta], params: Mapping[str, Any]) -> Problem:
        return self.spec.bind_backward(metas, params) if self.backward else self.spec.bind(metas, params)

    def named(self, results: Any) -> Arrays:
        """The results of a call by the names of the spec; those that the call did not ask for are left out."""
        returned = results if isinstance(results, tuple) else (results,)
        return {output.name: result for output, result in zip(self.outputs, returned)}


def tasks() -> dict[str, Task]:
    """Every landed operator, forward and gradient, in the order in which the demo shows them."""
    both = [Task(spec, backward) for spec in OPERATORS.values() for backward in (False, True)]
    return {task.name: task for task in both if not task.backward or task.spec.backward_cost is not None}


@dataclass(frozen=True)
class Job:
    """One row of the demo's table: a problem, and how to come by its arrays."""

    task: Task
    title: str
    problem: Problem
    params: Mapping[str, Any]
    load: Callable[[], Arrays]

    @property
    def returned(self) -> dict[str, ArrayMeta]:
        """The results of the call. One that is returned on request has a parameter: lse and `return_lse`."""
        outputs = self.problem.outputs(self.task.outputs)
        return {name: meta for name, meta in outputs.items() if self.problem.params.get(f"return_{name}", True)}

    @property
    def flops(self) -> int:
        return self.task.cost.flops(self.problem)

    @property
    def bytes_moved(self) -> int:
        """What must be read and written at the least."""
        return self.task.cost.bytes_read(self.problem) + self.task.cost.bytes_written(self.problem)

    @property
    def compute_bound(self) -> bool:
        """Whether arithmetic, not memory, is what a good kernel waits for: tens of operations a byte, on any GPU."""
        return self.flops > 20 * self.bytes_moved

    def shape(self, separator: str = ", ") -> str:
        """The shapes of the inputs, those that are equal said once: "q 1×2×19×16, k v 1×1×37×16"."""
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, meta in self.problem.arrays.items():
            by_shape.setdefault(meta.shape, []).append(name)
        return separator.join(f"{' '.join(names)} {'×'.join(map(str, shape))}" for shape, names in by_shape.items())


def own_jobs(
    task: Task, place: str, params: Mapping[str, Any], dtype: str | None, fits: Callable[[Job], bool]
) -> list[Job]:
    """The demo's own problems: for each dtype the largest case that the place is meant for and that `fits`.

    `params` go before those of the case. Raises CommandError where nothing fits, or a parameter is wrong.
    """
    jobs = []
    for name in (dtype,) if dtype else SHOWN_DTYPES:
        cases = [case for case in task.spec.tagged(_TAGS[place]) if case.dtype == name]
        if params:
            cases = [replace(case, params={**case.params, **params}) for case in cases]
        found = [_of_case(task, case) for case in cases if case.backward or not task.backward]
        possible = [job for job in found if fits(job)]
        if possible:
            jobs.append(max(possible, key=lambda job: job.flops))
    if not jobs:
        wanted = dtype or " or ".join(SHOWN_DTYPES)
        raise CommandError(f"{task.name} has no {_TAGS[place]} case in {wanted}; bring arrays with --input")
    return jobs


_TAGS = {"gpu": Tag.DEMO, "simulator": Tag.SIM, "reference": Tag.TEST}


def _of_case(task: Task, case: Case) -> Job:
    try:
        metas = {name: _meta(shape, case.dtype) for name, shape in case.shapes.items()}
        if task.backward:
            known = {**metas, **task.spec.bind(metas, case.params).outputs()}
            metas = {given.name: known.get(given.name) or known[given.name.removeprefix("d")] for given in task.inputs}
        problem = task.bind(metas, case.params)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None
    return Job(task, case.id, problem, case.params, lambda: case_arrays(task, case))


def _meta(shape: Sequence[int], dtype: str) -> ArrayMeta:
    return ArrayMeta(tuple(shape), dtype, contiguous_strides(shape), "cpu", 0)


def case_arrays(task: Task, case: Case) -> Arrays:
    """The inputs of a case. A gradient's are those that forward saved, and normal values for what comes in."""
    rng = np.random.default_rng(case.seed)
    arrays = task.spec.generate(task.spec, case, rng)
    if not task.backward:
        return arrays
    forward = Task(task.spec, backward=False)
    known = {**arrays, **forward.named(forward.reference(**arrays, **case.params))}
    for given in task.inputs:
        if given.name not in known:  # dy: as y, but nobody's result
            like = known[given.name.removeprefix("d")]
            known[given.name] = rng.standard_normal(like.shape, dtype=np.float32).astype(like.dtype)
    return {given.name: known[given.name] for given in task.inputs}


def user_job(task: Task, path: Path, params: Mapping[str, Any], dtype: str | None) -> Job:
    """The problem that the arrays of an .npz file state: its keys are the spec's input names."""
    arrays = read_npz(path, task, dtype)
    try:
        problem = task.bind({name: ArrayMeta.of_numpy(array) for name, array in arrays.items()}, params)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CommandError(f"{path}: {error}") from None
    return Job(task, path.name, problem, params, lambda: arrays)


def read_npz(path: Path, task: Task, dtype: str | None) -> Arrays:
    """The inputs of `task` from an .npz file, in `dtype` if one is given.

    .npy has no bfloat16: with dtype "bfloat16" arrays of uint16 are taken as the bits of bfloat16 numbers. Other floats
    are rounded to `dtype`. Raises CommandError for a file that can't be read, a missing or a superfluous array.
    """
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise CommandError(f"{path} holds a single array, expected an .npz file with {_wanted(task)}")
        with file:
            arrays = {name: file[name] for name in file.files}
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        raise CommandError(f"{path} is no .npz file of plain arrays, expected one with {_wanted(task)}") from None
    missing = [given.name for given in task.inputs if given.name not in arrays and not given.optional]
    superfluous = sorted(arrays.keys() - {given.name for given in task.inputs})
    if missing or superfluous:
        raise CommandError(f"{path} has the arrays {', '.join(arrays) or '(none)'}, expected {_wanted(task)}")
    return {name: _in_dtype(array, dtype).copy(order="C") for name, array in arrays.items()}


def _wanted(task: Task) -> str:
    return ", ".join(f"{given.name} (optional)" if given.optional else given.name for given in task.inputs)


def _in_dtype(array: np.ndarray, dtype: str | None) -> np.ndarray:
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if dtype == "bfloat16" and array.dtype in (np.dtype(np.uint16), np.dtype("V2")):
        return array.view(numpy_dtype("bfloat16"))
    if dtype and array.dtype.kind == "f":
        return array.astype(numpy_dtype(dtype))
    return array


def write_npz(path: Path, results: Arrays) -> None:
    """Save results by their names in the spec; bfloat16 as the uint16 of its bits, for .npy has no bfloat16."""
    plain: dict[str, Any] = {
        name: x.view(np.uint16) if x.dtype == numpy_dtype("bfloat16") else x for name, x in results.items()
    }
    try:
        with path.open("wb") as file:  # by name alone, savez would add a suffix
            np.savez(file, **plain)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None


def parse_params(pairs: Sequence[str], task: Task) -> dict[str, Any]:
    """`["causal=True", "scale=0.1"]` as parameters; what is no Python literal is taken as a string.

    Raises CommandError for a pair without "=", an unknown name, or a name given twice.
    """
    known = [param.name for param in task.spec.params]
    params: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in known or name in params:
            raise CommandError(f"--param {pair}: expected name=value, each once, of {', '.join(known) or 'none'}")
        try:
            params[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            params[name] = text
    return params


def as_float64(arrays: Arrays) -> Arrays:
    """The same numbers in float64; indices and masks stay what they are."""
    return {name: x.astype(np.float64) if x.dtype.name in FLOATS else x for name, x in arrays.items()}
