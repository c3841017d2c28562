"""Kernels on a GPU, with torch: without either these tests are an error, not a success."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

from dualops.cuda.compiler import backend
from dualops.machine import missing

if backend.where() != "gpu":
    reasons = "kernels are simulated" if backend.SIMULATED else " ".join(missing())
    raise pytest.UsageError(f"tests/cuda/gpu needs a CUDA GPU: {reasons}")
if find_spec("torch") is None:
    raise pytest.UsageError("tests/cuda/gpu needs torch")


@pytest.fixture(autouse=True)
def memory_from_torch_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a kernel leaves unwritten, or reads before it is written, shows as NaN. Large memory is returned."""
    import torch

    from tests.poison import new_memory_is_nan

    with new_memory_is_nan():
        yield
    torch.cuda.synchronize()  # an error of a kernel belongs to the test that launched it
    if request.node.get_closest_marker("xdist_group"):
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests whose kernels are too many: those that DUALOPS_TEST_LEFT_OUT lists. Where that file is missing,
    choose among the collected tests, and write it.
    """
    if not (name := os.environ.get("DUALOPS_TEST_LEFT_OUT")):
        return
    path = Path(name)
    if not path.exists():
        from tests.cuda.gpu.warm import MOST_KERNELS, calls_of_tests, select

        changed = os.environ.get("DUALOPS_TEST_CHANGED")
        modules = None if changed is None else frozenset(changed.split())
        found = select(calls_of_tests(items), MOST_KERNELS, modules)
        path.write_text("\n".join(sorted(found.left_out)))
        config.get_terminal_writer().line(f"chosen: {found.summary}")
    left_out = {*path.read_text().splitlines()}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile on all cores what the collected tests need; among several processes who started them has seen to that."""
    if hasattr(session.config, "workerinput"):
        return
    from tests.cuda.gpu.warm import calls_of_tests, warm

    result = warm(chain.from_iterable(calls_of_tests(session.items).values()))
    session.config.get_terminal_writer().line(f"warm: {result}")
