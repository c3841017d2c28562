"""Arrays that are not plain, and streams that are none: refused before anything runs, the first time and later."""

import re
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from numba import cuda as numba_cuda

import dualops.cuda
from dualops import reference
from dualops.cuda import simulator
from dualops.spec import Case, Tag
from tests.checks import call, gradient_inputs
from tests.cuda.operators import Direction, every_direction
from tests.problems import values

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass")


@pytest.fixture
def no_more_launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on a launch fails the test."""

    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel was launched")

    return lambda: monkeypatch.setattr(simulator, "launch", launched)


def small(direction: Direction) -> tuple[Case, dict[str, Any]]:
    """The smallest case of a direction, of those with the most arrays, and its arrays."""
    cases = [case for case in direction.spec.tagged(Tag.SIM) if case.backward or not direction.backward]
    cases = [case for case in cases if case.dtype == "float32" and all(map(prod, case.shapes.values()))]
    case = min(cases, key=lambda case: (-len(case.shapes), sum(map(prod, case.shapes.values()))))
    return case, gradient_inputs(direction.spec, case) if direction.backward else values(direction.spec, case)


def several(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def as_given(results: list[Any]) -> Any:
    return tuple(results) if len(results) > 1 else results[0]


@every_direction
def test_masked_arrays_and_matrices_are_refused(direction, nothing_runs, no_more_launches):
    case, arrays = small(direction)
    results = several(call(direction.function(), direction.inputs, arrays, **case.params))  # its plan is kept
    no_more_launches()
    for name, array in arrays.items():
        for made in (np.ma.asarray, np.asmatrix) if array.ndim == 2 else (np.ma.asarray,):
            with pytest.raises(TypeError, match=rf"^{direction.name}: {name} is a numpy.*, expected a plain numpy\.nd"):
                call(direction.function(), direction.inputs, {**arrays, name: made(array)}, **case.params)
    for place in range(len(results)):
        out = list(map(np.zeros_like, results))
        out[place] = np.ma.asarray(out[place])
        with pytest.raises(TypeError, match=f"^{direction.name}: out .* is a numpy.ma.MaskedArray, expected a plain"):
            call(direction.function(), direction.inputs, arrays, **case.params, out=as_given(out))
        assert not any(map(np.any, out))


@every_direction
def test_results_are_not_written_to_read_only_arrays(direction, nothing_runs, no_more_launches):
    case, arrays = small(direction)
    results = several(call(getattr(reference, direction.name), direction.inputs, arrays, **case.params))
    out = list(map(np.zeros_like, results))
    call(direction.function(), direction.inputs, arrays, **case.params, out=as_given(out))  # its plan is kept
    no_more_launches()
    for place in range(len(out)):
        out = list(map(np.zeros_like, results))
        out[place].flags.writeable = False
        with pytest.raises(ValueError, match=f"^{direction.name}: out .* is read-only, expected an array that can be"):
            call(direction.function(), direction.inputs, arrays, **case.params, out=as_given(out))
        assert not any(map(np.any, out))


@every_direction
def test_read_only_arrays_are_read(direction):
    case, arrays = small(direction)
    written = {} if direction.backward else direction.spec.updates
    for name, array in arrays.items():
        array.flags.writeable = name in written.values()
    call(direction.function(), direction.inputs, arrays, **case.params)


@pytest.mark.parametrize("many", [False, True], ids=["array", "list"])
@pytest.mark.parametrize("locked", ["params", "momenta"])
def test_lion_overwrites_nothing_that_is_read_only(locked, many, forgotten, no_more_launches):
    names = ("params", "grads", "momenta")
    dualops.cuda.lion(*([np.ones(9, np.float32)] if many else np.ones(9, np.float32) for _ in names), lr=0.5)
    arrays = {name: np.ones(9, np.float32) for name in names}
    arrays[locked].flags.writeable = False
    given: dict[str, Any] = {name: [array] if many else array for name, array in arrays.items()}
    no_more_launches()
    with pytest.raises(ValueError, match=rf"^lion: {locked}{re.escape('[0]') if many else ''} is read-only"):
        dualops.cuda.lion(**given, lr=0.5)
    assert all((array == 1).all() for array in arrays.values())


def test_lists_at_known_addresses_may_have_become_read_only(forgotten, no_more_launches):
    params, grads, momenta = (np.ones(9, np.float32) for _ in range(3))
    dualops.cuda.lion([params], [grads], [momenta], lr=0.5)
    momenta.flags.writeable = False
    no_more_launches()
    with pytest.raises(ValueError, match=r"^lion: momenta\[0\] is read-only"):
        dualops.cuda.lion([params], [grads], [momenta], lr=0.5)
    with pytest.raises(TypeError, match=r"^lion: grads\[0\] is a numpy.ma.MaskedArray"):
        dualops.cuda.lion([params], [np.ma.asarray(grads)], [momenta], lr=0.5)


@pytest.mark.parametrize("locked", ["q", "k"])
def test_rope_in_place_writes_nothing_where_it_may_not(locked, no_more_launches):
    arrays: dict[str, Any] = {name: np.ones((1, 2, 3, 4), np.float32) for name in "qk"}
    tables = np.zeros((3, 2), np.float32)
    arrays[locked].flags.writeable = False
    no_more_launches()
    with pytest.raises(ValueError, match=f"^rope: out {locked}_rotated is read-only"):
        dualops.cuda.rope(**arrays, cos=tables, sin=tables, inplace=True)
    assert all((array == 1).all() for array in arrays.values())


@every_direction
def test_a_stream_that_is_none_is_refused_as_on_a_gpu(direction, no_more_launches):
    case, arrays = small(direction)
    no_more_launches()
    for stream in ("default", 1.0, [0]):
        message = rf"^{direction.name}: stream is a {type(stream).__name__}, expected an integer or a stream object$"
        with pytest.raises(TypeError, match=message):
            call(direction.function(), direction.inputs, arrays, **case.params, stream=stream)


def test_lists_refuse_a_stream_that_is_none(forgotten, no_more_launches):
    params, grads, momenta = ([np.ones(9, np.float32)] for _ in range(3))
    no_more_launches()
    with pytest.raises(TypeError, match=r"^lion: stream is a str, expected an integer or a stream object$"):
        dualops.cuda.lion(params, grads, momenta, lr=0.5, stream="default")
    assert params[0].tolist() == [1.0] * 9


class Handle:
    """A stream as libraries show one."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 7


@pytest.mark.parametrize("stream", [0, 1, Handle(), numba_cuda.stream()], ids=["0", "1", "protocol", "Numba's"])
def test_any_stream_is_good_in_the_simulator(stream, forgotten):
    x = np.ones((2, 3), np.float32)
    assert dualops.cuda.softmax(x, stream=stream).tobytes() == dualops.cuda.softmax(x).tobytes()
    lists = [[np.ones(9, np.float32)] for _ in range(3)]
    dualops.cuda.lion(*lists, lr=0.5, stream=stream)
    assert lists[0][0].tolist() == [0.5] * 9
