"""Memory that outlives launches: who may read it when, and how long it is kept. Streams are numbers here."""

from typing import Any

import pytest

from dualops.cuda.launch import device_memory
from dualops.cuda.launch.device import known
from dualops.cuda.launch.device_memory import Kept, Memory, Place, Streams

HERE, ELSEWHERE = Streams(1, 1, captured=False), Streams(1, 2, captured=False)
CAPTURED = Streams(1, 1, captured=True)


class Marks:
    """Marks that are over when the test says so, and what was asked of them."""

    def __init__(self):
        self.over, self.made, self.held_up = False, [], []

    def __call__(self, handle: int, index: int) -> Any:
        self.made.append(handle)
        return self

    def is_over(self) -> bool:
        return self.over

    def hold_up(self, handle: int) -> None:
        self.held_up.append(handle)


class Library:
    """An adapter of arrays that are their own shapes."""

    def __init__(self):
        self.used: list[tuple[Any, int, int]] = []

    def allocator(self, dtype: str, device: str) -> Any:
        assert (dtype, device) == ("int64", "cuda:0")
        return lambda shape, strides: shape

    def pointer(self, array: tuple[int, ...]) -> int:
        return 16 * array[0]

    def used_on(self, array: Any, handle: int, home: int) -> None:
        self.used.append((array, handle, home))


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Marks:
    found = Marks()
    monkeypatch.setattr(device_memory, "Mark", found)
    monkeypatch.setattr(device_memory, "SIMULATED", False)
    return found


def memory(streams: Streams, library: Library | None = None) -> Memory:
    adapter: Any = library or Library()
    return Memory(Place(adapter, known("sm_90a"), "cuda:0"), streams, 16, 32)


def test_another_stream_or_a_graph_reads_it_once_it_is_known_to_be_written(marks):
    found = memory(HERE)
    found.written()
    assert found.places == [256, 512] and marks.made == [1]
    assert found.is_written(HERE) and not found.is_written(ELSEWHERE) and not found.is_written(CAPTURED)
    marks.over = True
    assert found.is_written(ELSEWHERE) and found.is_written(CAPTURED)


def test_what_a_graph_writes_is_never_known_to_be_written(marks):
    marks.over = True
    found = memory(CAPTURED)
    found.written()
    assert marks.made == [] and not found.is_written(ELSEWHERE) and not found.is_written(CAPTURED)


def test_memory_of_another_stream_is_waited_for_and_given_back_in_order(marks):
    library = Library()
    found = memory(ELSEWHERE, library)
    assert (marks.made, marks.held_up) == ([1], [2])
    for streams in (HERE, CAPTURED):
        found.used_on(streams)
    assert library.used == []  # it was allocated there, or is never freed
    found.used_on(ELSEWHERE)
    assert library.used == [((16,), 2, 1), ((32,), 2, 1)]


def test_the_latest_are_kept_and_for_ever_what_graphs_may_read():
    values = [object() for _ in range(5)]
    found = Kept[object]()
    for number, value in enumerate(values[:4]):
        for _ in range(2):  # a call that finds it again
            found.keep(number, value, HERE, 3)
    assert list(found.items()) == list(enumerate(values))[1:4]
    for _ in range(2):
        found.keep(1, values[1], CAPTURED, 3)
        found.keep(9, values[4], CAPTURED, 3)
    assert list(found) == [1, 2, 3]  # what was made in a capture is written only when the graph runs
    found.clear()
    assert found.captured == [values[1], values[4]]
