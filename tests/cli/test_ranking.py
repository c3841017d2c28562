"""Configs ranked: the tables, what is compiled for them, and exit codes. Nothing here compiles a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dualops.cuda import cost
from dualops.cuda.compile import Report
from dualops.cuda.cost import candidates


def test_what_a_call_takes_and_what_bounds_it(run):
    code, out, err = run("estimate", "flash_attention", "--problem", "B=1 H=2 S=2048 D=128 causal=True", "--top", 1)
    assert (code, err) == (0, "")
    assert "flash_attention, forward, NVIDIA H200 SXM" in out and "flash_attention, backward, NVIDIA H200 SXM" in out
    assert out.count("*") >= 3 and "waves " in out and "o: consumers=2 block_kv=" in out
    assert "regs" not in out


def test_forward_on_another_gpu(run):
    code, out, _ = run("estimate", "matmul", "--arch", "sm_89", "--forward", "--top", 2)
    assert code == 0
    assert "matmul, forward, NVIDIA GeForce RTX 4090" in out and "backward" not in out and "sm90" not in out


def test_what_is_compiled_is_told(run, monkeypatch: pytest.MonkeyPatch):
    def built(wanted: Sequence[Any], jobs: int) -> list[Report]:
        return [Report(each.kernel.name, each.arch, 167, 0, 12, 0, 0, 1, (), False, 1.0) for each in wanted]

    monkeypatch.setattr("dualops.cli.ranking.require_compiler", lambda: None)
    monkeypatch.setattr(candidates, "build_all", built)
    code, out, err = run("estimate", "matmul", "--forward", "--top", 1, "--build", 2)
    assert code == 0
    assert "regs" in out and out.count("167") == 2 and out.count("12 NOT ALLOWED") == 2
    assert err.startswith("[1/2] y: ")


WRONG = [
    (["matmul", "--arch", "h900"], "arch is 'h900', expected one of " + ", ".join(cost.ARCHITECTURES)),
    (["rope"], "rope: no estimates, expected one of flash_attention, matmul, retention, softmax, rms_norm, layer_norm"),
    (
        ["rms_norm", "--problem", "M=64 N=524288"],
        "rms_norm: no estimates where a call takes LongRowsConfig. --forward leaves the gradient out",
    ),
    (
        ["layer_norm", "--problem", "M=64 N=262144", "--forward"],
        "layer_norm: no estimates where a call takes RingConfig",
    ),
    (["softmax", "--problem", "M=4096 N=4097"], "softmax: no estimates where rows are no multiple of 16 bytes"),
    (["matmul", "--problem", "M=4096 N"], "matmul: N, expected name=..., each once, of "),
    (["matmul", "--problem", "a=2x3 b=4x5"], "matmul: "),
    (["flash_attention", "--problem", "B=1 H=1 S=256 D=64 softcap=3.0"], "flash_attention: no estimates with softcap"),
    (["flash_attention", "--problem", "B=1 H=1 S=256 D=64 dtype=int8"], "flash_attention: "),
    (
        ["flash_attention", "--arch", "rtx5090", "--problem", "B=2 H=16 S=8192 D=192"],
        "flash_attention_backward: no estimates on NVIDIA GeForce RTX 5090, where a call takes the rung simt, not one "
        "of sm90, sm80. --forward leaves the gradient out",
    ),
    (["flash_attention", "--problem", "B=1 H=1 S=256 D=64 causal=1.5"], "flash_attention: "),
    (["matmul", "--top", "0"], "--top is 0, expected at least 1"),
    (["matmul", "--build", "-1"], "--build is -1, expected at least 0"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_calls_are_one_line(run, arguments: list[str], message: str):
    code, out, err = run("estimate", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"dualops estimate: {message}") and err.count("\n") == 1
