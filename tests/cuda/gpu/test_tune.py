"""Ways timed on the GPU: each runs, the fastest is what this process and a fresh one take, results stay right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dualops.cuda
from dualops.cuda.launch import OPERATIONS

TAKEN = """
import torch, dualops.cuda
a, b = (torch.zeros(512, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2))
print(dualops.cuda.plan("matmul", a, b).choice.reason)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path))
    yield
    for operation in OPERATIONS["matmul"]:
        operation.forget()


@pytest.mark.alone
def test_the_fastest_is_what_is_taken():
    a, b, dy = (torch.randn(480, 480, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    record = dualops.cuda.tune("matmul", a, b, top=5)
    assert len(record.seconds) == 5 and all(1e-6 < seconds < 1e-2 for seconds in record.seconds.values())
    choice = dualops.cuda.plan("matmul", a, b).choice
    assert (choice.rung, str(choice.config)) == record.best and "; measured: " in choice.reason
    y = dualops.cuda.matmul(a, b)
    torch.testing.assert_close(y.float(), a.float() @ b.float(), rtol=2e-2, atol=2e-1)
    dualops.cuda.tune("matmul", a, b, dy, backward=True, top=2)
    done = subprocess.run([sys.executable, "-c", TAKEN], capture_output=True, text=True)
    assert "; measured: " in done.stdout, done.stderr


def test_a_captured_stream_is_refused():
    x = torch.randn(64, 64, device="cuda")
    dualops.cuda.softmax(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="on a stream that is being captured"), torch.cuda.graph(graph):
        dualops.cuda.tune("softmax", x, top=1)
