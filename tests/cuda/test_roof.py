"""The plain kernel that moves bytes: which blocking is taken, and what its launches are given. No GPU is needed."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dualops.cuda.tuning import roof

MB = 2**20


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Launches of kernels that are never built, on a GPU with 1 MiB of L2."""
    found: list[Any] = []
    start = 0

    def device_array(size: int, dtype: str) -> SimpleNamespace:
        nonlocal start
        start += 2**40
        return SimpleNamespace(size=size, __cuda_array_interface__={"data": (start, False)})

    here = SimpleNamespace(l2_bytes=MB)
    monkeypatch.setattr(roof, "device", SimpleNamespace(require=lambda: None, current=lambda: here))
    monkeypatch.setattr(roof, "cuda", SimpleNamespace(device_array=device_array))
    monkeypatch.setattr(roof, "build_stream", lambda *blocking: blocking)
    monkeypatch.setattr(roof, "Step", lambda kernel, grid, args: (kernel, grid, args))
    monkeypatch.setattr(roof, "prepare", lambda step, names, here: lambda *given: found.append((step, *given)))
    yield found
    roof.best_blocking.cache_clear()


def test_launches_take_turns_over_buffers_of_four_times_the_l2_cache(launched: list[Any]) -> None:
    stream = roof.Stream(MB, MB // 2, 256, 4)
    for _ in range(4):
        stream()
    (kernel, grid, args), _, _ = launched[0]
    assert kernel == (256, 4, 2, 1)  # threads, vectors, parts that are read and written
    assert grid == (MB // 2 // (256 * 4 * 16),)
    assert args == ("y", "x", MB // 8, MB // 8)  # elements from part to part
    places = [pointers for _, pointers, _ in launched]
    assert places[0] == places[3] and len(set(places)) == 3  # 4.5 MB
    (y, x), (y_next, x_next), *_ = places
    assert (y_next - y, x_next - x) == (MB // 2, MB)
    assert stream.scale == 1.0


def test_what_is_no_whole_number_of_blocks_is_scaled(launched: list[Any]) -> None:
    block = 512 * 4 * 16
    assert roof.Stream(3 * block // 2, 3 * block // 2, 128, 1).scale == 1.5
    assert roof.Stream(2 * block, 0, 128, 1).scale == 1.0


def test_few_writes_among_many_reads_count_as_reads(launched: list[Any]) -> None:
    roof.Stream(4096 * MB, MB, 128, 1)()
    (kernel, grid, _), _, _ = launched[0]
    assert kernel == (128, 1, 1, 0)
    assert grid == (4097 * MB // (128 * 16),)
    roof.Stream(8 * MB, MB, 128, 1)()
    assert launched[1][0][0] == (128, 1, 8, 1)


@pytest.mark.parametrize(
    ("enough", "tried", "best"), [(0.0, 9, (1.0, 256, 2)), (5.0, 5, (1.0, 256, 2)), (9.0, 1, (9.0, 128, 1))]
)
def test_the_fastest_blocking_is_taken_or_the_first_that_is_fast_enough(
    enough: float, tried: int, best: tuple[float, int, int], launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([9.0, 8.0, 7.0, 6.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    taken: list[float] = []

    def seconds(self: roof.Stream) -> float:
        taken.append(next(times))
        return taken[-1]

    monkeypatch.setattr(roof.Stream, "seconds", seconds)
    for _ in range(2):
        assert roof.best_blocking(MB, MB, enough) == best
        assert len(taken) == tried  # once for each number of bytes
