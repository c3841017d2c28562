"""How often something is called for one figure. The clock is made up: a call says how long it took."""

from collections.abc import Callable

import pytest
import torch

from benchmarks import timing


@pytest.fixture
def bursts(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Make every call take this number of seconds. Returns the number of calls before each reading of the clock."""
    found: list[int] = []

    def of(seconds: float) -> list[int]:
        now = 0.0

        def stopwatch(call: timing.Call, calls: int) -> float:
            found.append(calls)
            return seconds

        def clock() -> float:
            nonlocal now
            now += seconds
            return now

        monkeypatch.setattr(timing, "stopwatch", stopwatch)
        monkeypatch.setattr(timing, "perf_counter", clock)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        return found

    return of


@pytest.mark.parametrize("seconds", [1e-6, 1e-3, 0.005])
def test_fast_calls_are_timed_in_full(seconds: float, bursts: Callable[[float], list[int]]) -> None:
    found, warm = bursts(seconds), []
    assert timing.burst(lambda: warm.append(1)) == seconds
    assert found == [1] + [timing.BURST_CALLS] * timing.BURSTS
    assert len(warm) == pytest.approx(max(timing.WARM_UP_CALLS, timing.WARM_UP_SECONDS / seconds), abs=1)
    found.clear()
    warm.clear()
    assert timing.turn(lambda: warm.append(1)) == (seconds, seconds)
    assert found == [1] + [timing.BURST_CALLS] * timing.TURN_BURSTS + [1] * timing.TURN_SINGLES
    assert len(warm) == pytest.approx(max(timing.WARM_UP_CALLS, timing.TURN_WARM_UP_SECONDS / seconds), abs=1)


@pytest.mark.parametrize(
    ("seconds", "in_burst", "times", "warm", "of_a_turn"),
    [
        (0.05, 5, 4, 5, [1, 5, 1, 1, 1, 1, 1, 1]),
        (0.15, 1, 5, 2, [1, 1, 1]),
        (0.4, 1, 2, 1, [1, 1]),
        (7.0, 1, 1, 1, [1, 1]),
    ],
)
def test_slow_calls_are_timed_less_often(
    seconds: float, in_burst: int, times: int, warm: int, of_a_turn: list[int], bursts: Callable[[float], list[int]]
) -> None:
    """In a turn, bursts of one call are single calls, and are not timed again as such."""
    found, warmed = bursts(seconds), []
    assert timing.burst(lambda: warmed.append(1)) == seconds
    assert found == [1] + [in_burst] * times
    assert len(warmed) == warm
    found.clear()
    assert timing.turn(lambda: None) == (seconds, seconds)
    assert found == of_a_turn


def test_a_figure_is_the_median_of_the_rounds_and_tells_how_far_they_lie_apart() -> None:
    seconds, spread = timing.figure([2.2, 1.9, 2.0])
    assert seconds == 2.0
    assert spread == pytest.approx(0.15)
    assert timing.figure([3.0]) == (3.0, 0.0)
