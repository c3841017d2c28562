"""Settings that all tests share."""

import gc
import os

import pytest
from hypothesis import settings

from tests.gpus import first_gpu
from tests.shares import share_of

# the same examples in every run: a red test is red everywhere
settings.register_profile("dualops", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("dualops")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=300, help="random problems for each fuzzed test (default: 300)")
    parser.addoption("--share", type=int, default=1, help="run one of this number of tests, see tests/shares.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda(count=1): needs this number of GPUs")
    config.addinivalue_line("markers", "xdist_group(name): run by one of several processes, one after another")
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        os.environ.update(first_gpu(int(worker.removeprefix("gw"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    one_in = int(str(config.getoption("--share")))
    if one_in < 1:
        raise pytest.UsageError(f"--share is {one_in}, expected at least 1")
    if one_in > 1:
        taken = {item.nodeid for item in share_of(items, one_in)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in taken])
        items[:] = [item for item in items if item.nodeid in taken]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("cuda"):
        from torch.cuda import device_count

        wanted, found = (*marker.args, 1)[0], device_count()
        if found < wanted:
            pytest.skip(f"needs {wanted} CUDA GPU{'s' if wanted > 1 else ''}, found {found}")


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: looking for garbage there took a quarter of what Numba compiles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def fuzz_count(pytestconfig: pytest.Config) -> int:
    """How many problems a fuzzed test is to draw."""
    return int(str(pytestconfig.getoption("--fuzz")))
