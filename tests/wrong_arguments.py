"""Right calls of every public function, and values that their arguments can't be: errors must name the operator."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dualops import reference
from dualops.spec import OPERATORS, Case, Spec, Tag
from dualops.spec.domains import shown
from dualops.testing.ready import Ready, cases

REFUSALS = (TypeError, ValueError, NotImplementedError)


class Odd:
    """A value that no parameter may be, and that compares with nothing."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Odd()"


class NoWords(Odd):
    """One that can't even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


PARAMS: tuple[Any, ...] = (
    *({}, [], (), set(), {"a": 1}, [1], (1, 2, 3), b"x", "nonsense", "", 1j, object(), Odd(), NoWords()),
    *(2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**64, 2**200, 10**400, -1, 0, 1.5, -0.5),
    *(float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, True, None),
    *(np.float64, int, len, lambda: None, Ellipsis, NotImplemented),
    *(np.zeros(2), np.array([1]), np.float32(0.5), np.int64(-3), np.array("a"), np.datetime64("now"), np.ma.masked),
)
ARRAYS: tuple[Any, ...] = (
    *({}, [], (), set(), [1.0, 2.0], [[1.0], [2.0, 3.0]], b"x", "nonsense", 1j, object(), Odd(), NoWords()),
    *(0, 1.5, 2**63, 2**200, 10**400, float("nan"), True, None),
    *(np.float64, int, len, lambda: None, Ellipsis, range(3)),
    *(np.array(None), np.array(["a"]), np.zeros(3, complex), np.zeros((2, 2), "M8[s]"), np.zeros(2, [("a", "f4")])),
    *(np.zeros(()), np.zeros((1,) * 20, np.float32), np.ma.masked_array([1.0])),
)


class Call(NamedTuple):
    """A right call of a public function, to be bent: its small arrays, and the names of all its arguments."""

    spec: Spec
    backward: bool
    case: Case
    arrays: dict[str, np.ndarray]

    def __str__(self) -> str:
        return f"{self.spec.name}_backward" if self.backward else self.spec.name

    @property
    def params(self) -> list[str]:
        return [param.name for param in (*self.spec.params, *(self.spec.gradient_params if self.backward else ()))]

    def given(self, **changed: Any) -> dict[str, Any]:
        """The arguments, some of them changed; of arrays copies, which a call may overwrite."""
        return {**{name: array.copy() for name, array in self.arrays.items()}, **self.case.params, **changed}


def calls() -> Iterator[Call]:
    """One of each operator, and one of its gradient."""
    for spec, backward in product(OPERATORS.values(), (False, True)):
        if backward and not spec.gradients:
            continue
        ready = cases(spec.name, Tag.SIM, backward=backward, dtype="float32")
        small = min((each for each in ready if all(map(all, each.case.shapes.values()))), key=_elements)
        yield Call(spec, backward, small.case, small.arrays())


def _elements(ready: Ready) -> int:
    return sum(map(prod, ready.case.shapes.values()))


CALLS = [*calls()]


def wrong(arrays: Iterable[str], params: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Each argument with each of the values, most of which it can't be."""
    yield from product(arrays, ARRAYS)
    yield from product(params, PARAMS)


def refusal(function: Callable[..., Any], given: Mapping[str, Any]) -> str | None:
    """Kind and words of the error by which a call is refused; None where it is taken."""
    try:
        with np.errstate(all="ignore"):
            function(**given)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return None


def other_words(
    call: Call, function: Callable[..., Any], of_array: Callable[[np.ndarray], Any] = lambda x: x
) -> dict[tuple[str, str], str]:
    """Values of parameters, and arrays, that the reference refuses, and `function` does not, or not by the same error.

    of_array: makes the array that `function` takes.
    """
    wrong: list[tuple[str, Any, str]] = [(name, value, shown(value)) for name, value in product(call.params, PARAMS)]
    wrong += [(name, x, f"{x.dtype} {x.shape}") for name, array in call.arrays.items() for x in bent(array)]
    found = {}
    for name, value, label in wrong:
        given = call.given(**{name: value})
        wanted = refusal(getattr(reference, str(call)), call.given(**{name: value}))
        if not wanted:
            continue
        words = refusal(function, {key: of_array(x) if key in call.arrays else x for key, x in given.items()})
        if wanted != (words and words.replace("[0]", "")):  # as lion says it of a list of one
            found[name, label] = f"{words}, expected {wanted}"
    return found


def bent(array: np.ndarray) -> Iterator[np.ndarray]:
    """With an axis more and one less, longer and in other dtypes."""
    yield array[None]
    yield from (np.concatenate([array, array], axis=axis) for axis in range(array.ndim))
    if array.ndim:
        yield np.asarray(array[0])
    with np.errstate(all="ignore"):
        made = [array.astype(dtype) for dtype in ("int16", "float16", "float32", "float64", "bool", "complex64")]
    yield from made


def complaint(
    operator: str, function: Callable[..., Any], given: Mapping[str, Any], *, must_refuse: bool = False
) -> str | None:
    """What is wrong with how a call ends. None where it is refused by an error that names the operator, or is right,
    as it may be unless `must_refuse`: some of the values are no wrong ones for an argument.
    """
    try:
        with np.errstate(all="ignore"):
            function(**given)
    except REFUSALS as error:
        message = str(error)
        return None if message.startswith(f"{operator}: ") else f"{type(error).__name__}: {message[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "it was taken" if must_refuse else None
