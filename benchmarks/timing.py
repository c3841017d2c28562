"""Measure the time and memory of GPU calls, by the rules of every figure of dualops.

    burst     20 calls back to back between two events: as in a training loop
    single    one call between two events: an isolated call, including the host's launch time

A call that is timed alone has the median of 5 bursts. Calls that are compared are timed in turns, in `ROUNDS` rounds,
each in another order: due to the chip's power limit, a call after one that needs much power is up to 10 % slower. A
turn has 3 bursts and 10 single calls. A figure is the median of the rounds' medians, and its spread is the distance
between the lowest and the highest of these.

Slow calls are timed less often, at least once, so that no figure takes more than seconds. A call is any function
without arguments that queues work on the current stream. All functions need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

Call = Callable[[], object]

BURST_CALLS, BURSTS = 20, 5
ROUNDS, TURN_BURSTS, TURN_SINGLES = 3, 3, 10
WARM_UP_CALLS, WARM_UP_SECONDS = 5, 0.15  # at least; of a GPU that idled, the first 30 ms are slower by some per cent
TURN_WARM_UP_SECONDS = 0.1  # after a neighbour's turn, which left the GPU warm
BURST_SECONDS, TOTAL_SECONDS = 0.25, 1.0  # of one burst, and of all bursts for one figure


def stopwatch(call: Call, calls: int) -> float:
    """Measure the seconds of GPU time per call, for `calls` queued one after another.

    A single call is timed on an idle device, including the host's launch time. Several calls follow an untimed one,
    which keeps the device busy while the host launches the first.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if calls > 1:
        call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def warm_up(call: Call, least: float = WARM_UP_SECONDS) -> None:
    """Let compilers, caches and clocks settle, for `least` seconds."""
    started, seconds, calls = perf_counter(), 0.0, 0
    while seconds < least or (calls < WARM_UP_CALLS and seconds <= BURST_SECONDS):
        call()
        torch.cuda.synchronize()
        seconds, calls = perf_counter() - started, calls + 1


def within(most: int, total: float, each: float) -> int:
    """Return how many calls of `each` seconds fit into `total`: at least 1 and at most `most`."""
    return max(1, min(most, int(total / max(each, 1e-9))))


def burst_calls(call: Call) -> int:
    """Return the number of calls in a burst of this warm call."""
    return within(BURST_CALLS, BURST_SECONDS, stopwatch(call, 1))


def times(call: Call, calls: int, most: int, total: float) -> list[float]:
    """Measure seconds per call, in at most `most` bursts of `calls` calls, in about `total` seconds."""
    first = stopwatch(call, calls)
    return [first] + [stopwatch(call, calls) for _ in range(within(most, total, calls * first) - 1)]


def burst(call: Call) -> float:
    """Measure seconds per call, back to back."""
    warm_up(call)
    return median(times(call, burst_calls(call), BURSTS, TOTAL_SECONDS))


class Turn(NamedTuple):
    """Seconds per call in one round, as medians."""

    burst: float
    single: float


def turn(call: Call) -> Turn:
    """Measure one contestant's turn of a round."""
    warm_up(call, TURN_WARM_UP_SECONDS)
    calls, total = burst_calls(call), TOTAL_SECONDS / ROUNDS
    of_bursts = median(times(call, calls, TURN_BURSTS, total))
    # a burst of one call is a single call
    return Turn(of_bursts, of_bursts if calls == 1 else median(times(call, 1, TURN_SINGLES, total)))


class Figure(NamedTuple):
    """The result of several rounds: seconds, and the spread of the rounds relative to them."""

    seconds: float
    spread: float


def figure(rounds: Sequence[float]) -> Figure:
    """Return the median of the rounds, and (highest - lowest) / median."""
    middle = median(rounds)
    return Figure(middle, (max(rounds) - min(rounds)) / middle)


def extra_memory(call: Call) -> int:
    """Measure the peak bytes of torch's memory during a warm call, beyond those of its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return extra
