"""Arrays that are not plain: NumPy's subclasses are refused everywhere, what can't be written to is read everywhere."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.spec import OPERATORS, Case, Spec, Tag
from tests.checks import call, gradient_inputs
from tests.problems import values

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass")


class Metres(np.ndarray):
    """An array with a meaning of its own."""


KINDS = {
    "a numpy.ma.MaskedArray, expected a plain numpy.ndarray, as its method filled makes one": np.ma.asarray,
    "a numpy.matrix, expected a plain numpy.ndarray, as np.asarray makes one": np.asmatrix,
    f"a {Metres.__module__}.Metres, expected a plain numpy.ndarray, as np.asarray": lambda x: x.view(Metres),
}
DIRECTIONS = [
    pytest.param(spec, backward, id=f"{spec.name}_backward" if backward else spec.name)
    for spec in OPERATORS.values()
    for backward in (False, True)
    if not backward or spec.backward_cost is not None
]


def calls(spec: Spec, backward: bool) -> Iterator[tuple[Case, dict[str, Any]]]:
    """A small case for each set of arrays that a call may have."""
    found: dict[frozenset[str], tuple[Case, dict[str, Any]]] = {}
    for case in spec.tagged(Tag.SIM):
        if case.backward or not backward:
            arrays = gradient_inputs(spec, case) if backward else values(spec, case)
            found.setdefault(frozenset(arrays), (case, arrays))
    yield from found.values()


@pytest.mark.parametrize(("spec", "backward"), DIRECTIONS)
def test_subclasses_are_refused(spec, backward):
    inputs, op = (spec.gradient_inputs, f"{spec.name}_backward") if backward else (spec.inputs, spec.name)
    function = getattr(reference, op)
    for case, arrays in calls(spec, backward):
        for name, array in arrays.items():
            for kind, made in KINDS.items():
                if made is np.asmatrix and array.ndim != 2:
                    continue
                with pytest.raises(TypeError, match=f"^{re.escape(f'{op}: {name} is {kind}')}"):
                    call(function, inputs, {**arrays, name: made(array)}, **case.params)


@pytest.mark.parametrize(("spec", "backward"), DIRECTIONS)
def test_read_only_arrays_are_read(spec, backward):
    inputs = spec.gradient_inputs if backward else spec.inputs
    function = getattr(reference, f"{spec.name}_backward" if backward else spec.name)
    for case, arrays in calls(spec, backward):
        expected = call(function, inputs, arrays, **case.params)
        for array in arrays.values():
            array.flags.writeable = False
        found = call(function, inputs, arrays, **case.params)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found)), strict=True):
            assert one.tobytes() == other.tobytes()


def test_what_lies_in_a_file_is_an_array_like_any_other(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3, 5))
    x[:] = np.arange(5)
    assert np.array_equal(reference.softmax(x), reference.softmax(np.array(x)))


@pytest.mark.parametrize("locked", ["q", "k"])
@pytest.mark.parametrize("turned", [False, True], ids=["", "reversed"])
def test_rope_in_place_writes_nothing_where_it_may_not(locked, turned):
    arrays: dict[str, Any] = {name: np.ones((1, 2, 3, 4), np.float32) for name in "qk"}
    tables = np.zeros((3, 2), np.float32)
    if turned:
        arrays[locked] = arrays[locked][:, ::-1]
    arrays[locked].flags.writeable = False
    message = f"rope: out {locked}_rotated is read-only, expected an array that can be written to"
    with pytest.raises(ValueError, match=f"^{message}$"):
        reference.rope(**arrays, cos=tables, sin=tables, inplace=True)
    assert all((array == 1).all() for array in arrays.values())
