"""Kernels in Numba's simulator, in a process of their own: Numba reads the switch when it is first imported."""

from collections.abc import Iterator
from typing import Any

import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler import backend
from dualops.cuda.lion import forward, of_lists

if not backend.SIMULATED:
    raise pytest.UsageError(
        "tests/cuda/simulator runs kernels in the simulator: NUMBA_ENABLE_CUDASIM=1 pytest tests/cuda/simulator"
    )


@pytest.fixture(params=["forward", "reversed"])
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with the threads in this order, and in the other."""
    with simulator.order(request.param):
        yield request.param


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched."""
    names: list[str] = []
    run = simulator.launch

    def noted(function: Any, *args: Any, **options: Any) -> None:
        names.append(function.__name__)
        run(function, *args, **options)

    monkeypatch.setattr(simulator, "launch", noted)
    return names


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches do nothing, for tests of what a call keeps, refuses or returns, whatever was computed."""
    monkeypatch.setattr(simulator, "launch", lambda *_, **__: None)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """lion keeps nothing from test to test."""
    for kept in (forward.plans, forward.families, of_lists.ready, of_lists.bounds):
        kept.clear()
    yield
    for kept in (forward.plans, forward.families, of_lists.ready, of_lists.bounds):
        kept.clear()
