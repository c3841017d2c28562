"""The demo on a GPU: copy arrays to and from it, time by events, measure peak memory and roofs.

Arrays are torch's if torch sees a GPU, else Numba's. Numba has no bfloat16 arrays. There a bfloat16 array is a uint16
array that presents itself as two untyped bytes per element, as torch's and CuPy's bfloat16 arrays do.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import ceil
from statistics import median
from typing import Any, Protocol

import numpy as np

from ..spec.meta import numpy_dtype
from .problems import Arrays, Job

BURSTS, CALLS = 5, 20  # the median of bursts; calls per burst
BURST_SECONDS = 0.5  # fewer calls if a burst would take longer
FLUSH = 4  # memory-bound calls rotate through buffers of this many times the L2, to time memory and not the cache
MAX_SETS = 64

BFLOAT16 = numpy_dtype("bfloat16")


class Library(Protocol):
    """What the demo needs from an array library."""

    def upload(self, array: np.ndarray) -> Any: ...

    def download(self, array: Any) -> np.ndarray: ...

    def milliseconds(self, work: Callable[[], None]) -> float:
        """Measure the time between two events, one before and one after `work`."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int | None:
        """Return the peak memory that `work` added; None if the library does not count."""
        ...


class Torch:
    def __init__(self, torch: Any, device: str = "cuda"):
        self.torch, self.device = torch, device

    def upload(self, array: np.ndarray) -> Any:
        if array.dtype == BFLOAT16:
            return self.torch.from_numpy(array.view(np.int16)).to(self.device).view(self.torch.bfloat16)
        return self.torch.from_numpy(array).to(self.device)

    def download(self, array: Any) -> np.ndarray:
        if array.dtype == self.torch.bfloat16:
            return array.view(self.torch.int16).cpu().numpy().view(BFLOAT16)
        return array.cpu().numpy()

    def milliseconds(self, work: Callable[[], None]) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def peak_bytes(self, work: Callable[[], None]) -> int | None:
        self.torch.cuda.synchronize()
        before = self.torch.cuda.memory_allocated()
        self.torch.cuda.reset_peak_memory_stats()
        work()
        self.torch.cuda.synchronize()
        return self.torch.cuda.max_memory_allocated() - before


class TwoBytes:
    """A Numba array of uint16 that presents itself as bfloat16: two bytes without a NumPy type."""

    def __init__(self, bits: Any):
        self.bits = bits
        self.__cuda_array_interface__ = {**bits.__cuda_array_interface__, "typestr": "<V2"}


class Numba:
    def __init__(self, cuda: Any):
        self.cuda = cuda

    def upload(self, array: np.ndarray) -> Any:
        if array.dtype == BFLOAT16:
            return TwoBytes(self.cuda.to_device(array.view(np.uint16)))
        return self.cuda.to_device(array)

    def download(self, array: Any) -> np.ndarray:
        if isinstance(array, TwoBytes):
            return array.bits.copy_to_host().view(BFLOAT16)
        return array.copy_to_host()

    def milliseconds(self, work: Callable[[], None]) -> float:
        start, end = self.cuda.event(), self.cuda.event()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def peak_bytes(self, work: Callable[[], None]) -> int | None:
        return None


def library() -> Library:
    """Return torch if it is installed and sees the GPU, else Numba."""
    try:
        torch = import_module("torch")
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        return Torch(torch)
    return Numba(import_module("dualops.cuda.compiler.backend").cuda)


class Bench:
    """One problem on the GPU, with enough copies of its inputs and results to exceed the L2."""

    def __init__(self, job: Job, arrays: Arrays, kernel: str | None):
        self.job, self.library, self.kernel = job, library(), kernel
        self.call = getattr(import_module("dualops.cuda"), job.task.name)
        l2_bytes = import_module("dualops.cuda.launch.device").current().l2_bytes
        copies = 1 if job.compute_bound else ceil(FLUSH * l2_bytes / max(job.bytes_moved, 1))
        self.inputs = [self._up(arrays) for _ in range(min(copies, MAX_SETS))]
        self.outs = [self._up(self._poisoned()) for _ in self.inputs]

    def _up(self, arrays: Arrays) -> dict[str, Any]:
        """Copy arrays to the GPU, except inputs that may be numbers on the host: a seed, or lr."""
        numbers = {given.name for given in self.job.task.inputs if given.host}
        return {name: x.item() if name in numbers else self.library.upload(x) for name, x in arrays.items()}

    def _poisoned(self) -> Arrays:
        """Make result arrays with all bits set: what a kernel does not write shows as NaN."""
        empty = {}
        for name, meta in self.job.returned.items():
            dtype = numpy_dtype(meta.dtype)
            bits = np.full(meta.size * dtype.itemsize, 0xFF, np.uint8)
            empty[name] = bits.view(dtype).reshape(meta.shape)
        return empty

    def one(self, turn: int) -> None:
        """Make one call, into the results of this turn."""
        out = list(self.outs[turn].values())
        self.call(
            **self.inputs[turn], **self.job.params, kernel=self.kernel, out=tuple(out) if len(out) > 1 else out[0]
        )

    def results(self) -> Arrays:
        self.one(0)
        return {name: self.library.download(array) for name, array in self.outs[0].items()}

    def seconds(self) -> float:
        """Time one call with `out=`: the median of bursts of consecutive calls."""
        self.one(0)
        alone = self.library.milliseconds(lambda: self.one(0)) / 1e3
        calls = max(1, min(CALLS, int(BURST_SECONDS / max(alone, 1e-9))))

        def burst() -> None:
            for turn in range(calls):
                self.one(turn % len(self.inputs))

        burst()
        return median(self.library.milliseconds(burst) for _ in range(BURSTS)) / calls / 1e3

    def extra_bytes(self) -> int | None:
        """Return the peak memory beyond inputs and results, if the library counts it."""
        return self.library.peak_bytes(lambda: self.one(0))

    def roof_seconds(self) -> float | None:
        """Return the time of a plain copy kernel for the same bytes; None if arithmetic is the limit or no bytes are
        moved.
        """
        if self.job.compute_bound or not self.job.bytes_moved:
            return None
        cost, problem = self.job.task.cost, self.job.problem
        return import_module("dualops.cuda.tuning.roof").stream_roof(
            cost.bytes_read(problem), cost.bytes_written(problem)
        )
