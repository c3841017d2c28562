"""NumPy's scalars as parameters: the same problem and the same bits as Python's numbers, whatever NumPy promotes to.

np.float64 is a float, and a float32 array plus one is an array of float64.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.spec import OPERATORS, Case, Spec, Tag
from dualops.spec.attention import UserFunction
from tests.checks import call, gradient_inputs
from tests.problems import values

SCALARS = {bool: np.bool_, int: np.int64, float: np.float64, str: np.str_}
NORMAL = (*SCALARS, NoneType, UserFunction)
EXAMPLES = {"scale": 0.3, "precision": "tf32"}  # of parameters that no small case has, and whose default is None


def in_numpy(value: Any) -> Any:
    """A value in NumPy's scalars, in tuples and dictionaries too; None and functions as they are."""
    if isinstance(value, (tuple, list)):
        return tuple(map(in_numpy, value))
    if isinstance(value, Mapping):
        return {key: in_numpy(entry) for key, entry in value.items()}
    return SCALARS.get(type(value), lambda same: same)(value)


def is_normal(value: Any) -> bool:
    """Whether it is Python's own through and through: a subclass, as np.float64 is one, is not."""
    return all(map(is_normal, value)) if type(value) is tuple else type(value) in NORMAL


def params_of(spec: Spec, case: Case, *, backward: bool) -> dict[str, Any]:
    """All that a call can be given, defaults among it."""
    accepted = (*spec.params, *(spec.gradient_params if backward else ()))
    defaults = {param.name: param.default for param in accepted}
    examples = EXAMPLES if case.dtype == "float32" else {**EXAMPLES, "precision": None}  # no other dtype has one
    return {name: examples.get(name) if value is None else value for name, value in {**defaults, **case.params}.items()}


def small_cases(spec: Spec) -> Iterator[Case]:
    yield from (case for case in spec.tagged(Tag.SIM) if case.dtype in ("float32", "bfloat16"))


@pytest.mark.parametrize("spec", OPERATORS.values(), ids=OPERATORS)
def test_normal_forms_are_pythons_numbers(spec):
    covered = set()
    for case in spec.cases:
        for backward in (False, True):
            given = params_of(spec, case, backward=backward)
            accepted = (*spec.params, *(spec.gradient_params if backward else ()))
            normal = spec.normal_params(accepted, given, spec.name)
            again = spec.normal_params(accepted, in_numpy(given), spec.name)
            assert all(map(is_normal, again.values())), again
            assert again == normal
            covered |= {name for name, value in given.items() if value is not None}
    assert covered >= {param.name for param in (*spec.params, *spec.gradient_params)}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("spec", OPERATORS.values(), ids=OPERATORS)
def test_results_are_those_of_pythons_numbers(spec, backward):
    if backward and spec.backward_cost is None:
        pytest.skip("has no gradient")
    inputs = spec.gradient_inputs if backward else spec.inputs
    function = getattr(reference, f"{spec.name}_backward" if backward else spec.name)
    for case in small_cases(spec):
        if backward and not case.backward:
            continue
        arrays = gradient_inputs(spec, case) if backward else values(spec, case)
        hosts = {entry.name: arrays[entry.name].item() for entry in inputs if entry.host and entry.name in arrays}
        for params in (params_of(spec, case, backward=backward), dict(case.params)):
            calling = partial(call, function, inputs)
            expected = calling(copies(arrays) | hosts, **params)
            found = calling(copies(arrays) | in_numpy(hosts), **in_numpy(params))
            for one, other in zip(several(expected), several(found), strict=True):
                assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), (case.id, params)


def copies(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of what a call may overwrite."""
    return {name: x.copy() for name, x in arrays.items()}


def several(results: Any) -> tuple[np.ndarray, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, np.longdouble])
@pytest.mark.parametrize("function", [reference.rms_norm, reference.layer_norm])
def test_eps_leaves_the_statistics_what_they_are(function: Callable[..., Any], kind: type):
    x = np.ones((3, 5), np.float32)
    wanted = {"return_rstd" if function is reference.rms_norm else "return_stats": True}
    results = function(x, eps=kind(0.5), **wanted)
    assert [result.dtype for result in results] == [np.float32] * len(results)
    assert all(one.tobytes() == two.tobytes() for one, two in zip(results, function(x, eps=0.5, **wanted)))


@pytest.mark.parametrize("value", [np.array([0.5]), np.array([[1]]), np.zeros(2)])
def test_arrays_are_no_numbers(value):
    with pytest.raises(TypeError, match=r"^rms_norm: eps is array\(.*\), expected a number$"):
        reference.rms_norm(np.ones((3, 5)), eps=value)
    with pytest.raises(TypeError, match=r"^softmax: axis is array\(.*\), expected an integer$"):
        reference.softmax(np.ones((3, 5)), axis=value)
