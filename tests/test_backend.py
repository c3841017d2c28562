"""Where kernels would run, by what the machine is said to lack; it is made up, so that this holds with and without a
GPU. `test_machine.py` has what a machine lacks.
"""

import re
from collections.abc import Callable, Iterator

import pytest

from dualops.cuda.compiler import backend
from dualops.cuda.launch import device

LACKING = ("There is no driver: install one.", "numba-cuda is not installed: pip install it.")


class Machine:
    """What it lacks, and how often it was asked."""

    def __init__(self) -> None:
        self.lacks: tuple[str, ...] = LACKING
        self.asked = 0

    def missing(self) -> tuple[str, ...]:
        self.asked += 1
        return self.lacks


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(backend, "missing", made.missing)
    backend.find_gpu.cache_clear()
    yield made
    backend.find_gpu.cache_clear()


def test_a_gpu_is_asked_for_until_one_answers_and_then_no_more(machine):
    assert [backend.where(), backend.where()] == [None, None]
    machine.lacks = ()
    assert [backend.where(), backend.where(), backend.where()] == ["gpu"] * 3
    assert machine.asked == 3


def test_in_the_simulator_nothing_is_asked(machine, monkeypatch):
    monkeypatch.setattr(backend, "SIMULATED", True)
    monkeypatch.setattr(device, "SIMULATED", True)
    assert backend.where() == "simulator"
    device.require()
    assert not machine.asked


@pytest.mark.parametrize("ask", [device.require, device.current, lambda: device.at.__wrapped__(0)])
def test_the_message_names_what_is_missing_its_remedies_and_what_works_without(ask, monkeypatch):
    monkeypatch.setattr(device, "SIMULATED", False)
    message = (
        f"dualops.cuda: kernels can't run on a GPU here. {' '.join(LACKING)} Without a GPU, set NUMBA_ENABLE_CUDASIM"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}=1.*simulator.*dualops.reference"):
        ask()


class Pair(backend.Namespace):
    """A noun of two members, with several forms."""

    first: int
    second: int


def test_a_noun_has_what_it_declares():
    right = Pair(second=2, first=1)
    assert repr(right) == "Pair(first=1, second=2)"
    changed = right.but(second=3)
    assert (type(changed), changed.first, changed.second, right.second) == (Pair, 1, 3, 2)
    with pytest.raises(TypeError, match="Pair: second given or declared, expected both"):
        Pair(first=1)
    with pytest.raises(TypeError, match="Pair: third given or declared, expected both"):
        Pair(first=1, second=2, third=3)
    with pytest.raises(TypeError, match="Pair: it has no member third"):
        right.but(third=3)


def test_a_form_is_made_of_a_functions_locals():
    def form(third: int) -> Pair:
        first = third + 1
        return Pair.from_locals(locals(), second=first + 1)

    assert form(0).members() == {"first": 1, "second": 2}
    with pytest.raises(TypeError, match="Pair: first given or declared, expected both"):
        Pair.from_locals({"third": 3}, second=2)


@backend.verb
def shared() -> int:
    return 1


@backend.noun
def counter(start: int) -> backend.Members:
    """A noun with verbs of its own and others."""
    STEP, step = 2, shared

    @backend.verb
    def next(i):
        return _scaled(i) + STEP

    @backend.verb
    def _scaled(i):
        return start * i

    @backend.verb
    def max_(a, b):
        return max(a, b)

    @backend.verb
    def twice(i):
        return 0

    def plain() -> Callable[..., int]:
        @backend.verb
        def inner(i):
            return i

        return inner

    inner = plain()
    assert step and inner
    return backend.members(locals(), first=start, shared=shared, twice=inner)


def test_a_nouns_members_are_its_factorys_verbs_and_constants_and_what_is_given():
    made = counter(3)
    assert made.members().keys() == {"STEP", "next", "max", "twice", "first", "shared"}
    assert (made.next(1), made.max(1, 2), made.twice(7), made.first, made.shared()) == (5, 2, 7, 3, 1)
    assert "first=3" in repr(made) and repr(made).startswith("counter(")
    changed = made.but(first=4)
    assert (type(changed), changed.first, changed.next, made.first) == (backend.Noun, 4, made.next, 3)
    with pytest.raises(TypeError, match=r"^counter: it has no member second$"):
        made.but(second=1)


@pytest.mark.parametrize("name", ["but", "from_locals", "members"])
def test_a_noun_has_no_member_that_hides_its_own(name):
    @backend.noun
    def wrong() -> backend.Members:
        return backend.members(locals(), **{name: 1})

    with pytest.raises(TypeError, match=f"^wrong: a member can't be called {name}, which every noun has$"):
        wrong()
