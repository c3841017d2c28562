"""Kernels on a GPU, with torch: without either these tests are an error, not a success."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from dualops.cuda import backend
from dualops.machine import missing

if backend.where() != "gpu":
    told = "kernels are simulated" if backend.SIMULATED else " ".join(missing())
    raise pytest.UsageError(f"tests/cuda/gpu needs a CUDA GPU: {told}")
if find_spec("torch") is None:
    raise pytest.UsageError("tests/cuda/gpu needs torch")


@pytest.fixture(autouse=True)
def memory_from_torch_is_nan() -> Iterator[None]:
    """torch fills what it allocates: what a kernel leaves unwritten, or reads before it is written, shows as NaN."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with torch.utils.deterministic.fill_uninitialized_memory, its default
    yield
    torch.use_deterministic_algorithms(before)
    torch.cuda.synchronize()  # an error of a kernel belongs to the test that launched it


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile on all cores what the collected cases need."""
    from tests.cuda.gpu.warm import Job, warm

    found: list[dict[str, Any]] = [
        item.callspec.params
        for item in session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    warm(
        Job(params["direction"].spec.name, params["direction"].backward, params.get("rung"), params["case"])
        for params in found
        if {"direction", "case"} <= params.keys()
    )
