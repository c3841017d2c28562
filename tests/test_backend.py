"""Where kernels would run, by what a driver answers; it is made up, so that this holds with and without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dualops.cuda import backend


class Driver(SimpleNamespace):
    """Its answers, and how often it was asked."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, init: int = 0, gpus: int = 1, missing: bool = False):
        super().__init__(init=init, gpus=gpus, missing=missing, asked=0)

    def cuInit(self, flags: int) -> tuple[int]:
        self.asked += 1
        if self.missing:  # as cuda.bindings says it: DynamicLibNotFoundError
            raise RuntimeError("Failure finding libcuda.so")
        return (self.init,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, self.gpus


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    backend._find_gpu.cache_clear()
    yield
    backend._find_gpu.cache_clear()


def install(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))  # type: ignore[misc]
    return driver


NOWHERE = {
    "no library": Driver(missing=True),
    "no device": Driver(init=100),
    "none visible": Driver(gpus=0),
}


@pytest.mark.parametrize("driver", NOWHERE.values(), ids=NOWHERE)
def test_without_a_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    install(driver, monkeypatch)
    assert backend.where() is None


def test_without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # type: ignore[misc]
    assert backend.where() is None


def test_a_gpu_is_asked_for_until_one_answers_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(Driver(gpus=0), monkeypatch)
    assert [backend.where(), backend.where()] == [None, None]
    driver.gpus = 2
    assert [backend.where(), backend.where(), backend.where()] == ["gpu"] * 3
    assert driver.asked == 3


def test_in_the_simulator_no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(Driver(), monkeypatch)
    monkeypatch.setattr(backend, "SIMULATED", True)
    assert backend.where() == "simulator" and not driver.asked
