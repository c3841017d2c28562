"""One word, six places: every operator of the spec has its reference, kernels, bridge, benchmark and tests.

Tests of kernels are generated from the spec, so there an operator needs no file: what pytest collects must name it.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import dualops.cuda
import dualops.reference
from benchmarks.cases import find
from dualops.spec import OPERATORS, Spec, Tag
from dualops.spec.base import Input
from tests.problems import domains

ROOT = Path(__file__).parent.parent


def missing(root: Path, op: str, *, differentiable: bool) -> list[str]:
    """The files of operator `op` that `root` lacks, or has too many."""
    single = [f"dualops/spec/{op}.py", f"dualops/reference/{op}.py", f"benchmarks/{op}.py"]
    found = [f"no {name}" for name in single if not (root / name).is_file()]
    if not (root / f"dualops/cuda/{op}.py").is_file() and not (root / f"dualops/cuda/{op}/__init__.py").is_file():
        found.append(f"no dualops/cuda/{op}.py and no package of that name")
    if not list(root.glob(f"tests/reference/**/test_{op}*.py")):
        found.append(f"no tests/reference/**/test_{op}*.py")
    if (root / f"dualops/torch_bridge/{op}.py").is_file() != differentiable:
        found.append(f"{'no' if differentiable else 'a'} dualops/torch_bridge/{op}.py")
    if differentiable and not list(root.glob(f"tests/torch_bridge/**/test_{op}*.py")):
        found.append(f"no tests/torch_bridge/**/test_{op}*.py")
    return found


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_has_its_files(op):
    found = missing(ROOT, op, differentiable=bool(OPERATORS[op].gradients))
    assert not found, "\n".join(found)


COMPLETE = [
    "dualops/spec/x.py",
    "dualops/reference/x.py",
    "dualops/cuda/x/__init__.py",
    "dualops/torch_bridge/x.py",
    "benchmarks/x.py",
    "tests/reference/test_x.py",
    "tests/torch_bridge/test_x.py",
]


def plant(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_a_complete_operator_lacks_nothing(tmp_path):
    plant(tmp_path, COMPLETE)
    assert missing(tmp_path, "x", differentiable=True) == []
    assert missing(tmp_path, "x", differentiable=False) == ["a dualops/torch_bridge/x.py"]


@pytest.mark.parametrize("left_out", COMPLETE)
def test_each_missing_file_is_found(tmp_path, left_out):
    plant(tmp_path, [name for name in COMPLETE if name != left_out])
    (complaint,) = missing(tmp_path, "x", differentiable=True)
    folder = str(Path(left_out).parent).removesuffix("/x")
    assert complaint.startswith(f"no {folder}/")


# --- generated tests of kernels ------------------------------------------------------------------


def uncovered(collected: str, spec: Spec) -> list[str]:
    """What no test of kernels is made for, given the ids that pytest collected.

    Each direction must be fuzzed, and run forward and reversed on every rung and every SIM case; a rung may leave out
    cases that it does not do.
    """
    ids = set(re.findall(r"^tests/cuda/simulator/(.+)$", collected, re.MULTILINE))
    found = []
    for backward in (False, True) if spec.gradients else (False,):
        name = f"{spec.name}_backward" if backward else spec.name
        cases = [case.id for case in spec.tagged(Tag.SIM) if case.backward or not backward]
        for order in ("forward", "reversed"):
            ran = {
                (r, c) for r in spec.rungs for c in cases if f"test_cases.py::test_case[{order}-{name}-{r}-{c}]" in ids
            }
            found += [f"{name} {order} on rung {rung}" for rung in spec.rungs if rung not in {rung for rung, _ in ran}]
            found += [f"{name} {order} on case {case}" for case in cases if case not in {case for _, case in ran}]
        if f"test_fuzz.py::test_random_problems[{name}]" not in ids:
            found.append(f"{name} fuzzed")
    return found


@cache
def collected() -> str:
    """What pytest collects of the simulator's tests, in the process of their own that they need."""
    words = ("-m", "pytest", "--collect-only", "--quiet", "tests/cuda/simulator")
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_has_its_tests_of_kernels(op):
    found = uncovered(collected(), OPERATORS[op])
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("pattern", "lost"),
    [
        (r"test_case\[reversed-softmax-naive-", ["softmax reversed on rung naive"]),
        (r"test_case\[forward-softmax-\w+-no_rows-float64", ["softmax forward on case no_rows-float64"]),
        (r"test_random_problems\[softmax_backward\]", ["softmax_backward fuzzed"]),
    ],
)
def test_what_is_not_tested_is_found(pattern, lost):
    kept = "\n".join(line for line in collected().splitlines() if not re.search(pattern, line))
    assert [told for spec in OPERATORS.values() for told in uncovered(kept, spec)] == lost


def test_an_operator_without_cases_is_found():
    bare = replace(OPERATORS["flash_attention"], cases=())
    orders = ("forward", "reversed")
    assert uncovered(collected(), bare) == [f"flash_attention {order} on rung simt" for order in orders]


# --- public functions ----------------------------------------------------------------------------

LAUNCH_OPTIONS = ("out", "kernel", "stream")


def check_signature(function: Callable, inputs: tuple[Input, ...], spec: Spec, options: tuple[str, ...]) -> None:
    """Arrays first, named as in the spec; then the spec's parameters with its defaults; then `options`, by keyword."""
    params = inspect.signature(function).parameters
    arrays, rest = [entry.name for entry in inputs], [param.name for param in spec.params]
    assert list(params) == [*arrays, *rest, *options], function
    for entry in inputs:
        assert (params[entry.name].default is None) == entry.optional, entry.name
    for param in spec.params:
        assert params[param.name].default == param.default, param.name
    for name in options:
        assert params[name].default is None, name
        assert params[name].kind is inspect.Parameter.KEYWORD_ONLY, name


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize(
    ("package", "options"), [(dualops.reference, ()), (dualops.cuda, LAUNCH_OPTIONS)], ids=["reference", "cuda"]
)
def test_public_functions_have_the_specs_signature(op: str, package: ModuleType, options: tuple[str, ...]):
    spec = OPERATORS[op]
    functions = [(op, spec.inputs)] + ([(f"{op}_backward", spec.gradient_inputs)] if spec.gradients else [])
    for name, inputs in functions:
        assert name in package.__all__
        function = getattr(package, name)
        assert callable(function)
        assert inspect.getdoc(function)
        check_signature(function, inputs, spec, options)
    assert spec.gradients or not hasattr(package, f"{op}_backward")


@pytest.mark.parametrize("op", OPERATORS)
def test_parameters_mean_the_same_positionally_in_both(op):
    kinds = []
    for package in (dualops.reference, dualops.cuda):
        params = inspect.signature(getattr(package, op)).parameters
        kinds.append([params[param.name].kind for param in OPERATORS[op].params])
    assert kinds[0] == kinds[1]


def test_every_operator_has_its_rungs():
    assert {op: tuple(rungs) for op, rungs in dualops.cuda.RUNGS.items()} == {
        op: spec.rungs for op, spec in OPERATORS.items()
    }


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_has_its_benchmark(op):
    assert inspect.isclass(find(op))


def test_every_operator_is_fuzzed():
    assert domains() == OPERATORS.keys()
