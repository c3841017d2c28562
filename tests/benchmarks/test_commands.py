"""Commands of the benchmarks that time something need a GPU, and say so."""

import pytest
import torch

from benchmarks.__main__ import main

COMMANDS = {
    "run": ["run", "softmax"],
    "ladder": ["ladder", "softmax"],
    "ladder, once": ["ladder", "matmul", "--once"],
    "scaling": ["scaling"],
    "host": ["host"],
    "context": ["context"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_gpu_the_command_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(COMMANDS[name]) == 1
    assert ("needs two GPUs" if name == "context" else "need a GPU") in capsys.readouterr().err
