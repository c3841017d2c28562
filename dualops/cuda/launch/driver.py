"""Calls of the CUDA driver, except for GPU properties and launches: contexts, streams, events, copies.

A context is current in one thread. A thread of a pool, a DataLoader's, or torch's own for backward begins without one,
and almost all driver calls fail there. So dualops calls the driver while the primary context of the arrays' GPU is
current:

    other = away(index)             # nearly always None; takes 0.3 microseconds
    with other or nullcontext():
        ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from time import perf_counter
from typing import Any

from ..compiler.backend import SIMULATED

cu: Any = None
if not SIMULATED:
    with suppress(ImportError):  # without it no kernel can be launched: `device.require` raises an error
        from cuda.bindings import driver as cu


class Current:
    """A context manager that makes the primary context of a GPU current in this thread.

    Afterwards the previous context is current again. In a thread without one the new one stays, as with torch.
    """

    def __init__(self, index: int):
        self.index = index

    def __enter__(self) -> None:
        self.before = done(cu.cuCtxGetCurrent())
        done(cu.cuCtxSetCurrent(_primary(self.index)))

    def __exit__(self, *raised: object) -> None:
        if int(self.before):
            done(cu.cuCtxSetCurrent(self.before))


class _Thread(threading.local):
    """State of a thread."""

    has_context = False


_thread = _Thread()


def away(index: int, current: Callable[[], int] | None = None) -> Current | None:
    """Return None if GPU `index` is current in this thread (or simulated), else a context manager that makes it so.

    current: returns the current GPU quickly, in a thread that has a context.
    """
    if SIMULATED:
        return None
    if not _thread.has_context:
        error, found = cu.cuCtxGetDevice()
        if error != 0:
            return Current(index)
        _thread.has_context = True  # a thread keeps its context
        return None if int(found) == index else Current(index)
    return None if (current or current_device)() == index else Current(index)


def current_device() -> int:
    """Return the GPU that is current in this thread, -1 if none is."""
    error, found = cu.cuCtxGetDevice()
    return int(found) if error == 0 else -1


@cache  # an error is not cached; a retained primary context stays until the process ends
def _primary(index: int) -> Any:
    return done(cu.cuDevicePrimaryCtxRetain(done(cu.cuDeviceGet(index))))


def done(answer: tuple[Any, ...], what: str = "dualops.cuda") -> Any:
    """Return the result of a driver's function. Raises RuntimeError for an error, which begins with `what`."""
    error, *result = answer
    if error != 0:
        raise RuntimeError(f"{what}: the CUDA driver answered {getattr(error, 'name', error)}")
    return result[0] if result else None


def device_of_address(address: int) -> int:
    """Return the number of the GPU that an address belongs to, 0 for no address."""
    if address == 0:
        return 0
    attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, ordinal = cu.cuPointerGetAttribute(attribute, address)
    if error == cu.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # any context will do
        with Current(0):
            error, ordinal = cu.cuPointerGetAttribute(attribute, address)
    return int(ordinal) if error == 0 else 0  # for memory unknown to CUDA, the launch will fail


def is_capturing(handle: int) -> bool:
    """Whether a stream is being captured into a CUDA graph. Its GPU must be current."""
    _, status = cu.cuStreamIsCapturing(handle)  # an error means that another stream's capture forbids the call
    return status == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


def elapsed(work: Callable[[], None], handle: int) -> float:
    """Return the GPU seconds of what `work` launches on a stream of the current GPU. Waits for them."""
    if SIMULATED:
        began = perf_counter()
        work()
        return perf_counter() - began
    first, last = (done(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DEFAULT)) for _ in range(2))
    try:
        done(cu.cuEventRecord(first, handle))
        work()
        done(cu.cuEventRecord(last, handle))
        done(cu.cuEventSynchronize(last))
        return done(cu.cuEventElapsedTime(first, last)) / 1e3
    finally:
        for event in (first, last):
            done(cu.cuEventDestroy(event))


def copy(target: Any, source: Any, nbytes: int, handle: int) -> None:
    """Copy memory of the current GPU, given by addresses, in the order of a stream (simulated, from array to array)."""
    if SIMULATED:
        target[...] = source
    else:
        done(cu.cuMemcpyDtoDAsync(target, source, nbytes, handle))


_SPARE: dict[int, list[Any]] = {}  # GPU -> events of deleted marks


class Mark:
    """A position in a stream's work. Create it while its GPU, `index`, is current; the rest works from any GPU."""

    event: Any = None

    def __init__(self, handle: int, index: int):
        self.index, self.over = index, False
        try:
            self.event = _SPARE.setdefault(index, []).pop()
        except IndexError:
            self.event = done(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        done(cu.cuEventRecord(self.event, handle))

    def is_over(self) -> bool:
        """Whether all launches before it are done. Does not wait, nor disturb a stream that is being captured."""
        if not self.over:
            with away(self.index) or nullcontext():
                relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
                before = done(cu.cuThreadExchangeStreamCaptureMode(relaxed))
                (answer,) = cu.cuEventQuery(self.event)
                done(cu.cuThreadExchangeStreamCaptureMode(before))
            self.over = answer == 0
        return self.over

    def hold_up(self, handle: int) -> None:
        """Make later launches on a stream wait for this mark. The stream is of the mark's GPU, which is current."""
        done(cu.cuStreamWaitEvent(handle, self.event, 0))

    def __del__(self, spare: dict[int, list[Any]] = _SPARE) -> None:
        if self.event is not None:
            # the next mark records the event again, even if this mark is not over
            spare.setdefault(self.index, []).append(self.event)


def handle_of(stream: Any) -> int:
    """Return the CUstream of an integer, or of a stream object of torch, CuPy, Numba or cuda.core."""
    if isinstance(stream, int):
        return stream
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if hasattr(stream, "handle"):
        handle = stream.handle
        return int(getattr(handle, "value", handle) or 0)
    raise TypeError(f"stream is a {type(stream).__qualname__}, expected an integer or a stream object")
