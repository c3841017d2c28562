"""Kernels in Numba's simulator, in a process of their own: Numba reads the switch when it is first imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dualops.cuda import backend, simulator

if not backend.SIMULATED:
    raise pytest.UsageError(
        "tests/cuda/simulator runs kernels in the simulator: NUMBA_ENABLE_CUDASIM=1 pytest tests/cuda/simulator"
    )


@pytest.fixture(params=["forward", "reversed"])
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with the threads in this order, and in the other."""
    with simulator.order(request.param):
        yield request.param
