"""Where kernels would run, by what the machine is said to lack; it is made up, so that this holds with and without a
GPU. `test_machine.py` has what a machine lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from dualops.cuda import backend, device

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
def test_what_is_missing_is_told_with_its_remedies_and_what_works_without(ask, monkeypatch):
    monkeypatch.setattr(device, "SIMULATED", False)
    told = f"dualops.cuda: kernels can't run on a GPU here. {' '.join(LACKING)} Without a GPU, set NUMBA_ENABLE_CUDASIM"
    with pytest.raises(RuntimeError, match=f"^{re.escape(told)}=1.*simulator.*dualops.reference"):
        ask()


class Pair(backend.Namespace):
    """A noun of two members."""

    first: int
    second: int


def test_a_noun_has_what_it_declares():
    right = Pair(first=1, second=2)
    assert repr(right) == "Pair(first=1, second=2)"
    changed = right.but(second=3)
    assert (type(changed), changed.first, changed.second, right.second) == (Pair, 1, 3, 2)
    with pytest.raises(TypeError, match="Pair: second given or declared, expected both"):
        Pair(first=1)
    with pytest.raises(TypeError, match="Pair: third given or declared, expected both"):
        right.but(third=3)
