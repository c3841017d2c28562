"""Kernels compiled offline, without a GPU; numba-cuda and nvJitLink must be installed."""

from importlib.util import find_spec

import pytest

from dualops.cuda.compiler import backend

if backend.SIMULATED:
    raise pytest.UsageError("tests/cuda/compile compiles kernels: run it without NUMBA_ENABLE_CUDASIM")
if find_spec("numba_cuda") is None:
    raise pytest.UsageError("tests/cuda/compile needs numba-cuda: pip install 'dualops[cu13]'")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of cubins, with none in it."""
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path))
    return tmp_path
