"""One word, six places: every operator of the spec has its reference, kernels, bridge, benchmark and tests.

Tests of kernels and of the bridge are generated from the spec, so there an operator needs no file: what pytest collects
of kernels must name it. A variant (`spec.parent`) lives in its parent's files, and has functions, tests and a benchmark
of its own.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, get_type_hints

import pytest

import dualops.cuda
import dualops.reference
import dualops.testing.terms
from benchmarks.cases import Suite
from dualops.spec import OPERATORS, Spec, Tag
from dualops.spec.attention import Keywords, KeywordsVarlen
from dualops.spec.base import Input, Param
from dualops.spec.named import defaults_of
from dualops.spec.retention import Keywords as RetentionKeywords, KeywordsVarlen as RetentionKeywordsVarlen
from dualops.testing.terms import module_of
from tests.cuda.operators import FORWARD_ALONE
from tests.processes import printed

ROOT = Path(__file__).parent.parent


def missing(root: Path, op: str) -> list[str]:
    """The files of operator `op` that `root` lacks."""
    single = [
        f"{folder}/{op}.py" for folder in ("dualops/spec", "dualops/reference", "dualops/torch_bridge", "benchmarks")
    ]
    found = [f"no {name}" for name in single if not (root / name).is_file()]
    if not (root / f"dualops/cuda/{op}.py").is_file() and not (root / f"dualops/cuda/{op}/__init__.py").is_file():
        found.append(f"no dualops/cuda/{op}.py and no package of that name")
    if not list(root.glob(f"tests/reference/**/test_{op}*.py")):
        found.append(f"no tests/reference/**/test_{op}*.py")
    return found


@pytest.mark.parametrize("op", [op for op, spec in OPERATORS.items() if not spec.parent])
def test_every_operator_has_its_files(op):
    found = missing(ROOT, op)
    assert not found, "\n".join(found)


def test_a_variants_parent_is_an_operator_with_files():
    for op, spec in OPERATORS.items():
        assert not spec.parent or (op.startswith(f"{spec.parent}_") and not OPERATORS[spec.parent].parent), op


COMPLETE = [
    "dualops/spec/x.py",
    "dualops/reference/x.py",
    "dualops/cuda/x/__init__.py",
    "dualops/torch_bridge/x.py",
    "benchmarks/x.py",
    "tests/reference/test_x.py",
]


def plant(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.parametrize("left_out", COMPLETE)
def test_each_missing_file_is_found(tmp_path, left_out):
    plant(tmp_path, [name for name in COMPLETE if name != left_out])
    (complaint,) = missing(tmp_path, "x")
    folder = str(Path(left_out).parent).removesuffix("/x")
    assert complaint.startswith(f"no {folder}/")


# --- generated tests of kernels ------------------------------------------------------------------


def uncovered(collected: str, spec: Spec) -> list[str]:
    """What no test of kernels is made for, given the ids that pytest collected.

    Each direction must be fuzzed, and run on every SIM case in some dtype, and on every rung forward and reversed; a
    rung may leave out cases that it does not do.
    """
    ids = set(re.findall(r"^tests/cuda/simulator/(.+)$", collected, re.MULTILINE))
    found = []
    for backward in (False, True) if spec.gradients else (False,):
        name = f"{spec.name}_backward" if backward else spec.name
        cases = [case for case in spec.tagged(Tag.SIM) if case.backward or not backward]
        ran = {
            (order, rung, case.name)
            for order in ("forward", "reversed")
            for rung in spec.rungs
            for case in cases
            if f"test_cases.py::test_case[{order}-{name}-{rung}-{case.id}]" in ids
        }
        on_rungs, on_cases = {(order, rung) for order, rung, _ in ran}, {case for _, _, case in ran}
        rungs = [rung for rung in spec.rungs if (name, rung) not in FORWARD_ALONE]
        every = [(order, rung) for order in ("forward", "reversed") for rung in rungs]
        found += [f"{name} {order} on rung {rung}" for order, rung in every if (order, rung) not in on_rungs]
        found += [f"{name} on case {case}" for case in sorted({case.name for case in cases}) if case not in on_cases]
        if f"test_fuzz.py::test_random_problems[{name}]" not in ids:
            found.append(f"{name} fuzzed")
    return found


@cache
def collected() -> str:
    """What pytest collects of the simulator's tests, in the process of their own that they need."""
    words = ("-m", "pytest", "--collect-only", "--quiet", "tests/cuda/simulator")
    return printed(*words, NUMBA_ENABLE_CUDASIM="1")


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_has_its_tests_of_kernels(op):
    found = uncovered(collected(), OPERATORS[op])
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("pattern", "lost"),
    [
        (r"test_case\[reversed-softmax-naive-", ["softmax reversed on rung naive"]),
        (r"test_case\[\w+-softmax-\w+-no_rows-", ["softmax on case no_rows"]),
        (r"test_random_problems\[softmax_backward\]", ["softmax_backward fuzzed"]),
    ],
)
def test_what_is_not_tested_is_found(pattern, lost):
    kept = "\n".join(line for line in collected().splitlines() if not re.search(pattern, line))
    assert [missing for spec in OPERATORS.values() for missing in uncovered(kept, spec)] == lost


# --- public functions ----------------------------------------------------------------------------

# TypedDicts of `**options`: what type checkers know of them
KEYWORDS = {
    "flash_attention": Keywords,
    "flash_attention_varlen": KeywordsVarlen,
    "retention": RetentionKeywords,
    "retention_varlen": RetentionKeywordsVarlen,
}
PACKAGES = (dualops.reference, dualops.cuda)

LAUNCH_OPTIONS = ("out", "kernel", "stream")


def check_signature(
    function: Callable, inputs: Sequence[Input], accepted: Sequence[Param], options: tuple[str, ...]
) -> None:
    """Arrays that every call has come first; then the others and the parameters, with the spec's defaults, in any
    order; then `options`, by keyword.
    """
    params = inspect.signature(function).parameters
    needed = [entry.name for entry in inputs if not entry.optional]
    defaults: dict[str, Any] = {entry.name: None for entry in inputs if entry.optional}
    defaults |= {param.name: param.default for param in accepted}
    names = list(params)
    assert names[: len(needed)] == needed, function
    assert sorted(names[len(needed) : len(names) - len(options)]) == sorted(defaults), function
    assert names[len(names) - len(options) :] == list(options), function
    for name in needed:
        assert params[name].default is inspect.Parameter.empty, name
    for name, default in defaults.items():
        assert type(params[name].default) is type(default) and params[name].default == default, name
    for name in options:
        assert params[name].default is None, name
        assert params[name].kind is inspect.Parameter.KEYWORD_ONLY, name


def functions_of(spec: Spec) -> list[tuple[str, tuple[Input, ...], tuple[Param, ...]]]:
    """Name, inputs and parameters of each of its public functions."""
    found = [(spec.name, spec.inputs, spec.params)]
    if spec.gradients:
        found.append((f"{spec.name}_backward", spec.gradient_inputs, spec.params + spec.gradient_params))
    return found


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize(
    ("package", "options"), [(dualops.reference, ()), (dualops.cuda, LAUNCH_OPTIONS)], ids=["reference", "cuda"]
)
def test_public_functions_have_the_specs_signature(op: str, package: ModuleType, options: tuple[str, ...]):
    spec = OPERATORS[op]
    for name, inputs, params in functions_of(spec):
        assert name in package.__all__
        function = getattr(package, name)
        assert callable(function)
        assert inspect.getdoc(function)
        check_signature(function, inputs, params, options)
    assert spec.gradients or not hasattr(package, f"{op}_backward")


@pytest.mark.parametrize("op", KEYWORDS)
def test_options_by_name_are_the_specs(op: str):
    """With all that the operator's own function writes out, but for what each of the others has written itself."""
    options = get_type_hints(KEYWORDS[op])
    assert options.keys() == defaults_of(OPERATORS[op]).keys() - {
        "max_seqlen",
        "max_seqlen_q",
        "max_seqlen_k",
        "cu_seqlens_k",
    }


# all but the operators' own functions
BY_NAME = [(package, op, backward) for op in KEYWORDS for package in PACKAGES for backward in (False, True)]
BY_NAME = [each for each in BY_NAME if OPERATORS[each[1]].parent or each[2]]
by_name = pytest.mark.parametrize(
    ("package", "op", "backward"), BY_NAME, ids=lambda each: getattr(each, "__name__", each)
)


@by_name
def test_an_option_that_is_none_is_refused_before_anything_else(package: ModuleType, op: str, backward: bool):
    spec, name = OPERATORS[op], f"{op}_backward" if backward else op
    needed = [entry.name for entry in (spec.gradient_inputs if backward else spec.inputs) if not entry.optional]
    with pytest.raises(TypeError, match=rf"^{name}: unknown argument windw, expected one of .*\bscale\b"):
        getattr(package, name)(*needed, scale=0.5, windw=(3, None))


@by_name
def test_a_docstring_lists_the_options(package: ModuleType, op: str, backward: bool):
    listed = (inspect.getdoc(getattr(package, f"{op}_backward" if backward else op)) or "").partition("\noptions:\n")[2]
    options = [line.partition(":")[0].partition(" ")[0] for line in listed.splitlines()]
    assert sorted(options) == sorted(get_type_hints(KEYWORDS[op]))


WRONG_SIGNATURES = [
    lambda y, x, *, z=None, p=1.0, out=None: None,
    lambda x, y=None, *, z=None, p=1.0, out=None: None,
    lambda x, y, *, p=1.0, out=None: None,
    lambda x, y, *, z=0, p=1.0, out=None: None,
    lambda x, y, *, z=None, p=1, out=None: None,
    lambda x, y, *, z=None, out=None: None,
    lambda x, y, *, z=None, p=1.0, more=0, out=None: None,
    lambda x, y, *, z=None, p=1.0: None,
    lambda x, y, *, out=None, z=None, p=1.0: None,
    lambda x, y, z=None, p=1.0, out=None: None,
]


def check_sample(function: Callable) -> None:
    inputs = Input("x", ("N",)), Input("z", ("N",), optional=True), Input("y", ("N",))
    check_signature(function, inputs, (Param("p", 1.0, float, "a number"),), ("out",))


@pytest.mark.parametrize("wrong", WRONG_SIGNATURES, ids=range(len(WRONG_SIGNATURES)))
def test_a_wrong_signature_is_found(wrong):
    with pytest.raises(AssertionError):
        check_sample(wrong)


@pytest.mark.parametrize("op", OPERATORS)
def test_arguments_mean_the_same_positionally_in_both(op):
    for name, _, _ in functions_of(OPERATORS[op]):
        positional = []
        for package in (dualops.reference, dualops.cuda):
            params = inspect.signature(getattr(package, name)).parameters.values()
            positional.append([param.name for param in params if param.kind is param.POSITIONAL_OR_KEYWORD])
        assert positional[0] == positional[1], name


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_has_its_benchmark(op):
    module = import_module(f"benchmarks.{OPERATORS[op].parent or op}")
    suites = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Suite)]
    (found,) = [suite for suite in suites if suite.operator.name == op]
    assert [[case.id for case in OPERATORS[op].tagged(Tag.BENCH)]] == found.params


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_every_operator_is_documented(page):
    text = (ROOT / page).read_text("utf-8")
    lines = text.splitlines() if page == "CHANGELOG.md" else re.findall(r"^(\|(?: `\w+`,?)+ \|)", text, re.MULTILINE)
    named = set(re.findall(r"\w+", "\n".join(lines)))
    assert OPERATORS.keys() <= named, f"{page} does not name {', '.join(OPERATORS.keys() - named)}"


def test_nothing_is_left_to_be_written():
    """`python -m dualops new` leaves the word where something is missing."""
    sources = [*ROOT.glob("dualops/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/reference/*.py")]
    left = [
        f"{path.relative_to(ROOT)}, line {number}: {line.strip()}"
        for path in [*sources, ROOT / "README.md", ROOT / "CHANGELOG.md"]
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(r"\bWRITE\b", line) and path.name != "new.py"
    ]
    assert not left, "\n".join(left)


# --- what the record says for tests --------------------------------------------------------------


def unsaid(spec: Spec) -> list[str]:
    """What the fuzzer and the rule of accuracy can't know of an operator, or what is stated twice."""
    found = []
    if spec.draw is None:
        found.append(f"{spec.name}: no draw in its Spec, expected a function that makes a random problem")
    module = module_of(spec)
    for field, function in (("terms", "result_terms"), ("gradient_terms", "gradient_terms")):
        if getattr(spec, field) and hasattr(module, function):
            assert module is not None
            found.append(f"{spec.name}: {field} in its Spec and {function} in {module.__name__}, expected one of them")
    return found


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_says_what_tests_need(op):
    found = unsaid(OPERATORS[op])
    assert not found, "\n".join(found)


def test_an_operator_without_draw_is_found():
    assert unsaid(replace(OPERATORS["softmax"], draw=None)) == [
        "softmax: no draw in its Spec, expected a function that makes a random problem"
    ]


@pytest.mark.parametrize(("op", "parent"), [("matmul", "matmul"), ("retention_varlen", "retention")])
def test_terms_that_are_stated_twice_are_found(op, parent):
    terms = OPERATORS["rms_norm"].terms
    message = f"{op}: {{}} in its Spec and {{}} in dualops.testing.terms.{parent}, expected one of them"
    assert unsaid(replace(OPERATORS[op], terms=terms, gradient_terms=terms)) == [
        message.format("terms", "result_terms"),
        message.format("gradient_terms", "gradient_terms"),
    ]


def test_every_module_of_terms_is_an_operators():
    modules = {module.name for module in iter_modules(dualops.testing.terms.__path__)}
    assert modules <= OPERATORS.keys()
