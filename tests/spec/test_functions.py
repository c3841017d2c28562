"""Users' functions: their derivatives against finite differences, what tells one from another, and what is refused."""

import linecache
import math
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from dualops.spec.attention.function import UserFunction, function_of
from tests.processes import printed
from tests.spec.calls import rows_of
from tests.user_functions import MASK, MASK_MODS, SCORE, SCORE_MODS, falling

PLACES = np.array([(0, 0, 0, 0), (1, 1, 5, 2), (0, 1, 2, 4), (1, 0, 3, 3)])  # b, h, i, j
SCORES = [0.137, 0.381, 0.557, 0.823]  # away from kinks
STEP = 1e-5

score_of, mask_of = function_of(*SCORE), function_of(*MASK)


def score_function(function: Any) -> UserFunction:
    return UserFunction(function, SCORE)


# --- derivatives -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORE_MODS)
def test_derivative_is_the_limit_of_differences(name):
    user = score_of(SCORE_MODS[name])
    derivative = user.derivative
    assert derivative.parameters == SCORE and derivative is user.derivative
    for place in PLACES:
        for score in SCORES:
            found = derivative.function(score, *place)
            values = [user.function(score + k * STEP, *place) for k in (-2, -1, 1, 2)]
            expected = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * STEP)
            # what rounding leaves of a difference of two values, and the fifth derivative times STEP**4 is far below
            largest = max(map(abs, values))
            assert found == pytest.approx(expected, abs=64 * np.finfo(float).eps * max(largest, 1) / STEP), (
                score,
                place,
            )


def test_derivative_of_a_pair_is_the_one_that_was_given():
    def twice(score, b, h, i, j):
        return 2 * score

    def wrong(score, b, h, i, j):
        return -1.0

    user = score_of((twice, wrong))
    assert user.function(3.0, 0, 0, 0, 0) == 6 and user.derivative.function(3.0, 0, 0, 0, 0) == -1
    assert user != score_of(twice) and user == score_of((twice, wrong))


def test_at_a_kink_the_slope_is_that_of_the_side_that_was_taken():
    assert score_of(lambda score, b, h, i, j: max(score, 0.0)).derivative.function(0.0, 0, 0, 0, 0) == 1
    assert score_of(lambda score, b, h, i, j: max(0.0, score)).derivative.function(0.0, 0, 0, 0, 0) == 0
    assert score_of(lambda score, b, h, i, j: abs(score)).derivative.function(0.0, 0, 0, 0, 0) == 0


def test_a_branch_that_is_not_taken_is_not_computed():
    user = score_of(lambda score, b, h, i, j: score / (i - j) if i != j else score)
    assert user.derivative.function(3.0, 0, 0, 2, 2) == 1 and user.derivative.function(3.0, 0, 0, 4, 2) == 0.5


def test_derivative_of_the_derivative():
    cube = score_of(lambda score, b, h, i, j: score**3)
    assert cube.derivative.derivative.function(2.0, 0, 0, 0, 0) == 12


def test_lines_of_the_derivative_are_those_of_the_function():
    def inverse(score, b, h, i, j):
        shifted = score - i
        return 1 / shifted

    with pytest.raises(ZeroDivisionError) as caught:
        score_of(inverse).derivative.function(2.0, 0, 0, 2, 0)
    last = caught.traceback[-1]
    assert (str(last.path), last.lineno) == (__file__, inverse.__code__.co_firstlineno + 1)  # lineno counts from 0


def unknown_call(score, b, h, i, j):
    return math.gamma(score + 1)


def attribute(score, b, h, i, j):
    return (score + 0.5).real


def many_values(score, b, h, i, j):
    values = [score, 2 * score]
    return values[i]


def inside(score, b, h, i, j):
    def twice(x):
        return 2 * x

    return twice(score)


def named(score, b, h, i, j):
    if (double := score * 2) > 1:
        return double
    return score


def calls_itself(score, b, h, i, j):
    return score if i == 0 else calls_itself(score / 2, b, h, i - 1, j)


def remainder_by_score(score, b, h, i, j):
    return 5.0 % score


def either(score, b, h, i, j):
    return score or 1.0


def helper_that_fails(x):
    return math.lgamma(x)


def unknown_in_a_helper(score, b, h, i, j):
    return helper_that_fails(score)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (unknown_call, "math.gamma(score + 1)"),
        (attribute, "(score + 0.5).real"),
        (many_values, "[score, 2 * score]"),
        (inside, "def twice(x):"),
        (named, "(double := (score * 2))"),
        (calls_itself, "calls_itself(score / 2, b, h, i - 1, j)"),
        (remainder_by_score, "5.0 % score"),
        (either, "score or 1.0"),
        (unknown_in_a_helper, "math.lgamma(x)"),
    ],
)
def test_what_has_no_known_derivative_is_said(function, text):
    user = score_of(function)  # the function itself is fine
    with pytest.raises(TypeError) as caught:
        _ = user.derivative
    message = str(caught.value)
    assert f"`{text}`" in message and f"{__file__}, line " in message
    assert f"give a pair ({function.__name__}, derivative)" in message
    line = int(message.split(", line ")[1].split(")")[0])
    assert text.split("(")[0] in Path(__file__).read_text().splitlines()[line - 1]


def made_from_text(text: str, **names: Any) -> Any:
    scope = dict(names)
    exec(compile(text, "<no file>", "exec"), scope)
    return scope["function"]


def test_a_notebook_cell_has_source():
    """What is nowhere on disk, but where Python looks for the lines of tracebacks."""
    text = "strength = 3\nfunction = lambda score, b, h, i, j: (strength\n    * score)\n"
    lines = [*text.splitlines(keepends=True)]
    linecache.cache["<cell 1>"] = (len(text), None, lines, "<cell 1>")
    scope: dict[str, Any] = {}
    exec(compile(text, "<cell 1>", "exec"), scope)
    assert score_of(scope["function"]).derivative.function(0.5, 0, 0, 0, 0) == 3


def test_without_source_there_is_no_derivative():
    user = score_of(made_from_text("def function(score, b, h, i, j): return 2 * score"))
    with pytest.raises(TypeError, match=r"function has no source: <no file> .* give a pair \(function, derivative\)"):
        _ = user.derivative


def test_a_source_that_changed_is_not_taken(tmp_path):
    path = tmp_path / "user_module.py"
    path.write_text("def function(score, b, h, i, j):\n    return 2 * score\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    path.write_text("def function(score, b, h, i, j):\n    return 3 * score\n")
    with pytest.raises(TypeError, match=r"line 1 of .*user_module.py is not what was compiled"):
        _ = score_of(scope["function"]).derivative


# --- which functions are the same --------------------------------------------------------------------

PROGRAM = """
from dualops.spec.attention.function import function_of
from tests.user_functions import MASK, MASK_MODS, SCORE, SCORE_MODS
for function in SCORE_MODS.values():
    user = function_of(*SCORE)(function)
    print(user, user.derivative)
for function in MASK_MODS.values():
    print(function_of(*MASK)(function))
"""


@pytest.mark.parametrize("seed", ["0", "1"])
def test_names_are_the_same_in_every_process(seed):
    scores = [score_of(function) for function in SCORE_MODS.values()]
    here = [f"{user} {user.derivative}" for user in scores] + [repr(mask_of(f)) for f in MASK_MODS.values()]
    assert printed("-c", PROGRAM, PYTHONHASHSEED=seed).splitlines() == here
    assert len(set(here)) == len(here)


def test_the_same_function_is_equal_to_itself():
    one, two = score_of(SCORE_MODS["closure"]), score_of(SCORE_MODS["closure"])
    assert one == two and hash(one) == hash(two) and repr(one) == repr(two)
    assert repr(one) == f"inner#{one.digest}" and len(one.digest) == 24
    assert score_of(one) is one
    assert score_of(falling(0.3)) == one  # another function, which does the same
    assert one != SCORE_MODS["closure"]


def with_default(value: Any) -> FunctionType:
    return lambda score, b, h, i, j, x=value: score


def with_variable(value: Any) -> FunctionType:
    return lambda score, b, h, i, j: score + (value is None)


def with_global(**names: Any) -> FunctionType:
    return made_from_text("def function(score, b, h, i, j):\n    return score + 0 * (G is None)", **{"G": 0, **names})


def with_code(text: str, **names: Any) -> FunctionType:
    return made_from_text(f"def function(score, b, h, i, j):\n    return {text}", **names)


def with_helper(text: str) -> FunctionType:
    scope: dict[str, Any] = {}
    exec(f"def helper(x): return {text}", scope)
    return with_code("helper(score)", helper=scope["helper"])


def with_module(value: float) -> FunctionType:
    module = ModuleType("settings")
    module.strength = value  # type: ignore[attr-defined]
    return with_code("score * settings.strength", settings=module)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (with_variable, [1, 1.0, True, "1", (1,), (1, 2), (1, (2,)), [1], 0.0, -0.0, math.nan, None, np.float32(1)]),
        (with_variable, [np.zeros(2), np.zeros(3), np.ones(2), np.zeros(2, np.float32), np.zeros((1, 2))]),
        (with_variable, [math.exp, math.log, np.exp, np.where, math, np, float, np.float32]),
        (with_default, [0.25, 0.5]),
        (falling, [0.25, 0.5]),
        (lambda value: with_global(G=value), [0.25, 0.5, 1]),
        (with_code, ["score", "score * 2", "score * 3", "score + i", "score + j", "score - j", "score in {1, 2}"]),
        (with_helper, ["x", "x + 1", "-x"]),
        (with_module, [0.25, 0.5]),
    ],
)
def test_functions_that_differ_have_different_names(make, values):
    names = [repr(score_function(make(value))) for value in values]
    assert len(set(names)) == len(values), names
    assert names == [repr(score_function(make(value))) for value in values]


def test_what_a_function_does_not_use_does_not_matter():
    assert score_function(with_global(other=1)) == score_function(with_global(other=2))


# --- what is refused ---------------------------------------------------------------------------------


class Callable:
    def __call__(self, score, b, h, i, j):
        return score


def fails_below(score, b, h, i, j):
    return deeper(i)


def deeper(i):
    return (1, 2)[i + 2]


# `test_attention_values` has more, through an operator
REFUSED = {
    TypeError: [
        (score_of, math.exp, "of type builtin_function_or_method, expected a Python function"),
        (score_of, Callable(), "of type Callable, expected a Python function"),
        (mask_of, (MASK_MODS["causal"],) * 2, r"of type tuple, expected a Python function of \(b, h, i"),
        (mask_of, lambda b, h, i, j, *, k: True, "a function with arguments that only have names"),
        (mask_of, score_of(SCORE_MODS["identity"]), r"a function of \(score, b, h, i, j\), expected a fun"),
        (score_of, (SCORE_MODS["identity"], 3), "its derivative: of type int, expected a Python function"),
    ],
    ValueError: [
        (score_of, lambda score, b, h, i, j: None, "for score=0.5, b=0, .* it gives None, expected a number"),
        (score_of, lambda score, b, h, i, j: 1j, "it gives 1j, expected a number"),
        (mask_of, lambda b, h, i, j: (i > j) * 2, "it gives np.int64.0., expected True or False"),
        (score_of, lambda score, b, h, i, j: 2 ** -(h + 1), "ValueError: Integers to negative integer powers"),
    ],
}


@pytest.mark.parametrize(("error", "domain", "value", "message"), rows_of(REFUSED))
def test_what_is_no_such_function_is_refused(error, domain, value, message):
    with pytest.raises(error, match=message) as caught:
        domain(value)
    assert type(caught.value) is error


def test_what_is_divided_by_zero_is_infinite_and_tilde_is_not():
    assert score_of(lambda score, b, h, i, j: score / (i - j))
    assert mask_of(lambda b, h, i, j: ~(i > j) & (j >= 0))


def test_an_error_of_the_function_names_its_line():
    sample = "for score=0.5, b=0, h=0, i=0, j=0 it raises IndexError: tuple index out of range "
    place = f"({__file__}, line {deeper.__code__.co_firstlineno + 1})"
    with pytest.raises(ValueError, match=r"^for score") as caught:
        score_of(fails_below)
    assert str(caught.value).startswith(sample) and str(caught.value).endswith(place)
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(ValueError, match=r"^its derivative: ") as caught:
        score_of((SCORE_MODS["identity"], fails_below))
    assert sample in str(caught.value) and str(caught.value).endswith(place)


@pytest.mark.parametrize("value", [{"a": 1}, object(), np.array([None]), [object()], Callable()])
def test_a_variable_that_no_kernel_can_have_is_refused(value):
    with pytest.raises(TypeError, match=r"its variable value is of type \w+, expected a number, a string, a tuple"):
        score_of(with_variable(value))
