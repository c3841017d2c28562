"""Configs ranked: the tables, what is compiled for them, and exit codes. Nothing here compiles a kernel."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from dualops import estimate as cost
from dualops.cuda.compiler.compile import Report
from dualops.estimate import candidates


def test_what_a_call_takes_and_what_bounds_it(run):
    code, out, err = run("estimate", "flash_attention", "--problem", "B=1 H=2 S=2048 D=128 causal=True", "--top", 1)
    assert (code, err) == (0, "")
    problem = "flash_attention q=1x2x2048x128:bfloat16 k=1x2x2048x128:bfloat16 v=1x2x2048x128:bfloat16 causal=True"
    assert " ".join(out.split()).startswith(f"{problem} on NVIDIA H200 forward ")
    assert "\nbackward\n" in out and "TFLOP/s" in out and "TB/s" not in out
    assert out.count("*") >= 3 and "waves " in out and "o: consumers=2" in out and "block_kv=" in out
    assert "registers" not in out


@pytest.mark.parametrize("operator", cost.SIZES)
def test_the_default_problem_is_printed_in_80_columns(run, operator: str):
    code, out, _ = run("estimate", operator, "--top", 40)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    shown = " ".join(out.partition("\non ")[0].split())
    assert run("estimate", operator, "--top", 40, "--problem", shown.partition(" ")[2])[1] == out


@pytest.mark.parametrize("operator", ["softmax", "rms_norm", "layer_norm"])
def test_what_the_memory_bounds_has_bytes_a_second(run, operator: str):
    """Rows are read and written once: 512 MiB in the time that is printed."""
    code, out, _ = run("estimate", operator, "--problem", "M=32768 N=4096", "--forward", "--top", 1)
    assert code == 0 and "TFLOP/s" not in out
    for milliseconds, speed in re.findall(r"([\d.]+) ms +([\d.]+) TB/s", out):
        assert float(speed) == pytest.approx(2 * 2 * 32768 * 4096 / 1e9 / float(milliseconds), rel=0.01)


def test_a_wide_window_has_wide_columns(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = ("estimate", "flash_attention", "--top", 3)
    out = run(*words)[1]
    assert "dk, dv: consumers=2 block_q=64 stages=3 overlap=False" in out and max(map(len, out.splitlines())) <= 160
    monkeypatch.setenv("COLUMNS", "70")
    narrow = run(*words)[1].partition("* marks the Config")[0]
    assert max(map(len, narrow.splitlines())) <= 70 and "overlap=False" in narrow


def test_forward_on_another_gpu(run):
    code, out, _ = run("estimate", "matmul", "--arch", "sm_89", "--forward", "--top", 2)
    assert code == 0
    assert "on NVIDIA GeForce RTX 4090\n\nforward\n" in out and "backward" not in out and "sm90" not in out


def test_what_is_compiled_is_printed(run, monkeypatch: pytest.MonkeyPatch):
    def built(wanted: Sequence[Any], jobs: int) -> list[Report]:
        return [Report(each.kernel.name, each.arch, 167, 0, 12, 0, 0, 1, (), False, 1.0) for each in wanted]

    monkeypatch.setattr("dualops.cli.ranking.require_compiler", lambda: None)
    monkeypatch.setattr(candidates, "build_all", built)
    code, out, err = run("estimate", "matmul", "--forward", "--top", 1, "--build", 2)
    assert code == 0
    assert " ".join(out.split()).count("167 registers") == 2 and out.count("NOT ALLOWED") == 2
    assert max(map(len, out.splitlines())) <= 80
    assert err.startswith("[1/2] y: ")


WRONG = [
    (["matmul", "--arch", "h900"], "arch is 'h900', expected one of " + ", ".join(cost.ARCHITECTURES)),
    (["rope_tables"], f"rope_tables: no estimates, expected one of {', '.join(cost.SIZES)}"),
    (["matmul", "--problem", "M=4096 N"], "matmul: N, expected name=..., each once, of "),
    (["matmul", "--problem", "a=2x3 b=4x5"], "matmul: "),
    (["flash_attention", "--problem", "B=1 H=1 S=256 D=64 softcap=3.0"], "flash_attention: no estimates with softcap"),
    (["flash_attention", "--problem", "B=1 H=1 S=256 D=64 dtype=int8"], "flash_attention: "),
    (
        ["flash_attention", "--arch", "rtx5090", "--problem", "B=2 H=16 S=8192 D=192"],
        "flash_attention_backward: no estimates on NVIDIA GeForce RTX 5090, where a call takes the rung "
        "simt. --forward leaves the gradient out",
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
