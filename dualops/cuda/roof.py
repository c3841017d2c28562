"""What the GPU's memory can do: the time of a plain kernel that moves the same bytes, as many of them read and written.

This is the roof of memory-bound operators. A copy is not: twice as many reads as writes run at another speed, and small
sizes never reach the speed of large ones.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from statistics import median
from typing import Any

from . import device
from .backend import Kernel, builds, cuda, f32, i64, kernel, pointer
from .step import Step, prepare
from .tile.numbers import numbers
from .tile.storage import access

BURST = 20  # launches back to back, so that the host's time for a launch is hidden
MIXES = ((1, 0), (1, 1), (2, 1), (3, 2))


@builds
def build_stream(threads: int, vectors: int, reads: int, writes: int) -> Kernel:
    """stream(y, x, y_step, x_step): a thread sums `reads` times `vectors` vectors and writes them `writes` times.

    x has `reads` parts x_step elements apart, y has `writes` parts y_step apart; without writes, sums that no data has
    are written, so that the loads stay.
    """
    vec, num = access("float32", True), numbers(f32)
    NEVER = f32(1.2345e30)

    @kernel(pointer(f32), pointer(f32), i64, i64, threads=threads)
    def stream(y, x, y_step, x_step):  # noqa: ANN001
        first = (i64(cuda.blockIdx.x) * threads * vectors + cuda.threadIdx.x) * vec.vector
        frag = cuda.local.array(vectors * vec.vector, f32)
        total = cuda.local.array(vectors * vec.vector, f32)
        for i in range(len(total)):
            total[i] = num.zero
        for part in range(reads):
            for j in range(vectors):
                vec.load(frag, j * vec.vector, x, part * x_step + first + j * threads * vec.vector, True, num.zero)
            for i in range(len(total)):
                total[i] += frag[i]
        for part in range(max(writes, 1)):
            for j in range(vectors):
                keep = (writes > 0) | (total[j * vec.vector] == NEVER)
                vec.store(y, part * y_step + first + j * threads * vec.vector, keep, total, j * vec.vector)

    return stream


@cache
def stream_roof(bytes_read: int, bytes_written: int) -> float:
    """Seconds in which the current GPU reads and writes so many bytes at best; needs a GPU.

    The mix is taken as the nearest ratio of small numbers; the best of several blockings counts, each measured as the
    median of five bursts over buffers of more than four times the L2 cache.
    """
    device.require()
    ratio = Fraction(bytes_read, bytes_written).limit_denominator(4) if bytes_written else Fraction(1, 1)
    reads, writes = (ratio.numerator, ratio.denominator) if bytes_written else (1, 0)
    total, parts = bytes_read + bytes_written, reads + writes
    times = [
        _time(threads, vectors, reads, writes, total // parts) for threads in (128, 256, 512) for vectors in (1, 2, 4)
    ]
    return min(times) * total / (_whole(total, parts) * parts)


def _whole(total: int, parts: int) -> int:
    """Bytes of one part, in whole blocks of the largest blocking."""
    step = 512 * 4 * 16
    return max(total // parts // step, 1) * step


def _time(threads: int, vectors: int, reads: int, writes: int, part_bytes: int) -> float:
    """Seconds of one launch over parts of `part_bytes`."""
    part = _whole(part_bytes, 1)
    here = device.current()
    copies = max(1, -(-4 * here.l2_bytes // (part * (reads + writes))))
    x = cuda.device_array(part // 4 * reads * copies, "float32")
    y = cuda.device_array(part // 4 * max(writes, 1) * copies, "float32")
    x_bytes, y_bytes = part * reads, part * max(writes, 1)
    stream = build_stream(threads, vectors, reads, writes)
    step = Step(stream, (part // (threads * vectors * 16),), ("y", "x", part // 4, part // 4))
    launch = prepare(step, ("y", "x"), here)
    x0, y0 = (array.__cuda_array_interface__["data"][0] for array in (x, y))
    pointers = [(y0 + i * y_bytes, x0 + i * x_bytes) for i in range(copies)]

    def burst() -> float:
        begin, end = cuda.event(timing=True), cuda.event(timing=True)
        begin.record()
        for i in range(BURST):
            launch(pointers[i % copies], 0)
        end.record()
        end.synchronize()
        return cuda.event_elapsed_time(begin, end) * 1e-3 / BURST

    burst()
    return median(burst() for _ in range(5))


def ceilings(total_bytes: int = 2 << 30) -> dict[str, float]:
    """Measured bytes per second of the current GPU for each mix of reads and writes: {"1:1": 4.2e12, ...}."""
    result: dict[str, Any] = {}
    for reads, writes in MIXES:
        read = total_bytes * reads // (reads + writes)
        result[f"{reads}:{writes}"] = total_bytes / stream_roof(read, total_bytes - read)
    return result
