"""Tensor maps from call to call: when they are written anew, and who finds them. Nothing is launched."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda import maps
from dualops.cuda.device import known
from dualops.cuda.kept import Place
from dualops.cuda.maps import Mapped, Maps
from dualops.cuda.tensor_map import NBYTES, Boxes
from tests.cuda.test_kept import CAPTURED, ELSEWHERE, HERE, Library, Marks, marks as marks

MATRIX = Mapped("a", "bfloat16", (64, 64), (64, 1), (8, 64))
FIRST, SECOND, THIRD = [4096, 8192], [4096, 12288], [4096, 16384]


class Writes(list[tuple[int, ...]]):
    """The words that each launch would have written."""

    def __call__(self, to: Any, first: int, words: tuple[int, ...], device: Any, handle: int) -> None:
        self.append(words)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch, marks: Marks) -> Writes:
    found = Writes()
    monkeypatch.setattr(maps, "write_words", found)
    monkeypatch.setattr(maps, "_KEPT", maps.Kept())
    monkeypatch.setattr(Boxes, "encoded", lambda self, address: address.to_bytes(8, "little") * (NBYTES // 8))
    return found


def two_maps() -> Maps:
    return Maps([MATRIX, MATRIX._replace(array="b")], ["a", "b", None])


def place(library: Library | None = None) -> Place:
    adapter: Any = library or Library()
    return Place(adapter, known("sm_90a"), "cuda:0")


def test_maps_of_the_same_addresses_are_written_once(writes):
    found = two_maps()
    ours = [found.written(addresses, place(), HERE) for addresses in (FIRST, SECOND, FIRST, SECOND, FIRST)]
    assert [words[::16] for words in writes] == [tuple(FIRST), tuple(SECOND)]
    assert ours[0] is ours[2] is ours[4] and ours[1] is ours[3] and ours[0] is not ours[1]
    first, second = ours[0].addresses
    assert second - first == NBYTES
    assert two_maps().written(FIRST, place(), HERE) is not ours[0], "another plan has other maps"


def test_another_stream_finds_them_when_they_are_written(writes, marks):
    found = two_maps()
    ours = found.written(FIRST, place(), HERE)
    theirs = found.written(FIRST, place(), ELSEWHERE)
    assert theirs is not ours and len(writes) == 2
    marks.over = True
    assert found.written(FIRST, place(), ELSEWHERE) is theirs and found.written(FIRST, place(), HERE) is theirs


def test_a_graph_has_maps_of_its_own_until_they_are_written(writes, marks):
    found = two_maps()
    ours = found.written(FIRST, place(), HERE)
    captured = [found.written(FIRST, place(), CAPTURED) for _ in range(2)]
    assert ours not in captured and captured[0] is not captured[1], "what a graph writes nobody else finds"
    assert found.written(FIRST, place(), HERE) is ours
    marks.over = True
    assert found.written(FIRST, place(), CAPTURED) is ours
    maps.forget()
    assert found.written(FIRST, place(), HERE) is not ours


def test_what_was_forgotten_or_pushed_out_is_written_anew(writes, monkeypatch):
    found = two_maps()
    ours = found.written(FIRST, place(), HERE)
    maps.forget()
    again = found.written(FIRST, place(), HERE)
    assert again is not ours and len(writes) == 2
    monkeypatch.setattr(maps, "MOST", 2)
    for addresses in (SECOND, THIRD):
        found.written(addresses, place(), HERE)
    assert found.written(FIRST, place(), HERE) is not again and len(writes) == 5


def test_few_calls_are_remembered_by_a_plan(writes, monkeypatch):
    monkeypatch.setattr(maps, "MOST_RECENT", 2)
    found = two_maps()
    for _ in range(2):
        for addresses in (FIRST, SECOND, THIRD):
            found.written(addresses, place(), HERE)
            assert len(found.recent) <= 2
    assert len(writes) == 3
