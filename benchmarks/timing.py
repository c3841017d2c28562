"""How long the GPU takes, and how much memory, by the rules that every figure of dualops follows.

    burst     20 calls back to back between two events, the median of 5: what a training loop gets
    single    one call between two events, the median of 30: what a lone call gets, the host's launch time included

A call is anything without arguments that queues work on the current stream. All need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median

import torch

Call = Callable[[], object]

BURST_CALLS, BURSTS, SINGLES = 20, 5, 30
WARM_UP_CALLS = 5


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
    for _ in range(WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()


def burst(call: Call) -> float:
    """Seconds a call, back to back."""
    warm_up(call)
    return median(stopwatch(call, BURST_CALLS) for _ in range(BURSTS))


def single(call: Call) -> float:
    """Seconds a call, one at a time."""
    warm_up(call)
    return median(stopwatch(call, 1) for _ in range(SINGLES))


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
