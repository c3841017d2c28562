"""How long the GPU takes, and how much memory, by the rules that every figure of dualops follows.

    burst     20 calls back to back between two events, the median of 5: what a training loop gets
    single    one call between two events, the median of 30: what a lone call gets, the host's launch time included

Slow calls are timed less often, down to once, so that no figure takes more than seconds. A call is anything without
arguments that queues work on the current stream. All need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median
from time import perf_counter

import torch

Call = Callable[[], object]

BURST_CALLS, BURSTS, SINGLES = 20, 5, 30
WARM_UP_CALLS, WARM_UP_SECONDS = 5, 0.15  # at least; of a GPU that idled, the first 30 ms are slower by some per cent
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


def warm_up(call: Call) -> None:
    """Let compilers, caches and clocks settle."""
    started, seconds, calls = perf_counter(), 0.0, 0
    while seconds < WARM_UP_SECONDS or (calls < WARM_UP_CALLS and seconds <= BURST_SECONDS):
        call()
        torch.cuda.synchronize()
        seconds, calls = perf_counter() - started, calls + 1


def within(most: int, total: float, each: float) -> int:
    """How many times what takes `each` seconds is done in `total`: at most `most`, and once at the least."""
    return max(1, min(most, int(total / max(each, 1e-9))))


def burst_calls(call: Call) -> int:
    """Calls in a burst of this call, which is warm."""
    return within(BURST_CALLS, BURST_SECONDS, stopwatch(call, 1))


def burst(call: Call) -> float:
    """Seconds a call, back to back."""
    warm_up(call)
    calls = burst_calls(call)
    first = stopwatch(call, calls)
    times = [first] + [stopwatch(call, calls) for _ in range(within(BURSTS, TOTAL_SECONDS, calls * first) - 1)]
    return median(times)


def single(call: Call) -> float:
    """Seconds a call, one at a time."""
    warm_up(call)
    first = stopwatch(call, 1)
    return median([first] + [stopwatch(call, 1) for _ in range(within(SINGLES, TOTAL_SECONDS, first) - 1)])


def extra_memory(call: Call) -> int:
    """Bytes that a warm call takes of torch's memory at its peak, beyond what it leaves with its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return extra


@cache
def matmul_rate(dtype: torch.dtype) -> float:
    """Flops a second of torch's matrix product at a size that fills the device: the roof of computing."""
    size = 8192 if dtype in (torch.float16, torch.bfloat16) else 4096
    a = torch.randn(size, size, device="cuda").to(dtype)
    b = torch.randn(size, size, device="cuda").to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / burst(lambda: torch.matmul(a, b, out=out))
