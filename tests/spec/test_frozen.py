"""Users' functions keep the variables of the moment when they were given: cells, globals, arrays and all else."""

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from dualops.spec.attention import frozen as module
from dualops.spec.attention.frozen import frozen, is_unchanged
from dualops.spec.attention.function import UserFunction, function_of
from tests.user_functions import SCORE, SCORE_MODS

AT = (2.0, 0, 1, 2, 3)  # score, b, h, i, j
score_of = function_of(*SCORE)


class Pair(NamedTuple):
    slope: float
    table: Any = None


@dataclass
class Settings:
    slope: float


class Change(NamedTuple):
    """A function, and what changes a variable that it reads."""

    function: FunctionType
    change: Callable[[], Any]


def cell() -> Change:
    slope = 2.0

    def change() -> None:
        nonlocal slope
        slope = 5.0

    return Change(lambda score, b, h, i, j: score * slope, change)


def made(text: str, **names: Any) -> FunctionType:
    scope = dict(names)
    exec(f"def function(score, b, h, i, j):\n    return {text}", scope)
    return scope["function"]


def global_number() -> Change:
    function = made("score * SLOPE", SLOPE=2.0)
    return Change(function, lambda: function.__globals__.update(SLOPE=5.0))


def global_that_hides_pythons_own() -> Change:
    function = made("abs(score) * 2.0")
    return Change(function, lambda: function.__globals__.update(abs=math.exp))


def array(table: np.ndarray, place: Any) -> Callable[[], Change]:
    def make() -> Change:
        own = table.copy()

        def change() -> None:
            own[place] = 5.0

        return Change(lambda score, b, h, i, j: score * own[place], change)

    return make


def list_of_numbers() -> Change:
    slopes = [1.0, 2.0]
    return Change(lambda score, b, h, i, j: score * slopes[h], lambda: slopes.__setitem__(1, 5.0))


def tuple_with_an_array() -> Change:
    pair = Pair(1.0, np.array([1.0, 2.0]))
    return Change(lambda score, b, h, i, j: score * pair.table[h] * pair.slope, lambda: pair.table.fill(5.0))


def default() -> Change:
    def function(score, b, h, i, j, slope=2.0):
        return score * slope

    return Change(function, lambda: setattr(function, "__defaults__", (5.0,)))


def default_by_name() -> Change:
    def function(score, b, h, i, j, *, slope=2.0):
        return score * slope

    return Change(function, lambda: setattr(function, "__kwdefaults__", {"slope": 5.0}))


def object_s_attribute() -> Change:
    settings = Settings(2.0)
    return Change(lambda score, b, h, i, j: score * settings.slope, lambda: setattr(settings, "slope", 5.0))


def object_by_another_name() -> Change:
    settings = Settings(2.0)

    def function(score, b, h, i, j):
        own = settings
        return score * own.slope

    return Change(function, lambda: setattr(settings, "slope", 5.0))


def object_in_a_tuple() -> Change:
    layers = (Settings(7.0), Settings(2.0))
    return Change(lambda score, b, h, i, j: score * layers[h].slope, lambda: setattr(layers[1], "slope", 5.0))


def object_as_default() -> Change:
    settings = Settings(2.0)

    def function(score, b, h, i, j, settings=settings, *, m=math):
        return score * settings.slope * m.cos(0.0)

    return Change(function, lambda: setattr(settings, "slope", 5.0))


def attribute_of_an_attribute() -> Change:
    outer = SimpleNamespace(inner=SimpleNamespace(table=np.array([1.0, 2.0])))
    return Change(lambda score, b, h, i, j: score * outer.inner.table[h], lambda: outer.inner.table.fill(5.0))


def module_s_attribute() -> Change:
    settings = ModuleType("settings")
    settings.slope = 2.0  # type: ignore[attr-defined]
    return Change(made("score * settings.slope", settings=settings), lambda: setattr(settings, "slope", 5.0))


def class_s_attribute() -> Change:
    class Steep:
        slope = 2.0

    return Change(lambda score, b, h, i, j: score * Steep.slope, lambda: setattr(Steep, "slope", 5.0))


def helper_s_variable() -> Change:
    slope = 2.0

    def helper(score):
        return score * slope

    def change() -> None:
        nonlocal slope
        slope = 5.0

    return Change(lambda score, b, h, i, j: helper(score), change)


def another_helper() -> Change:
    def helper(score):
        return score * 2.0

    def change() -> None:
        nonlocal helper
        helper = lambda score: score * 5.0  # noqa: E731

    return Change(lambda score, b, h, i, j: helper(score), change)


def helpers_that_call_one_another() -> Change:
    scope: dict[str, Any] = {"SLOPE": 2.0}
    exec(
        "def even(n): return SLOPE if n == 0 else odd(n - 1)\n"
        "def odd(n): return 0 if n == 0 else even(n - 1)\n"
        "def function(score, b, h, i, j): return score * even(i)",
        scope,
    )
    return Change(scope["function"], lambda: scope.update(SLOPE=5.0))


def function_inside() -> Change:
    slope = 2.0

    def function(score, b, h, i, j):
        return (lambda x: x * slope)(score)

    def change() -> None:
        nonlocal slope
        slope = 5.0

    return Change(function, change)


def code() -> Change:
    def function(score, b, h, i, j):
        return score * 2.0

    def other(score, b, h, i, j):
        return score * 5.0

    return Change(function, lambda: setattr(function, "__code__", other.__code__))


CHANGES = (
    cell,
    global_number,
    global_that_hides_pythons_own,
    array(np.array([1.0, 2.0]), 1),
    array(np.array(2.0), ()),
    array(np.full((2, 6), 2.0)[:, ::3], (1, 1)),
    list_of_numbers,
    tuple_with_an_array,
    default,
    default_by_name,
    object_s_attribute,
    object_by_another_name,
    object_in_a_tuple,
    object_as_default,
    attribute_of_an_attribute,
    module_s_attribute,
    class_s_attribute,
    helper_s_variable,
    another_helper,
    helpers_that_call_one_another,
    function_inside,
    code,
)
# for want of source, or since it has statements that have none
WITHOUT_DERIVATIVE = (
    global_number,
    global_that_hides_pythons_own,
    module_s_attribute,
    helpers_that_call_one_another,
    function_inside,
)


@pytest.mark.parametrize("make", CHANGES)
def test_a_later_change_makes_another_function(make):
    function, change = make()
    before = score_of(function)
    assert score_of(function) is before and before.function(*AT) == 4
    change()
    after = score_of(function)
    assert before.function(*AT) == 4 and before != after
    assert after.function(*AT) == function(*AT) != 4
    assert score_of(function) is after


@pytest.mark.parametrize("make", [make for make in CHANGES if make not in WITHOUT_DERIVATIVE])
def test_a_derivative_made_later_knows_the_values_of_before(make):
    function, change = make()
    before = score_of(function)
    change()
    assert before.derivative.function(*AT) == 2
    assert score_of(function).derivative.function(*AT) == 5


def test_values_that_come_back_are_the_function_of_before():
    table = np.array([1.0, 2.0])
    function = made("score * table[h]", table=table)
    before = score_of(function)
    table[1] = 5.0
    assert score_of(function) != before
    table[1] = 2.0
    assert score_of(function) is before


def test_equal_functions_are_one_as_long_as_one_of_them_is_needed():
    slopes = np.array([0.25, 0.5])

    def layer(slopes: np.ndarray) -> FunctionType:
        return lambda score, b, h, i, j: score * slopes[h]

    first = score_of(layer(slopes))
    assert score_of(layer(slopes.copy())) is first
    there = weakref.ref(first)
    del first
    gc.collect()
    assert there() is None


def test_what_is_remembered_of_a_function_goes_with_it():
    """Though its variables hold it: an object whose attribute is the function, which reads the object."""

    def of_itself() -> Settings:
        settings = Settings(2.0)
        settings.function = lambda score, b, h, i, j: score * settings.slope  # type: ignore[attr-defined]
        return settings

    settings = of_itself()
    score_of(settings.function)  # type: ignore[attr-defined]
    there = weakref.ref(settings)
    del settings
    gc.collect()
    assert there() is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *[(0.0, -0.0), (1, 1.0), (1, True), (math.nan, 1.0), ((1,), [1]), ((1, 2.0), (1, 2)), ([0.0], [-0.0])],
        *[(np.zeros(2), np.zeros(2, np.float32)), (np.zeros(4), np.zeros((2, 2))), (np.zeros(1), -np.zeros(1))],
        *[(np.float32(1), np.float64(1)), (None, MISSING := object())],
    ],
)
def test_what_is_equal_in_python_and_not_the_same_is_a_change(one, other):
    scope = made("score + (value is None)", value=one).__globals__
    function = scope["function"]
    copy = frozen(function)
    assert is_unchanged(function, copy)
    if other is MISSING:
        del scope["value"]
    else:
        scope["value"] = other
    assert not is_unchanged(function, copy)


def test_equal_values_are_no_change():
    values = [lambda: float("1.25"), lambda: float("nan"), lambda: 10**20, lambda: "a" * 9, lambda: np.float32(0.5)]
    values += [lambda: (float("1.25"), [float("2")]), lambda: np.array([math.nan, -0.0]), lambda: Pair(float("1.25"))]
    for value in values:
        function = made("score + (value is None)", value=value())
        copy = frozen(function)
        function.__globals__["value"] = value()
        assert is_unchanged(function, copy)


def test_a_copy_can_not_be_changed():
    table, numbers = np.array([1.0, 2.0]), [1.0, 2.0]
    copy = frozen(made("score * table[h] * numbers[h]", table=table, numbers=numbers))
    kept = copy.__globals__
    assert not kept["table"].flags.writeable and not np.shares_memory(kept["table"], table)
    with pytest.raises(ValueError, match="WRITEABLE"):
        kept["table"].flags.writeable = True
    assert kept["numbers"] is not numbers
    assert frozen(copy) is copy


def test_what_a_copy_did_not_take_along_is_not_there():
    settings = SimpleNamespace(slope=2.0, name="slope")
    function = made("score * getattr(settings, settings.name)", settings=settings)
    with pytest.raises(ValueError, match=r"raises AttributeError: module 'settings' has no attribute 'slope'"):
        score_of(function)


def changes_a_global(score, b, h, i, j):
    global ALPHA
    ALPHA = score
    return score


def counter() -> FunctionType:
    count = 0

    def function(score, b, h, i, j):
        nonlocal count
        count += 1
        return score * count

    return function


def counter_inside() -> FunctionType:
    count = 0

    def function(score, b, h, i, j):
        def up():
            nonlocal count
            count += 1
            return count

        return score * up()

    return function


def imports(score, b, h, i, j):
    import random

    return score * random.random()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (changes_a_global, "changes_a_global assigns to ALPHA, expected that it leaves what is not its own"),
        (counter(), "function assigns to count, expected that it leaves what is not its own"),
        (counter_inside(), "function assigns to count, expected that it leaves what is not its own"),
        (imports, "imports imports random, expected that this is done outside of it"),
        (made("score * next(numbers)", numbers=iter([1.0])), "its variable numbers is of type list_iterator"),
        (made("score * draw()", draw=[0.5, 0.25].pop), "its variable draw is of type builtin_function_or"),
        (made("twice(score)", twice=np.frompyfunc(lambda x: 2 * x, 1, 1)), "its variable twice is of type ufunc"),
        (made("score * table[h]", table=np.ma.array([1.0])), "its variable table is of type MaskedArray"),
        (
            made("score * config.table['a']", config=SimpleNamespace(table={"a": 1})),
            "variable config.table is of type dict",
        ),
        (made("score * Settings(2.0).slope", Settings=Settings), "its variable Settings is of type type"),
    ],
)
def test_what_can_not_be_kept_is_refused(function, message):
    with pytest.raises(TypeError, match=message):
        score_of(function)


def test_own_variables_and_imports_of_what_never_changes_are_allowed():
    def function(score, b, h, i, j):
        import math

        total = 0.0

        def add(x):
            nonlocal total
            total += x

        add(math.sqrt(score))
        return total

    assert score_of(function).function(4.0, 0, 0, 0, 0) == 2


def test_a_function_that_was_found_unchanged_is_not_copied_again(monkeypatch):
    users = {name: score_of(function) for name, function in SCORE_MODS.items()}
    monkeypatch.setattr(module, "_Copying", None)
    assert all(score_of(function) is users[name] for name, function in SCORE_MODS.items())


def test_a_copy_of_a_copy_has_its_name():
    for function in SCORE_MODS.values():
        user = score_of(function)
        assert UserFunction(user.function, SCORE) == user
