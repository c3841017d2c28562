"""How long the GPU takes, and how much memory, by the rules that every figure of dualops follows.

    burst     20 calls back to back between two events: what a training loop gets
    single    one call between two events: what a lone call gets, the host's launch time included

What is timed by itself is the median of 5 bursts. What is held against others is timed in turns with them, in `ROUNDS`
rounds, each in another order: the chip's power limit makes whoever comes after a hungry neighbour up to 10 % slower. In
a turn there are 3 bursts and 10 single calls; a figure is the median over the rounds of the rounds' medians, its spread
what lies between the lowest and the highest of these.

Slow calls are timed less often, down to once, so that no figure takes more than seconds. A call is anything without
arguments that queues work on the current stream. All need a GPU.
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
BURST_SECONDS, TOTAL_SECONDS = 0.25, 1.0  # of one burst, and of all that is timed for one figure


def stopwatch(call: Call, calls: int) -> float:
    """Seconds of GPU time a call takes when `calls` are queued one after another.

    A lone call is timed on an idle device, the host's launch time included. More follow one that is not timed, which
    keeps the device busy while the host launches the first.
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
    """How many times what takes `each` seconds is done in `total`: at most `most`, and once at the least."""
    return max(1, min(most, int(total / max(each, 1e-9))))


def burst_calls(call: Call) -> int:
    """Calls in a burst of this call, which is warm."""
    return within(BURST_CALLS, BURST_SECONDS, stopwatch(call, 1))


def times(call: Call, calls: int, most: int, total: float) -> list[float]:
    """Seconds a call: of at most `most` bursts of so many calls, which together take about `total` seconds."""
    first = stopwatch(call, calls)
    return [first] + [stopwatch(call, calls) for _ in range(within(most, total, calls * first) - 1)]


def burst(call: Call) -> float:
    """Seconds a call, back to back."""
    warm_up(call)
    return median(times(call, burst_calls(call), BURSTS, TOTAL_SECONDS))


class Turn(NamedTuple):
    """Seconds a call in one round, medians."""

    burst: float
    single: float


def turn(call: Call) -> Turn:
    """One contestant's turn of a round."""
    warm_up(call, TURN_WARM_UP_SECONDS)
    calls, total = burst_calls(call), TOTAL_SECONDS / ROUNDS
    of_bursts = median(times(call, calls, TURN_BURSTS, total))
    # a burst of one call is a single call
    return Turn(of_bursts, of_bursts if calls == 1 else median(times(call, 1, TURN_SINGLES, total)))


class Figure(NamedTuple):
    """What is quoted of several rounds: seconds, and the spread of the rounds as a share of these."""

    seconds: float
    spread: float


def figure(rounds: Sequence[float]) -> Figure:
    """The median of the rounds, and (highest - lowest) / median."""
    middle = median(rounds)
    return Figure(middle, (max(rounds) - min(rounds)) / middle)


def extra_memory(call: Call) -> int:
    """Bytes that a warm call takes of torch's memory at its peak, beyond what it leaves with its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return extra
