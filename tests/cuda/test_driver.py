"""Contexts of threads, events and streams, against a driver that knows no more than what each thread has current."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dualops.cuda.launch import driver

NOTHING, INVALID = 0, 201


class FakeDriver:
    """Contexts of two GPUs, numbered 1000 and 1001; the current one of each thread."""

    CUresult = SimpleNamespace(CUDA_ERROR_INVALID_CONTEXT=INVALID)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self) -> None:
        self.thread = threading.local()
        self.set = 0
        self.events: list[tuple[str, int]] = []  # what was done, and on which GPU

    def current(self) -> int:
        return getattr(self.thread, "context", 0)

    def cuDeviceGet(self, index: int) -> Any:
        return NOTHING, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return (NOTHING, 1000 + device) if device < 2 else (101,)

    def cuCtxGetCurrent(self) -> Any:
        return NOTHING, self.current()

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.thread.context = context
        self.set += 1
        return (NOTHING,)

    def cuCtxGetDevice(self) -> Any:
        return (NOTHING, self.current() - 1000) if self.current() else (INVALID, None)

    def cuPointerGetAttribute(self, attribute: int, address: int) -> Any:
        return (NOTHING, address // 100) if self.current() else (INVALID, None)

    def _event(self, name: str, *result: Any) -> Any:
        if not self.current():
            return (INVALID, *result)
        self.events.append((name, self.current() - 1000))
        return (NOTHING, *result)

    def cuEventCreate(self, flags: int) -> Any:
        return self._event("create", "event")

    def cuEventRecord(self, event: str, handle: int) -> Any:
        return self._event("record")

    def cuEventQuery(self, event: str) -> Any:
        return self._event("query")

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> Any:
        return NOTHING, 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(driver, "cu", made)
    driver._primary.cache_clear()
    return made


def in_a_thread(function: Any) -> Any:
    """What it returns in a thread that has no context."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_without_a_context_gets_one_and_keeps_it(fake):
    def work() -> tuple[Any, ...]:
        first = driver.away(0)
        assert first is not None
        with first:
            inside = fake.current()
        return inside, fake.current(), driver.away(0)

    assert in_a_thread(work) == (1000, 1000, None)
    assert fake.set == 1
    assert fake.current() == 0, "that of another thread is its own"


def test_another_gpu_is_current_for_a_while(fake):
    fake.cuCtxSetCurrent(1000)
    assert driver.away(0) is None
    other = driver.away(1)
    assert other is not None
    seen = []

    def fails() -> None:
        with other:
            seen.append(fake.current())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == [1001]
    assert fake.current() == 1000


def test_an_error_of_the_driver_is_raised(fake):
    with pytest.raises(RuntimeError, match="the CUDA driver answered 101"), driver.Current(2):
        pass


def test_an_address_is_known_in_every_thread(fake):
    assert in_a_thread(lambda: driver.device_of_address(100)) == 1
    assert in_a_thread(lambda: driver.device_of_address(0)) == 0


def test_a_mark_is_asked_and_let_go_of_in_any_thread(fake):
    driver._SPARE.clear()
    fake.cuCtxSetCurrent(1001)
    marks = [driver.Mark(5, 1)]
    assert in_a_thread(lambda: marks[0].is_over())
    in_a_thread(marks.clear)
    again = [driver.Mark(5, 1), driver.Mark(5, 1)]  # with the event of the one that is gone, and another
    assert fake.events == [("create", 1), ("record", 1), ("query", 1), ("record", 1), ("create", 1), ("record", 1)]
    del again
    driver._SPARE.clear()  # of a driver that is none


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (7, 7),
        (SimpleNamespace(cuda_stream=7), 7),
        (SimpleNamespace(ptr=7), 7),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 7)), 7),
        (SimpleNamespace(handle=SimpleNamespace(value=7)), 7),
        (SimpleNamespace(handle=None), 0),
    ],
)
def test_streams_of_every_library(stream, handle):
    assert driver.handle_of(stream) == handle


def test_what_is_no_stream():
    with pytest.raises(TypeError, match="stream is a str, expected an integer or a stream object"):
        driver.handle_of("main")
