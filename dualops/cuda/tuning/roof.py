"""Measure the roofline of memory-bound operators: the time in which a plain kernel reads and writes as many bytes.

A plain copy would be a wrong limit: another ratio of reads to writes may have another speed, and small sizes never
reach the speed of large ones.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import cycle, product
from statistics import median
from typing import Any, NamedTuple

from ..compiler.backend import Kernel, builds, cuda, f32, i64, kernel, pointer
from ..launch import device
from ..launch.step import Step, prepare
from ..tile.numbers import numbers
from ..tile.storage import access

BURST = 20  # launches without a wait between them hide the host's time for a launch
MIXES = ((1, 0), (1, 1), (2, 1), (3, 2))
# most reads per write: above it, writes count as reads; with 4097 reads per write, a few blocks would move everything
MOST_READS = 8
BLOCKINGS = tuple(product((128, 256, 512), (1, 2, 4)))  # threads per block, vectors per thread


@builds
def build_stream(threads: int, vectors: int, reads: int, writes: int) -> Kernel:
    """Build stream(y, x, y_step, x_step): a thread sums `reads` * `vectors` vectors and writes the sums `writes` times.

    x has `reads` parts x_step elements apart, y has `writes` parts y_step apart. Without writes, a thread writes only
    sums that no data can have, so that the compiler keeps the loads.
    """
    vec, num = access("float32", True), numbers(f32)
    NEVER = f32(1.2345e30)

    @kernel(pointer(f32), pointer(f32), i64, i64, threads=threads)
    def stream(y, x, y_step, x_step):
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


def stream_roof(bytes_read: int, bytes_written: int) -> float:
    """Return the least seconds in which the current GPU reads and writes these bytes; needs a GPU.

    The ratio of reads to writes is the nearest ratio of small numbers. Each blocking is timed as the median of five
    bursts, over buffers of more than four times the L2 cache, and the best one is returned.
    """
    return best_blocking(bytes_read, bytes_written).seconds


class Blocking(NamedTuple):
    """Threads and vectors of the kernel, and the seconds that it takes for the requested bytes."""

    seconds: float
    threads: int
    vectors: int


@cache
def best_blocking(bytes_read: int, bytes_written: int, enough: float = 0.0) -> Blocking:
    """Return the fastest blocking for these bytes. Stops at the first one that takes at most `enough` seconds."""
    device.require()
    found: list[Blocking] = []
    for threads, vectors in BLOCKINGS:
        stream = Stream(bytes_read, bytes_written, threads, vectors)
        found.append(Blocking(stream.seconds() * stream.scale, threads, vectors))
        if found[-1].seconds <= enough:
            break
    return min(found)


class Stream:
    """The kernel with buffers of more than four times the L2 cache. Each call launches it on the next buffer.

    bytes_read, bytes_written: the requested bytes. A launch moves whole blocks in the nearest ratio of small numbers.
    So `scale` times the seconds of one launch is the time of these bytes. Launches go to the default stream.
    """

    def __init__(self, bytes_read: int, bytes_written: int, threads: int, vectors: int):
        reads, writes = _mix(bytes_read, bytes_written)
        total, parts = bytes_read + bytes_written, reads + writes
        part = _whole(total, parts)
        self.scale = total / (part * parts)
        here = device.current()
        copies = max(1, -(-4 * here.l2_bytes // (part * parts)))
        x_bytes, y_bytes = part * reads, part * max(writes, 1)
        self._buffers = x, y = [cuda.device_array(size // 4 * copies, "float32") for size in (x_bytes, y_bytes)]
        kernel = build_stream(threads, vectors, reads, writes)
        step = Step(kernel, (part // (threads * vectors * 16),), ("y", "x", part // 4, part // 4))
        self._launch = prepare(step, ("y", "x"), here)
        x0, y0 = (array.__cuda_array_interface__["data"][0] for array in (x, y))
        self._pointers = cycle([(y0 + i * y_bytes, x0 + i * x_bytes) for i in range(copies)])

    def __call__(self) -> None:
        self._launch(next(self._pointers), 0)

    def seconds(self) -> float:
        """Return the seconds of one launch: the median of five bursts, after one that is not timed."""
        self._burst()
        return median(self._burst() for _ in range(5))

    def _burst(self) -> float:
        begin, end = cuda.event(timing=True), cuda.event(timing=True)
        begin.record()
        for _ in range(BURST):
            self()
        end.record()
        end.synchronize()
        return cuda.event_elapsed_time(begin, end) * 1e-3 / BURST


def _mix(bytes_read: int, bytes_written: int) -> tuple[int, int]:
    """Return the numbers of parts to read and to write: the nearest ratio of small numbers."""
    if bytes_read > MOST_READS * bytes_written:
        return 1, 0
    ratio = Fraction(bytes_read, bytes_written).limit_denominator(4)
    return ratio.numerator, ratio.denominator


def _whole(total: int, parts: int) -> int:
    """Return the bytes of one part, rounded to whole blocks of the largest blocking."""
    step = 512 * 4 * 16
    return max(total // parts // step, 1) * step


def ceilings(total_bytes: int = 2 << 30) -> dict[str, float]:
    """Return the measured bytes per second of the current GPU for several ratios of reads to writes: {"1:1": 4.2e12,
    ...}."""
    result: dict[str, Any] = {}
    for reads, writes in MIXES:
        read = total_bytes * reads // (reads + writes)
        result[f"{reads}:{writes}"] = total_bytes / stream_roof(read, total_bytes - read)
    return result
